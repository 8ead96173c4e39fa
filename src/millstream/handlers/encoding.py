"""Encodes the result of a handler as the fields of an entry."""

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any
from uuid import UUID

import msgspec

from millstream.errors import OutputError

SUPPORTED = (
    "str, bytes, int, float, bool, Decimal, datetime, date, UUID, an Enum, a Literal, and as JSON: list, dict, "
    "other collections and nested models; each also as `T | None`"
)

SHOWN_CHARS = 80

MAX_ITEMS = 7_000
"""Most names and values in one entry: a script cannot pass on more (Lua's `unpack`)."""

_HEADS = [bytes([0xA0 | size]) for size in range(32)]
_HEAD_SIZES = {0xD9: 2, 0xDA: 3, 0xDB: 5}
_SHORT_ARRAYS = range(0x90, 0xA0)
"""First bytes of msgpack arrays of up to 15 items. Two bytes with the number follow the first one of longer arrays."""
_UNPACKABLE = (ValueError, ArithmeticError, TypeError, RecursionError, msgspec.MsgspecError)

_pack = msgspec.msgpack.Encoder().encode
_unpack_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def encode_output(output: object) -> list[bytes]:
    """Encode a handler's output as the fields of an entry, `[name, value, name, value, ...]`, for XADD.

    `output` is a mapping, or an instance of a dataclass, msgspec.Struct or pydantic model. None is left out; any other
    value decodes to itself, except that an empty optional text or bytes decodes to None. Raises OutputError for NaN and
    infinities at any depth, a type without a text form, a name that is empty, repeated or not text, and for an output
    without fields.
    """
    fields: list[bytes] = []
    plain = True
    for name, value in output.items() if type(output) is dict else _items(output):
        if value is None:
            continue
        try:
            if type(name) is str and name:
                fields.append(name.encode())
            else:
                plain = False
                fields.append(_wire_name(name))
            fields.append(_TEXT_FORMS[type(value)](value))
        except _UNPACKABLE as error:
            raise OutputError(f"field {_clip(repr(name))} cannot be written: {_one_line(error)}") from error
    if not fields:
        raise OutputError("the output has no field to write; return None to write nothing")
    if not plain and len(set(fields[::2])) < len(fields) // 2:
        raise OutputError("the output has a field name both as text and as bytes; keep one of them")
    return fields


def pack_output(output: object) -> bytes:
    """Encode a handler's output as `encode_output` does, as one msgpack array, which the commit script unpacks.

    One argument of a command costs far less than one for each name and value. Raises OutputError, also
    for more than 3,500 fields.
    """
    if type(output) is dict:
        values = output.values()
        try:
            packer = _packers.find((*output, *map(type, values)))
            if packer is not None:
                return packer(*values)
        except _UNPACKABLE:
            pass  # below, the error names the field
    parts: list[str | msgspec.Raw] = []
    try:
        items: Iterable[tuple[Any, Any]] = output.items() if type(output) is dict else _items(output)
        for name, value in items:
            if value is None:
                continue
            if type(name) is not str or not name:
                return _pack_checked(output)
            kind = type(value)
            parts.append(name)
            if kind is str:
                parts.append(value)
            elif kind is int:
                parts.append(str(value))
            else:
                parts.append(raw(_TEXT_FORMS[kind](value)))
        packed = _pack(parts)
    except _UNPACKABLE:
        return _pack_checked(output)  # names the field
    return packed if 0 < len(parts) <= MAX_ITEMS else _pack_checked(output)


def _pack_checked(output: object) -> bytes:
    return pack_pairs(encode_output(output))


def pack_pairs(pairs: Sequence[bytes]) -> bytes:
    """Pack names and values as `pack_output` does. Raises OutputError for more than 3,500 fields."""
    if len(pairs) > MAX_ITEMS:
        raise OutputError(f"an output has {len(pairs) // 2} fields; at most {MAX_ITEMS // 2} fit in one entry")
    return _pack([raw(item) for item in pairs])


def unpack_output(packed: bytes) -> list[bytes]:
    """Return the names and values of an output that `pack_output` has packed."""
    return [_unpack_text(part) for part in _unpack_parts(packed)]


def items_of_outputs(outputs: Iterable[bytes]) -> list[bytes]:
    """Return of each output that `pack_output` has packed the items, one after the other, without the header of the array."""
    return [packed[1 if packed[0] in _SHORT_ARRAYS else 3 :] for packed in outputs]


def raw(value: bytes) -> msgspec.Raw:
    """Encode bytes, UTF-8 or not, as a msgpack string: Lua's cmsgpack has no binary type, but accepts any bytes."""
    size = len(value)
    if size < 32:
        return msgspec.Raw(_HEADS[size] + value)
    if size < 1 << 16:
        return msgspec.Raw(b"\xda" + size.to_bytes(2) + value)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4) + value)


def _unpack_text(part: msgspec.Raw) -> bytes:
    packed = bytes(part)
    return packed[_HEAD_SIZES.get(packed[0], 1) :]


def _is_pydantic(model: object) -> bool:
    # A pydantic model can exist only once pydantic is imported, so this check never imports it.
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(model, type) and issubclass(model, pydantic.BaseModel)


def _items(output: Any) -> Iterable[tuple[object, object]]:
    if isinstance(output, Mapping):
        return output.items()
    kind: Any = type(output)
    names = _output_names(kind)
    if names is None:
        raise OutputError(f"cannot write {kind.__name__}; return a mapping, dataclass, Struct or pydantic model")
    return [(wire, getattr(output, name)) for name, wire in names]


