"""Outputs to fields: the text form of each type, what is refused, and that all of it can be read back."""

import dataclasses
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import OutputError
from millstream.handlers.decoding import compile_decoder
from millstream.handlers.encoding import (
    MAX_LAYOUT_CHARS,
    MAX_LAYOUTS,
    WORTH_A_PACKER,
    Packers,
    encode_output,
    pack_output,
    unpack_output,
)
from tests.support.models import Address, Colour, Customer, Level, Point, Price, pairs

pytestmark = [pytest.mark.worker, pytest.mark.spark]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é", "é".encode()),
        ("", b""),
        (b"\xff", b"\xff"),
        (-5, b"-5"),
        (type("Whole", (int,), {})(3), b"3"),
        (type("Ratio", (float,), {})(0.5), b"0.5"),
        (10**100, b"1" + b"0" * 100),
        (0.1, b"0.1"),
        (True, b"true"),
        (False, b"false"),
        (datetime(2013, 1, 1, 5, tzinfo=UTC), b"2013-01-01T05:00:00+00:00"),
        (date(2013, 1, 1), b"2013-01-01"),
        (Decimal("1E+3"), b"1E+3"),
        (UUID(int=1), b"00000000-0000-0000-0000-000000000001"),
        (Colour.RED, b"red"),
        (Level.HIGH, b"10"),
        ([1, "é", None, {"a": 0.5}], '[1,"é",null,{"a":0.5}]'.encode()),
        ((1, 2), b"[1,2]"),
        ({3: UUID(int=0)}, b'{"3":"00000000-0000-0000-0000-000000000000"}'),
        (Point(1), b'{"x":1,"y":0.0}'),
        (Price(Decimal("1.50")), b'{"amount":"1.50"}'),
        ([Address(street="x")], b'[{"street":"x","lat":0.0}]'),
    ],
)
def test_each_type_has_its_text_form(value: object, text: bytes) -> None:
    assert encode_output({"a": None, "b": value, b"\xff": 1}) == [b"b", text, b"\xff", b"1"]
    assert unpack_output(pack_output({"a": None, "b": value})) == [b"b", text]


def test_an_instance_of_a_model_is_written_field_by_field() -> None:
    assert encode_output(Point(1, 2.5)) == pairs(x="1", y="2.5")
    assert encode_output(Price(Decimal(3))) == pairs(amount="3")
    customer = Customer(customerName="Ann", age=None, homes=[Address(street="x")])
    assert encode_output(customer) == pairs(customerName="Ann", homes='[{"street":"x","lat":0.0}]', colour="red")


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"a": None}, "no field to write; return None to write nothing"),
        ({"a": math.nan}, "field 'a' cannot be written: nan is not a number; use None"),
        ({"a": [1, {"b": math.nan}]}, "field 'a' cannot be written"),
        ({"a": {"b": [Decimal("Infinity")]}}, "Infinity is not a number"),
        ({"a": {math.nan: 1}}, "field 'a' cannot be written"),
        ({"a": Point(1, math.inf)}, "field 'a' cannot be written"),
        ({"a": Address(street="x", lat=math.nan)}, "field 'a' cannot be written"),
        ({"a": CIRCLE}, "field 'a' cannot be written"),
        ({"a": 1 + 2j}, "a builtins.complex has no text form; use str, bytes"),
        ({"a": [object()]}, "a object has no JSON form"),
        ({"a": "\ud800"}, "field 'a' cannot be written"),
        ({"a": ["\ud800"]}, "field 'a' cannot be written"),
        ({"a": 10**5000}, "field 'a' cannot be written"),
        ({"\ud800": 1}, r"field '\ud800' cannot be written"),
        ({"": 1}, "field '' cannot be written: the name of a field must be text or bytes, and not empty"),
        ({1: 1}, "field 1 cannot be written"),
        ({"a": 1, b"a": 2}, "both as text and as bytes"),
        ("text", "cannot write str; return a mapping"),
        (Point, "cannot write type; return"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_with_the_reason(output: Any, words: str) -> None:
    with pytest.raises(OutputError) as caught:
        encode_output(output)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(OutputError) as packing:
        pack_output(output)
    assert str(packing.value) == str(caught.value)


finite = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
zones = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
names = st.text(st.characters(codec="utf-8"))
points = st.builds(Point, st.integers(), finite)
EVERYTHING: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "text": (str, names),
    "raw": (bytes, st.binary()),
    "number": (int, st.integers()),
    "ratio": (float, finite),
    "flag": (bool, st.booleans()),
    "price": (Decimal, decimals),
    "at": (datetime, st.datetimes(timezones=zones).map(lambda at: at.replace(fold=0))),  # ISO 8601 has no fold
    "day": (date, st.dates()),
    "id": (UUID, st.uuids()),
    "colour": (Colour, st.sampled_from(Colour)),
    "level": (Level, st.sampled_from(Level)),
    "word": (Literal["", "a", 1, True], st.sampled_from(["", "a", 1, True])),
    "maybe_text": (str | None, st.none() | names.filter(bool)),  # empty text and None are written alike
    "maybe_number": (int | None, st.none() | st.integers()),
    "maybe_ratio": (float | None, st.none() | finite),
    "maybe_price": (Decimal | None, st.none() | decimals),
    "numbers": (list[int], st.lists(st.integers())),
    "table": (dict[str, float | None], st.dictionaries(names, st.none() | finite)),
    "prices": (list[Decimal], st.lists(decimals)),
    "blobs": (dict[str, bytes], st.dictionaries(names, st.binary())),
    "point": (Point, points),
    "maybe_point": (Point | None, st.none() | points),
}
Everything = dataclasses.make_dataclass("Everything", [(name, kind) for name, (kind, _) in EVERYTHING.items()])
everything = st.builds(Everything, **{name: values for name, (_, values) in EVERYTHING.items()})
decode_everything = compile_decoder(Everything)


