"""Upcasting: brings messages and states that an earlier version of an app wrote to the current shape.

The version of a message is its field `schema_version`, 1 without one. The version of a state is stored with it: version
1 is the plain mapping, any later one is an array of the version and the mapping. Both are msgpack.
(The term: upcasters of Axon Framework.)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from millstream.errors import ConfigError, DecodeError, text_of
from millstream.handlers.decoding import default_of
from millstream.handlers.encoding import encode_output
from millstream.model import Message, State, value_of
from millstream.redis_client.key_names import to_wire

MessageUpcast = Callable[[dict[str, bytes]], Mapping[str, object]]
"""Returns the fields of a message in the next version, with values that a handler may return."""

StateUpcast = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Returns a state in the next version."""

VERSION_FIELD = "schema_version"

_WIRE_FIELD = VERSION_FIELD.encode()
_MAX_DIGITS = 9
_VERSIONED = b"\x92"
"""First byte of a state with a version: an array of two; a state without one is a map."""

_Version = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_encode = msgspec.msgpack.Encoder().encode
_decode_plain = msgspec.msgpack.Decoder(dict[str, Any]).decode
_decode_versioned = msgspec.msgpack.Decoder(tuple[_Version, dict[str, Any]]).decode
_decode_version = msgspec.msgpack.Decoder(tuple[_Version, msgspec.Raw]).decode


class NewerState(DecodeError):
    """A state was written by a later version of the app than this one."""


def current_version(upcasts: Sequence[object]) -> int:
    """Return the version to which these upcasts lead; 1 without any."""
    return len(upcasts) + 1


def check_upcasts(where: str, name: str, upcasts: object) -> None:
    """Raise ConfigError unless this value of the option `name` is a sequence of functions."""
    if not isinstance(upcasts, (list, tuple)) or not upcasts or not all(map(callable, upcasts)):
        raise ConfigError(f"{where}: {name} must be a list of functions, the first for version 1, like {name}=[to_2]")
    for number, upcast in enumerate(upcasts):
        if inspect.iscoroutinefunction(upcast):
            raise ConfigError(f"{where}: {name}[{number}] must be a plain function, not async: an upcast only computes")


def check_version_field(where: str, model: type, version: int) -> None:
    """Raise ConfigError if `model` declares another current version than the message upcasts lead to."""
    declared = default_of(model, VERSION_FIELD)
    if declared is not None and declared != version:
        raise ConfigError(
            f"{where}: message_upcasts lead to version {version}, and {model.__name__}.{VERSION_FIELD} is {declared!r} by "
            "default: add the missing function, or correct the default"
        )


def upcast_message(message: Message, upcasts: Sequence[MessageUpcast]) -> Message:
    """Return `message` in the current version; unchanged if it is in it already.

    Raises DecodeError for a later version, one that is no number, and an upcast that fails.
    """
    current, version = current_version(upcasts), _version_of(message)
    if version == current:
        return message
    if version > current:
        raise DecodeError(
            f"the message has {VERSION_FIELD} {version}, and this handler knows versions up to {current}: deploy the newer app, "
            "then redrive"
        )
    pairs = list(message.pairs)
    for number, upcast in enumerate(upcasts[version - 1 :], version):
        fields = dict(replace(message, pairs=pairs).fields)
        fields.pop(VERSION_FIELD, None)
        found = _call(upcast, fields, f"message_upcasts[{number - 1}], from version {number} of the message,")
        try:
            wired = {to_wire(name) if isinstance(name, str) else name: value for name, value in found.items()}
            pairs = encode_output(wired | {_WIRE_FIELD: number + 1})
        except Exception as error:  # names and values may be of any class
            raise DecodeError(
                f"message_upcasts[{number - 1}] returned what cannot be a message: {text_of(error)}"
            ) from error
    return replace(message, pairs=pairs)


def _version_of(message: Message) -> int:
    found = value_of(message.pairs, _WIRE_FIELD)
    if found is None:
        return 1
    if not found.isdigit() or len(found) > _MAX_DIGITS or not int(found):
        raise DecodeError(f"field {VERSION_FIELD!r} must be a whole number from 1, not {found[:_MAX_DIGITS]!r}")
    return int(found)


def _call(upcast: Callable[[dict[str, Any]], Any], value: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        found = upcast(value)
        if isinstance(found, Mapping):
            return dict(found)
    # An upcast may raise anything, SystemExit too, and so may its mapping: one message must not end the worker.
    except BaseException as error:
        raise DecodeError(f"{where} raised {type(error).__name__}: {text_of(error)}") from error
    raise DecodeError(f"{where} returned a {type(found).__name__}; return a mapping")


def current_state(blob: bytes, upcasts: Sequence[StateUpcast]) -> State:
    """Decode a key's state as stored in Redis, in the current version; b"" is an empty one.

    Raises NewerState for one of a later version, DecodeError if an upcast fails, and ValueError if it is damaged.
    """
    if not upcasts and blob[:1] != _VERSIONED:  # nearly all states, and one is decoded for each message
        return State(_decode_plain(blob)) if blob else State()
    version, found = parse_version_and_state(blob)
    if version > (current := current_version(upcasts)):
        raise NewerState(
            f"the state of the key has version {version}, and this handler knows versions up to {current}: "
            "deploy the newer app"
        )
    if found:
        for number, upcast in enumerate(upcasts[version - 1 :], version):
            found = _call(upcast, found, f"state_upcasts[{number - 1}], from version {number} of the state of the key,")
    return State(found)


def parse_version_and_state(blob: bytes) -> tuple[int, dict[str, Any]]:
    """Decode a key's state as stored in Redis, and the version that it is stored in; b"" is an empty one of version 1.

    Raises ValueError if it is damaged.
    """
    if not blob:
        return 1, {}
    return _decode_versioned(blob) if blob[:1] == _VERSIONED else (1, _decode_plain(blob))


def parse_state(blob: bytes) -> State:
    """As `parse_version_and_state`, without the version."""
    return State(parse_version_and_state(blob)[1])


def parse_version(blob: bytes) -> int:
    """As `parse_version_and_state`, without the state, which is not decoded and may be damaged."""
    return _decode_version(blob)[0] if blob[:1] == _VERSIONED else 1


def encode_state(state: State, version: int = 1) -> bytes:
    """Encode a key's state as it is stored in Redis; an empty one is b"".

    Raises TypeError, OverflowError, RecursionError or ValueError if it cannot be stored.
    """
    for name in state:
        if type(name) is not str:
            raise TypeError("a name is not text")
    if not state:
        return b""
    return _encode(state) if version == 1 else _encode((version, state))