@cache
def _output_names(kind: Any) -> list[tuple[str, str]] | None:
    """Return a record's fields as (attribute, name in the entry); None if `kind` is not a record."""
    if issubclass(kind, msgspec.Struct):
        return list(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    if dataclasses.is_dataclass(kind):
        return [(field.name, field.name) for field in dataclasses.fields(kind)]
    if _is_pydantic(kind):
        return [(name, field.serialization_alias or name) for name, field in kind.model_fields.items()]
    return None


def _wire_name(name: object) -> bytes:
    if not name or not isinstance(name, (str, bytes)):
        raise TypeError("the name of a field must be text or bytes, and not empty")
    return name if isinstance(name, bytes) else name.encode()


_plain_json = msgspec.json.Encoder().encode


def _float_text(value: float) -> bytes:
    if value - value != 0.0:
        raise ValueError(f"{value} is not a number; use None to leave the field out")
    return _plain_json(value)


def _finite(value: Decimal) -> str:
    if not value.is_finite():
        raise ValueError(f"{value} is not a number; use None instead")
    return str(value)


def _to_json(value: object) -> bytes:
    """Return the JSON text of `value`. Raises ValueError for NaN, which msgspec's own encoder writes as null."""
    plain = msgspec.to_builtins(value, builtin_types=(Decimal,), enc_hook=_dump)
    text = json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_finite)
    return text.encode()


def _dump(value: Any) -> object:
    if not _is_pydantic(type(value)):
        raise TypeError(f"a {type(value).__name__} has no JSON form")
    return value.model_dump(mode="json", by_alias=True)


class _TextForms(dict[type, Callable[[Any], bytes]]):
    """The encoder of each type. Subclasses and records are added on first use."""

    def __missing__(self, kind: Any) -> Callable[[Any], bytes]:
        base = next((base for base in kind.__mro__ if base in self), None)
        if issubclass(kind, enum.Enum):  # it may be a str or an int as well
            self[kind] = lambda value: self[type(value.value)](value.value)
        elif base in (int, float):  # msgspec encodes no subclass of them
            self[kind] = lambda value: self[base](base(value))
        elif base is not None:
            self[kind] = self[base]
        elif issubclass(kind, (list, tuple, set, frozenset, dict)) or _output_names(kind) is not None:
            self[kind] = _to_json
        else:
            raise TypeError(f"a {kind.__module__}.{kind.__name__} has no text form; use {SUPPORTED}")
        return self[kind]


_TEXT_FORMS = _TextForms(
    {
        str: str.encode,
        bytes: bytes,
        int: _plain_json,
        float: _float_text,
        bool: {True: b"true", False: b"false"}.__getitem__,
        Decimal: lambda value: _finite(value).encode(),
        date: lambda value: value.isoformat().encode(),  # and datetime, its subclass
        UUID: lambda value: str(value).encode(),
    }
)


Packer = Callable[..., bytes]


class Packers:
    """Functions that pack dicts of one *layout*: its names, then the types of their values.

    The outputs of a handler share few layouts, and a function generated for one takes three quarters of the time of a loop. To
    generate it takes as long as to pack a hundred outputs, so that is done once a layout has been seen as often.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Packer | None] = {}
        self._seen: dict[tuple[Any, ...], int] = {}

    def find(self, layout: tuple[Any, ...]) -> Packer | None:
        """Return the function for a layout; None if there is none. Raises TypeError if a name is not text."""
        found = self._known.get(layout)
        return found if found is not None or layout in self._known else self._note(layout)

    @property
    def size(self) -> int:
        """How many layouts it holds."""
        return len(self._known) + len(self._seen)

    def _note(self, layout: tuple[Any, ...]) -> Packer | None:
        names = layout[: len(layout) // 2]
        if len("".join(names)) > MAX_LAYOUT_CHARS or len(layout) > MAX_ITEMS:  # a TypeError if one is not text
            return None
        if len(self._seen) >= MAX_LAYOUTS:
            self._seen.clear()
        self._seen[layout] = count = self._seen.get(layout, 0) + 1
        if count < WORTH_A_PACKER:
            return None
        self._seen.pop(layout, None)  # another thread may have found it, too
        if len(self._known) >= MAX_LAYOUTS:
            self._known.clear()
        self._known[layout] = made = _make_packer(layout)
        return made


def _make_packer(layout: tuple[Any, ...]) -> Packer | None:
    """Generate the function that packs the values of a dict with this layout; it fails where `pack_output` has to raise.

    None if a name is empty or of a class of its own.
    """
    count = len(layout) // 2
    names, kinds = layout[:count], layout[count:]
    if not all(type(name) is str and name for name in names):
        return None
    scope: dict[str, Any] = {"pack": _pack, "raw": raw, "float_text": _float_text}
    items: list[str] = []
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind is type(None):
            continue
        form = _EXPRESSIONS.get(kind, f"raw(form{index}({{0}}))")
        scope[f"form{index}"] = _TEXT_FORMS[kind]
        items.append(f"{name!r}, {form.format(f'value{index}')}")
    if not items:
        return None
    parameters = ", ".join(f"value{index}" for index in range(count))
    exec(f"def pack_values({parameters}):\n    return pack([{', '.join(items)}])", scope)
    made: Packer = scope["pack_values"]
    return made


MAX_LAYOUTS, MAX_LAYOUT_CHARS = 256, 4_096
"""A handler with ever-changing names must not fill the memory."""

WORTH_A_PACKER = 100
"""Outputs of one layout from which on a function for it pays."""

_EXPRESSIONS = {
    str: "{0}",
    int: "repr({0})",
    float: "float_text({0}).decode()",
    bool: "'true' if {0} else 'false'",
}
_packers = Packers()


def _clip(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def _one_line(error: BaseException) -> str:
    # The text may quote the message, so terminal control characters are escaped.
    text = " ".join(str(error)[:400].split())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
