"""Codec: decodes the fields of a message into the handler's model, and encodes a handler's output as fields.

Redis stores only bytes, so every value has one text form. Each type accepts:

    str                 UTF-8 text; empty is empty text
    bytes               anything
    int                 decimal digits with an optional sign
    float, Decimal      a decimal number, also with an exponent; never NaN or an infinity
    bool                true, false, 1 or 0, in any case
    datetime, date      ISO 8601
    UUID                with or without dashes
    Enum, Literal       the text form of one of the values
    list, dict, ...     JSON: collections and nested models, checked against the annotation
    T | None            None if the field is empty, or absent without a default

A decoder has two implementations that must agree. `_Decoder.decode_slowly` is the definition and gives the reasons. A
function generated for the model, as `dataclasses` and `attrs` generate theirs, runs first: it may fail on unusual
input, but must never return another value than the slow one would.
"""

import dataclasses
import enum
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from msgspec import inspect as shapes

from millstream.errors import ConfigError, DecodeError
from millstream.handlers.encoding import _TEXT_FORMS, SHOWN_CHARS, SUPPORTED, _clip, _is_pydantic, _one_line, _to_json

# Entries of one producer share their field names, so the positions of the wanted fields are cached per list
# of names. Both limits keep a producer with ever-changing names from filling the memory.
MAX_LAYOUTS = 256
MAX_LAYOUT_BYTES = 4096

Picker = Callable[[Sequence[bytes]], tuple[bytes | None, ...]]

_MISSING: Any = object()


def compile_decoder(model: type) -> Callable[[Sequence[bytes]], object]:
    """Build the function that decodes an entry's fields, `[name, value, name, value, ...]`, into a `model`.

    `model` is a dataclass, msgspec.Struct, TypedDict or pydantic model. Fields are matched by name, or by msgspec
    `rename` or pydantic alias; other names in the entry are ignored, repeated or not. In a pydantic model, a field of
    an unsupported type goes to pydantic as text. A Struct's tag is ignored.

    The function raises DecodeError, naming the field, for a value that does not fit or fails the model's own checks. It
    cannot be pickled: build it again from the model. Raises ConfigError here for a model that cannot be decoded at all.
    """
    return _Decoder(model).generate()


def wire_types(model: type) -> dict[str, object]:
    """Return the names of `model`'s fields in an entry, with their types. Raises ConfigError as `compile_decoder`."""
    return {field.wire: _unwrap(field.annotation)[0] for field in _fields_of(model)}


def default_of(model: Any, name: str) -> object:
    """Return the default of `model`'s field that is called `name` in an entry; None without such a field or default."""
    field = next((one for one in _fields_of(model) if one.wire == name), None)
    if field is None or field.absent is None:
        return None
    value = field.absent()
    if value is not _MISSING:
        return value
    return model.model_fields[field.name].get_default(call_default_factory=True) if _is_pydantic(model) else None


class _Field(NamedTuple):
    """A field as its model declares it. `absent` returns its default; None if it has none."""

    name: str
    wire: str
    annotation: object
    absent: Callable[[], object] | None
    keyword: bool = False


def _fields_of(model: Any) -> list[_Field]:
    name = getattr(model, "__name__", repr(model))
    if _is_pydantic(model) and not model.__pydantic_root_model__:
        read = _pydantic_fields
    elif isinstance(model, type) and issubclass(model, msgspec.Struct):
        read = _struct_fields
    elif hasattr(model, "__required_keys__"):  # is_typeddict() does not know those of typing_extensions
        read = _typed_dict_fields
    elif dataclasses.is_dataclass(model) and not hasattr(model, "__pydantic_fields__"):
        read = _dataclass_fields
    else:
        raise ConfigError(f"{name} is not a model; use a dataclass, msgspec.Struct, TypedDict or pydantic.BaseModel")
    try:
        fields = sorted(read(model), key=lambda field: field.keyword)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{name}: its annotations cannot be read: {_one_line(error)}") from error
    if not fields:
        raise ConfigError(f"{name} has no fields to decode a message into; give it some, or take a Message")
    return fields


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


