"""Timers of a key: what a keyed handler returns to have a message sent to itself later, and its form for the commit."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Literal

from millstream.errors import ConfigError, DecodeError, OutputError
from millstream.handlers.encoding import pack_output, pack_pairs, unpack_output
from millstream.handlers.firing_times import LONGEST_MS, parse_interval_ms
from millstream.handlers.handler import Handler
from millstream.handlers.limits import limited_value, share_of
from millstream.handlers.time_limit import TimeLimit
from millstream.handlers.upcasting import VERSION_FIELD, current_version
from millstream.model import Message, State, value_of
from millstream.redis_client.key_names import REDRIVE_FIELD, TIMER_FIELD, check_identifier, to_wire


@dataclass(frozen=True)
class After:
    """Returned by a handler with a key, alone or among its outputs: sets the timer `name` of the message's key.

    When `delay` is over, `message` is added to the stream of the message that was processed, for this handler alone and
    with the same key. The timer is set in the step that commits the message that asks for it. A timer of the same key
    and name is replaced.

    * `delay`: text like "30s", "5m", "2h" or "7d", or a timedelta; at most 366 days
    * `message`: a mapping, dataclass, msgspec.Struct or pydantic model that the handler can take, and its limit; if it
      lacks the field of the key, or the one that the limit counts by (`per`), the field is added
    * `name`: 1 to 100 letters, digits, '_' or '-'

    Raises OutputError for values out of range, which makes a dead letter of the message.
    """

    delay: str | timedelta
    message: object
    _: KW_ONLY
    name: str

    def __post_init__(self) -> None:
        _check_name("After", self.name)
        found = self.delay_ms
        if found is None or not 0 <= found <= LONGEST_MS:
            raise OutputError(
                f"After({self.delay!r}, name={self.name!r}): the delay must be text like '30s', '5m', '2h' or '7d', or a "
                "timedelta, from 0 to 366 days"
            )

    @property
    def delay_ms(self) -> int | None:
        """The delay in milliseconds, rounded up; None if it is no duration."""
        if isinstance(self.delay, timedelta):
            return -(self.delay // timedelta(milliseconds=-1))
        return parse_interval_ms(self.delay) if isinstance(self.delay, str) else None


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Returned by a handler with a key, alone or among its outputs: cancels the timer `name` of the message's key.

    A timer whose message is in the stream already is not canceled. Without a timer of that name nothing happens.
    Raises OutputError for an impossible name.
    """

    name: str

    def __post_init__(self) -> None:
        _check_name("Cancel", self.name)


TimerChange = tuple[bytes, int | Literal[""], bytes]
"""A change for the commit script: the timer's id, its delay in milliseconds ("" cancels it), its packed entry."""

TimerChanges = Sequence[TimerChange]

Origin = tuple[str, str, bytes | None, bytes | None]
"""Stream, id and key of the message that a handler was run on, and its value that the handler's limit counts by."""

_KEYLESS: Origin = "", "", None, None
"""In place of the origin of a message without a key, which has no timers."""


def origin_of(handler: Handler, message: Message) -> Origin:
    """Return what a timer takes from the message that sets it. Before the run: a handler may change its message."""
    if message.key is None:
        return _KEYLESS
    limit = handler.limit
    return message.stream, message.id, message.key, None if limit is None else limited_value(limit, message.pairs)


def timer_id(label: str, name: str, key: bytes) -> bytes:
    """Return the id of a timer among the delayed messages of its stream. Ids of publishers have no colon."""
    return to_wire(f"timer:{label}:{name}:") + key


def name_of_timer(own_id: bytes) -> str:
    """Return the name of a timer with this id."""
    return own_id.split(b":", 3)[2].decode()


def encode_timer(handler: Handler, origin: Origin, timer: After | Cancel) -> TimerChange:
    """Return the change that `handler` asks for with `timer`, after the message of `origin`. Raises OutputError."""
    stream, message_id, key, limited = origin
    where = f"{handler.label}: {type(timer).__name__}(name={timer.name!r})"
    if key is None:
        advice = "the message has no key" if handler.key is not None else 'give the handler key="field"'
        raise OutputError(f"{where}: a timer belongs to a key; {advice}")
    if handler.partitions is not None:
        raise OutputError(
            f"{where}: a handler of partitions cannot have timers, as its keys move between streams; remove partitions="
        )
    own_id = timer_id(handler.label, timer.name, key)
    if isinstance(timer, Cancel):
        return own_id, "", b""
    try:
        pairs = _pairs_of(handler, Message(stream, message_id, (), key), limited, timer.message)
        packed = pack_pairs([REDRIVE_FIELD, handler.label.encode(), TIMER_FIELD, timer.name.encode(), *pairs])
    except OutputError as error:
        raise OutputError(f"{where}: {error}") from error
    return own_id, timer.delay_ms or 0, packed


def _pairs_of(handler: Handler, message: Message, limited: bytes | None, content: object) -> list[bytes]:
    """Return the fields of a timer's message, with its key and the value that the handler's limit counts by.

    Raises OutputError if the handler could not take it, or its limit.
    """
    assert message.key is not None
    pairs = unpack_output(pack_output(content))
    if handler.key_field is not None and value_of(pairs, to_wire(handler.key_field)) is None:
        pairs = [to_wire(handler.key_field), message.key, *pairs]
    limit = handler.limit
    if limit is not None and limit.per is not None and limited is not None and limited_value(limit, pairs) is None:
        pairs += [to_wire(limit.per), limited]
    if handler.message_upcasts and value_of(pairs, to_wire(VERSION_FIELD)) is None:
        pairs += [to_wire(VERSION_FIELD), b"%d" % current_version(handler.message_upcasts)]
    made = Message(message.stream, message.id, pairs)
    try:
        made.key = handler.key_of(made)
        if made.key != message.key:
            raise OutputError(
                f"its message has the key {made.key!r}, and the message that sets it {message.key!r}; use the same key"
            )
        handler.bind(made, State())
        if limit is not None:
            share_of(limit, pairs)
    except DecodeError as error:
        if isinstance(error.__cause__, TimeLimit):  # a key function or an upcast may raise anything, and all is caught
            raise error.__cause__ from None
        raise OutputError(f"the handler cannot take its message: {error}") from error
    return pairs


def _check_name(what: str, name: object) -> None:
    try:
        check_identifier("timer name", str(name) if isinstance(name, str) else "")
    except ConfigError as error:
        raise OutputError(f"{what}(name={name!r}): {error}") from error