@given(everything)
def test_a_written_output_is_read_back_unchanged(value: object) -> None:
    found = decode_everything(encode_output(value))
    assert found == value
    assert repr(found) == repr(value)
    assert unpack_output(pack_output(value)) == encode_output(value)


def fields_of(encode: Callable[[object], list[bytes]], output: object) -> list[bytes] | str:
    """The fields of an output, or why it was refused."""
    try:
        return encode(output)
    except OutputError as error:
        return str(error)


@given(st.dictionaries((names | st.binary()).filter(bool), st.text() | st.binary(max_size=2**17) | st.integers()))
def test_an_output_is_packed_as_it_is_encoded_or_refused_as_well(output: dict[str | bytes, object]) -> None:
    assert fields_of(lambda one: unpack_output(pack_output(one)), output) == fields_of(encode_output, output)


values = st.one_of(*(kind for _, kind in EVERYTHING.values()), st.floats(), st.text(), st.none())


@given(st.dictionaries(names | st.binary(), values, max_size=5))
def test_an_output_is_packed_alike_however_often_its_layout_was_seen(output: dict[str | bytes, object]) -> None:
    wanted = fields_of(encode_output, output)
    for _ in range(WORTH_A_PACKER + 1):
        assert fields_of(lambda one: unpack_output(pack_output(one)), output) == wanted


@pytest.mark.parametrize(
    ("usual", "bad"),
    [(0.5, math.nan), (0.5, math.inf), ("x", "\ud800"), (1, 10**5000), ([1], CIRCLE)],
    ids=["nan", "inf", "surrogate", "many digits", "circle"],
)
def test_a_value_that_cannot_be_written_is_refused_after_many_that_can(usual: object, bad: object) -> None:
    for _ in range(WORTH_A_PACKER + 1):
        assert unpack_output(pack_output({"one": usual, "two": None})) == encode_output({"one": usual})
    with pytest.raises(OutputError, match="field 'one' cannot be written"):
        pack_output({"one": bad, "two": None})


def test_an_empty_name_is_refused_however_often_it_comes() -> None:
    for _ in range(WORTH_A_PACKER + 1):
        with pytest.raises(OutputError, match="field '' cannot be written"):
            pack_output({"": 1})


def test_an_output_of_too_many_fields_is_refused_however_often_it_comes() -> None:
    output = {chr(0x4E00 + number): 1 for number in range(3_501)}
    for _ in range(WORTH_A_PACKER + 1):
        with pytest.raises(OutputError, match="3501 fields"):
            pack_output(output)


def test_ever_changing_names_do_not_fill_the_memory() -> None:
    packers = Packers()
    for number in range(2 * MAX_LAYOUTS):
        for _ in range(WORTH_A_PACKER):
            packers.find((f"name{number}", int))
    assert packers.size <= MAX_LAYOUTS
    for number in range(2 * MAX_LAYOUTS):
        packers.find((f"other{number}", int))
    assert (size := packers.size) <= 2 * MAX_LAYOUTS
    packers.find(("x" * MAX_LAYOUT_CHARS, "y", int, int))
    assert packers.size == size


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 2**16 - 1, 2**16, 2**17])
@pytest.mark.parametrize("kind", [str, bytes])
def test_values_of_every_size_are_packed_whole(size: int, kind: type) -> None:
    value = "x" * size if kind is str else b"\xff" * size
    assert unpack_output(pack_output({"a": value, "b": 1})) == encode_output({"a": value, "b": 1})


@given(st.dictionaries(names.filter(bool), st.text() | st.binary() | finite | st.integers() | st.none()))
def test_every_output_is_written_in_bytes_or_refused(output: dict[str, object]) -> None:
    try:
        fields = encode_output(output)
    except OutputError:
        return
    assert fields[::2] == [name.encode() for name, value in output.items() if value is not None]
    assert all(type(item) is bytes for item in fields)