def _default(value: object, factory: Any, none: object) -> Callable[[], object] | None:
    if factory is not none:
        return typing.cast(Callable[[], object], factory)
    return None if value is none else _constant(value)


def _dataclass_fields(model: Any) -> Iterator[_Field]:
    hints = typing.get_type_hints(model, include_extras=True)
    for name, hint in hints.items():
        if isinstance(hint, dataclasses.InitVar):
            raise ConfigError(f"{model.__name__}.{name}: InitVar is not supported; make it a plain field")
    for field in dataclasses.fields(model):
        if field.init:
            absent = _default(field.default, field.default_factory, dataclasses.MISSING)
            yield _Field(field.name, field.name, hints[field.name], absent, bool(field.kw_only))


def _struct_fields(model: Any) -> Iterator[_Field]:
    parameters = inspect.signature(model).parameters
    for field in msgspec.structs.fields(model):
        absent = _default(field.default, field.default_factory, msgspec.NODEFAULT)
        keyword = parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        yield _Field(field.name, field.encode_name, field.type, absent, keyword)


def _typed_dict_fields(model: Any) -> Iterator[_Field]:
    for name, hint in typing.get_type_hints(model, include_extras=True).items():
        annotation, required = hint, name in model.__required_keys__
        # The class itself misjudges these two under `from __future__ import annotations`.
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            required = typing.get_origin(hint) is typing.Required
            (annotation,) = typing.get_args(hint)
        yield _Field(name, name, annotation, None if required else _constant(_MISSING))


def _pydantic_fields(model: Any) -> Iterator[_Field]:
    model.model_rebuild()
    by_alias = model.model_config.get("validate_by_alias") is not False
    for name, field in model.model_fields.items():
        alias = field.validation_alias if by_alias else None
        if not isinstance(alias, (str, types.NoneType)):
            kind = type(alias).__name__
            raise ConfigError(f"{model.__name__}.{name}: {kind} is not supported; give it one plain alias")
        absent = None if field.is_required() else _constant(_MISSING)
        yield _Field(name, alias or name, field.annotation, absent)


def _constructor(model: Any, fields: Sequence[_Field]) -> Callable[..., object]:
    """Return the callable that builds the model from the values of `fields`: positional, keyword fields by name."""
    names = [field.wire for field in fields]

    def present(*values: object) -> dict[str, object]:
        return {name: value for name, value in zip(names, values, strict=True) if value is not _MISSING}

    if _is_pydantic(model):
        return lambda *values: model.model_validate(present(*values))
    if hasattr(model, "__required_keys__"):
        return present
    keywords = [field.name for field in fields if field.keyword]
    try:
        inspect.signature(model).bind(*names[len(keywords) :], **dict.fromkeys(keywords))
    except TypeError as error:
        raise ConfigError(f"{model.__name__}: its __init__ does not take its fields: {error}") from error
    return typing.cast(Callable[..., object], model)


class _Kind(NamedTuple):
    """How the text of one type is decoded.

    * `expected`: completes "the field must be ..."
    * `convert`: decodes a text; raises any exception for an invalid one
    * `shortcut`: the same as a faster expression; it may raise where `convert` would not, never the reverse
    """

    expected: str
    convert: Callable[[bytes], object]
    shortcut: str = "{convert}({raw})"


_NUMERAL = b"+-.0123456789eE"
_BOOLS = {b"true": True, b"1": True, b"false": False, b"0": False}


def _to_int(raw: bytes) -> int:
    if not raw.lstrip(b"+-").isdigit():  # int() itself accepts blanks and underscores
        raise ValueError
    return int(raw)


def _numeral(raw: bytes) -> str:
    if raw.strip(_NUMERAL):  # float() and Decimal() accept blanks, underscores, nan and inf
        raise ValueError
    return raw.decode()


def _to_float(raw: bytes) -> float:
    number = float(_numeral(raw))
    if number - number != 0.0:
        raise OverflowError
    return number


# JSON's numbers are a subset of the accepted ones, and msgspec reads them in a third of the time; but -0 as 0.
_SHORTCUT_WORDS: dict[str, Any] = {
    "numeral": _NUMERAL,
    "json_int": msgspec.json.Decoder(int).decode,
    "json_float": msgspec.json.Decoder(float).decode,
}
_SCALARS: dict[object, _Kind] = {
    str: _Kind("UTF-8 text", bytes.decode, "{raw}.decode()"),
    bytes: _Kind("bytes", bytes, "{raw}"),
    int: _Kind("a whole number", _to_int, "json_int({raw}) if {raw}.isdigit() else {convert}({raw})"),
    float: _Kind("a number", _to_float, "(not {raw}.strip(numeral) and json_float({raw})) or {convert}({raw})"),
    bool: _Kind("true, false, 1 or 0", lambda raw: _BOOLS[raw.lower()]),
    Decimal: _Kind("a decimal number", lambda raw: Decimal(_numeral(raw))),
    datetime: _Kind("a date and time in ISO 8601", lambda raw: datetime.fromisoformat(raw.decode())),
    date: _Kind("a date in ISO 8601", lambda raw: date.fromisoformat(raw.decode())),
    UUID: _Kind("a UUID", lambda raw: msgspec.convert(raw.decode(), UUID)),
}


def _unwrap(annotation: Any) -> tuple[Any, bool, list[msgspec.Meta]]:
    """Strip `| None`, Annotated and NewType; return the bare type, whether None is allowed, and the constraints."""
    optional = False
    constraints: list[msgspec.Meta] = []
    while True:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        rest = tuple(item for item in arguments if item not in (None, types.NoneType))
        if origin is typing.Annotated:
            annotation, *metadata = arguments
            constraints += [item for item in metadata if isinstance(item, msgspec.Meta)]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif origin in (typing.Union, types.UnionType, typing.Literal) and rest != arguments:
            optional = True
            annotation = (typing.Literal if origin is typing.Literal else typing.Union)[rest]
        else:
            return annotation, optional, constraints


def _kind_of(annotation: Any, constraints: Sequence[msgspec.Meta], foreign: bool) -> _Kind:
    """Return how `annotation` is decoded. Raises TypeError if unsupported. `foreign`: pydantic validates the value."""
    whole: Any = typing.Annotated[(annotation, *constraints)] if constraints else annotation
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        kind = _choice((value, value) for value in typing.get_args(annotation))
    elif origin in (typing.Union, types.UnionType):
        raise TypeError("a choice of types")
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        kind = _enum_kind(annotation)
    elif annotation in _SCALARS:
        kind = _SCALARS[annotation]
    else:
        return _json_kind(whole, foreign)
    if not constraints:
        return kind
    shapes.type_info(whole)
    return _Kind(kind.expected, lambda raw: msgspec.convert(kind.convert(raw), whole))


def _choice(meanings: Iterable[tuple[object, object]]) -> _Kind:
    table: dict[bytes, object] = {}
    for value, meaning in meanings:
        if not isinstance(value, (str, bytes, int, float)):
            raise TypeError(f"a choice that includes {value!r}")
        text = _TEXT_FORMS[type(value)](value)
        if text in table:
            raise TypeError(f"a choice of two values with the same text {_shown(text)}")
        table[text] = meaning
    return _Kind(f"one of {_clip(', '.join(map(_shown, table)))}", table.__getitem__)


def _enum_kind(annotation: type[enum.Enum]) -> _Kind:
    if issubclass(annotation, enum.Flag):
        raise TypeError("a Flag")
    known = _choice((member.value, member) for member in annotation)

    def convert(raw: bytes) -> object:
        try:
            return known.convert(raw)
        except KeyError:
            return annotation(raw.decode())  # an enum may define _missing_

    return _Kind(known.expected, convert)


def _json_kind(annotation: Any, foreign: bool) -> _Kind:
    shape = shapes.type_info(annotation)
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    spelled = annotation.__name__ if plain else str(annotation).replace("typing.", "")
    collections = (shapes.CollectionType, shapes.TupleType, shapes.DictType)
    records = (shapes.StructType, shapes.DataclassType, shapes.TypedDictType, shapes.NamedTupleType)
    if not isinstance(shape, collections + records) and not _is_pydantic(annotation):
        if foreign:
            return _SCALARS[str]
        raise TypeError(spelled)
    expected = f"JSON for {_clip(spelled)}"
    if foreign:
        return _Kind(expected, msgspec.json.decode)
    inner = list(_inner_shapes(shape, set()))
    for leaf in inner:
        if isinstance(leaf, shapes.CustomType) and not _is_pydantic(leaf.cls):
            raise TypeError(f"{leaf.cls.__name__} inside {spelled}")
    decode = msgspec.json.Decoder(annotation, dec_hook=_validate).decode

    def decode_and_check(raw: bytes) -> object:
        value = decode(raw)
        _to_json(value)
        return value

    # JSON has no NaN, but msgspec's Decimal and pydantic's numbers accept the text "NaN".
    lenient = any(isinstance(leaf, (shapes.DecimalType, shapes.CustomType)) for leaf in inner)
    return _Kind(expected, decode_and_check if lenient else decode)


def _validate(model: Any, value: object) -> object:
    return model.model_validate(value)


def _inner_shapes(node: object, seen: set[int]) -> Iterator[shapes.Type]:
    """Yield every type inside `node`, itself included. Types may be recursive."""
    if isinstance(node, tuple):
        for item in node:
            yield from _inner_shapes(item, seen)
    elif isinstance(node, (shapes.Type, shapes.Field)) and id(node) not in seen:
        seen.add(id(node))
        if isinstance(node, shapes.Type):
            yield node
        for name in node.__struct_fields__:
            yield from _inner_shapes(getattr(node, name), seen)


class _Reader(NamedTuple):
    """Reads one field of an entry. `absent` is None if every message must have the field."""

    field: _Field
    kind: _Kind
    optional: bool
    absent: Callable[[], object] | None

    def read(self, raw: bytes | None) -> object:
        """Decode one value; None stands for an absent field. Raises DecodeError with the reason."""
        if raw is None:
            return self.absent() if self.absent is not None else None
        if not raw and self.optional:
            return None
        try:
            return self.kind.convert(raw)
        # The code of a nested model or an enum may raise anything, SystemExit too; only this message fails.
        except (Exception, SystemExit) as error:
            found = f"not {_shown(raw)}" if raw else "but it is empty"
            detail = f" ({_one_line(error)})" if isinstance(error, msgspec.MsgspecError) else ""
            raise DecodeError(f"field {self.field.wire!r} must be {self.kind.expected}, {found}{detail}") from error


def _reader(model: type, field: _Field) -> _Reader:
    try:
        annotation, optional, constraints = _unwrap(field.annotation)
        kind = _kind_of(annotation, constraints, foreign=_is_pydantic(model))
    except TypeError as error:
        raise ConfigError(
            f"{model.__name__}.{field.name}: not supported as a field: {_one_line(error)}; use {SUPPORTED}"
        ) from error
    absent = _constant(None) if optional and field.absent is None else field.absent
    return _Reader(field, kind, optional, absent)


class _Decoder:
    """The decoder of one model: a reader for each field, and the cached layouts of entries."""

    def __init__(self, model: type) -> None:
        fields = _fields_of(model)
        self.model = model
        self.readers = [_reader(model, field) for field in fields]
        self.build = _constructor(model, fields)
        self.wanted = {field.wire.encode(): index for index, field in enumerate(fields)}
        self.layouts: dict[tuple[bytes, ...], Picker] = {}

    def find_fields(self, pairs: Sequence[bytes]) -> Picker:
        """Find the wanted fields in an entry, and cache them for entries with the same names in the same order."""
        if len(pairs) % 2:
            raise DecodeError("the last field has a name but no value")
        names = tuple(pairs[::2])
        positions = [-1] * len(self.readers)
        for position, name in enumerate(names):
            if (index := self.wanted.get(name)) is None:
                continue
            if positions[index] >= 0:
                raise DecodeError(f"field {self.readers[index].field.wire!r} appears twice")
            positions[index] = 2 * position + 1
        for position, reader in zip(positions, self.readers, strict=True):
            if position < 0 and reader.absent is None:
                raise DecodeError(f"field {reader.field.wire!r} is missing; it must be {reader.kind.expected}")
        picker = _picker(positions)
        if len(self.layouts) >= MAX_LAYOUTS:
            self.layouts.clear()
        if sum(map(len, names)) <= MAX_LAYOUT_BYTES:
            self.layouts[names] = picker
        return picker

    def decode_slowly(self, pairs: Sequence[bytes]) -> object:
        """Decode one message field by field. Raises DecodeError with the reason."""
        raws = self.find_fields(pairs)(pairs)
        values = [reader.read(raw) for reader, raw in zip(self.readers, raws, strict=True)]
        keywords = [reader.field.name for reader in self.readers if reader.field.keyword]
        count = len(values) - len(keywords)  # the keyword fields are the last
        try:
            return self.build(*values[:count], **dict(zip(keywords, values[count:], strict=True)))
        # The model's own code may raise anything, SystemExit too; only this message fails.
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {_one_line(error)}"
            raise DecodeError(f"{self.model.__name__} refuses the fields: {reason}") from error

    def generate(self) -> Callable[[Sequence[bytes]], object]:
        """Generate the fast function: the call that builds the model, with one expression per field.

        Its `except` is broad, as any failure of it means that the slow one decides, and gives the reason.
        """
        ours = {"build": self.build, "layouts": self.layouts, "learn": self.find_fields, "slowly": self.decode_slowly}
        scope: dict[str, Any] = _SHORTCUT_WORDS | ours
        raws, positional, keywords = "", "", ""
        for index, reader in enumerate(self.readers):
            raw, convert, absent = f"raw{index}", f"convert{index}", f"absent{index}"
            scope |= {convert: reader.kind.convert, absent: reader.absent}
            value = reader.kind.shortcut.format(raw=raw, convert=convert)
            if reader.optional:
                value = f"None if not {raw} else {value}"
            if reader.field.absent is not None:  # otherwise an absent field is None by the line above
                value = f"{absent}() if {raw} is None else {value}"
            raws += f"{raw}, "
            if reader.field.keyword:
                keywords += f"{reader.field.name!r}: {value}, "
            else:
                positional += f"{value}, "
        by_name = f"**{{{keywords}}}" if keywords else ""  # an empty mapping would slow the call down
        source = f"""
def decode(pairs):
    try:
        {raws} = (layouts.get(tuple(pairs[::2])) or learn(pairs))(pairs)
        return build({positional}{by_name})
    except (Exception, SystemExit):
        pass
    return slowly(pairs)
"""
        exec(compile(source, f"<decoder of {self.model.__name__}>", "exec"), scope)
        return typing.cast(Callable[[Sequence[bytes]], object], scope["decode"])


def _picker(positions: Sequence[int]) -> Picker:
    """Return a function that picks the values at `positions` of an entry; None for those at -1."""
    if len(positions) == 1:  # itemgetter returns one value bare
        return lambda pairs: (pairs[positions[0]] if positions[0] >= 0 else None,)
    pick: Any = operator.itemgetter(*positions)
    return pick if min(positions) >= 0 else lambda pairs: pick((*pairs, None))


def _shown(raw: bytes) -> str:
    """Return a value for an error message: quoted, short, and without control characters."""
    try:
        return _clip(repr(raw.decode()[: SHOWN_CHARS + 1]))
    except UnicodeDecodeError:
        return _clip(repr(raw[: SHOWN_CHARS + 1]))
