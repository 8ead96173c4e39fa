"""Fields to models: what is accepted, what is refused, and with which words."""

import dataclasses
import enum
import json
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NewType, NoReturn, NotRequired, Required, TypedDict
from uuid import UUID

import msgspec
import pydantic.dataclasses
import pytest
import typing_extensions
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.errors import ConfigError, DecodeError
from millstream.handlers import decoding, encoding
from millstream.handlers.decoding import compile_decoder, wire_types
from millstream.handlers.encoding import encode_output
from tests.support.models import Address, Colour, Customer, Level, Point, Price, pairs

pytestmark = [pytest.mark.worker, pytest.mark.spark]


class Loose(enum.Enum):
    YES = "yes"

    @classmethod
    def _missing_(cls, value: object) -> "Loose | None":
        return cls.YES if str(value).lower() == "yes" else None


class Access(enum.Flag):
    READ = 1


@dataclass
class Flight:
    tailnum: str
    flight: int
    dep_delay: float | None = None
    carrier: str | None = "UA"
    stops: list[str] = field(default_factory=list)


Rows = NewType("Rows", int)
Positive = Annotated[int, msgspec.Meta(gt=0)]


def one(annotation: Any) -> Callable[[bytes], Any]:
    """The decoder of a single value, as the field `f` of a dataclass `M`."""
    decode: Callable[[list[bytes]], Any] = compile_decoder(dataclasses.make_dataclass("M", [("f", annotation)]))
    return lambda raw: decode([b"f", raw]).f


def refusal(model: type, fields: list[bytes]) -> str:
    with pytest.raises(DecodeError) as caught:
        compile_decoder(model)(fields)
    return str(caught.value)


def test_the_fields_of_an_entry_become_a_dataclass() -> None:
    decode = compile_decoder(Flight)
    entry = pairs(tailnum="N14228", flight="1545", dep_delay="-2.5", carrier="AA", stops='["IAH"]')
    assert decode(entry) == Flight("N14228", 1545, -2.5, "AA", ["IAH"])
    assert decode(tuple(entry)) == decode(entry)


def test_an_absent_field_takes_its_default_and_an_empty_one_is_none() -> None:
    decode = compile_decoder(Flight)
    assert decode(pairs(tailnum="N1", flight="1")) == Flight("N1", 1, None, "UA", [])
    assert decode(pairs(tailnum="N1", flight="1", dep_delay="", carrier="")) == Flight("N1", 1, None, None, [])


def test_an_optional_field_without_a_default_may_be_absent() -> None:
    model = dataclasses.make_dataclass("M", [("a", int), ("b", int | None), ("c", bytes | None)])
    assert compile_decoder(model)([b"a", b"1"]) == model(1, None, None)


def test_a_default_factory_makes_a_new_value_for_each_message() -> None:
    decode: Callable[[list[bytes]], Any] = compile_decoder(Flight)
    entry = pairs(tailnum="a", flight="1")
    assert decode(entry).stops is not decode(entry).stops


def test_the_order_of_the_fields_and_names_that_are_not_wanted_do_not_matter() -> None:
    decode = compile_decoder(Flight)
    noise = [b"\xff\xfe", b"1", b"", b"2", b"twice", b"3", b"twice", b"4"]
    entry = [*noise, *pairs(flight="7", tailnum="N7"), *noise]
    assert decode(entry) == decode(pairs(tailnum="N7", flight="7"))


def test_entries_with_different_fields_do_not_disturb_each_other() -> None:
    decode = compile_decoder(Flight)
    layouts = [
        (pairs(tailnum="N1", flight="1"), Flight("N1", 1)),
        (pairs(flight="2", tailnum="N2"), Flight("N2", 2)),
        (pairs(flight="3", dep_delay="3", tailnum="N3"), Flight("N3", 3, 3.0)),
        (pairs(x="", tailnum="N4", flight="4"), Flight("N4", 4)),
    ]
    for entry, flight in layouts * 3:
        assert decode(entry) == flight


def test_ever_changing_field_names_do_not_fill_the_memory() -> None:
    decoder = decoding._Decoder(Point)
    decode = decoder.generate()
    for number in range(decoding.MAX_LAYOUTS * 2):
        assert decode([b"x", b"1", f"noise-{number}".encode(), b""]) == Point(1)
    assert len(decoder.layouts) <= decoding.MAX_LAYOUTS
    decoder.layouts.clear()
    assert decode([b"x", b"1", b"n" * (decoding.MAX_LAYOUT_BYTES + 1), b""]) == Point(1)
    assert not decoder.layouts


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}, {"kw_only": True, "slots": True}])
def test_every_flavour_of_dataclass_is_filled(options: Any) -> None:
    fields: Any = [("a", int), ("b", str | None, field(default="x")), ("c", int, field(default=3))]
    model = dataclasses.make_dataclass("M", fields, **options)
    assert compile_decoder(model)(pairs(c="5", a="1")) == model(a=1, b="x", c=5)


def test_keyword_and_positional_fields_may_be_mixed() -> None:
    fields: Any = [("k", int, field(kw_only=True)), ("p", int), ("q", int, field(kw_only=True, default=9))]
    model = dataclasses.make_dataclass("M", fields)
    assert compile_decoder(model)(pairs(k="1", p="2")) == model(2, k=1)


def test_a_field_that_init_does_not_take_is_left_to_the_class() -> None:
    model = dataclasses.make_dataclass("M", [("a", int), ("b", int, field(init=False, default=7))])
    assert compile_decoder(model)(pairs(a="1", b="2")) == model(1)
    assert tuple(wire_types(model)) == ("a",)


def test_a_struct_is_found_by_its_renamed_fields() -> None:
    class Order(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
        order_id: int
        unit_price: Decimal | None = None
        tags: list[str] = []

    assert tuple(wire_types(Order)) == ("orderId", "unitPrice", "tags")
    decoded = compile_decoder(Order)(pairs(orderId="7", unitPrice="1.50", unit_price="9"))
    assert decoded == Order(order_id=7, unit_price=Decimal("1.50"))
    assert encode_output(decoded) == pairs(orderId="7", unitPrice="1.50", tags="[]")


@pytest.mark.parametrize("base", [TypedDict, typing_extensions.TypedDict])
def test_a_typed_dict_gets_the_keys_that_are_there(base: Any) -> None:
    model = base("model", {"a": int, "b": NotRequired[float], "c": str | None})
    assert compile_decoder(model)(pairs(a="1")) == {"a": 1, "c": None}
    assert compile_decoder(model)(pairs(a="1", b="2.5", c="x")) == {"a": 1, "b": 2.5, "c": "x"}
    assert "'a' is missing" in refusal(model, pairs(b="1"))


def test_a_typed_dict_that_is_not_total_requires_nothing() -> None:
    class Sparse(TypedDict, total=False):
        a: int
        b: Required[int]

    assert compile_decoder(Sparse)(pairs(b="1")) == {"b": 1}
    assert "'b' is missing" in refusal(Sparse, pairs(a="1"))


def test_a_pydantic_model_is_filled_by_alias_and_checks_the_rest_itself() -> None:
    entry = pairs(customerName="Ann", born="2001-02-03", homes='[{"street":"x"}]', site="http://a.b/", other="ignored")
    found = typing.cast(Customer, compile_decoder(Customer)(entry))
    assert (found.name, found.age, found.born) == ("Ann", None, date(2001, 2, 3))
    assert found.homes == [Address(street="x")]
    assert str(found.site) == "http://a.b/"
    assert "colour" not in found.model_fields_set
    assert tuple(wire_types(Customer)) == ("customerName", "age", "born", "homes", "site", "colour")


def test_a_value_that_a_pydantic_model_refuses_is_a_decode_error() -> None:
    message = refusal(Customer, pairs(customerName="A"))
    assert message.startswith("Customer refuses the fields: ValidationError")
    assert "at least 2 characters" in message
    assert message.isprintable()
    assert "field 'age' must be a whole number, not ' 5'" in refusal(Customer, pairs(customerName="Ann", age=" 5"))
    assert "URL" in refusal(Customer, pairs(customerName="Ann", site="nowhere"))


def test_a_nested_pydantic_model_is_read_from_json() -> None:
    assert one(Address)(b'{"street":"x","lat":1.5}') == Address(street="x", lat=1.5)
    assert one(list[Address])(b'[{"street":"x"}]') == [Address(street="x")]
    with pytest.raises(DecodeError, match="'f' must be JSON for Address"):
        one(Address)(b'{"street":5}')
    with pytest.raises(DecodeError, match="'f' must be JSON"):
        one(Address)(b'{"street":"x","lat":"NaN"}')


def test_pydantic_is_not_imported_for_other_models() -> None:
    program = (
        "import sys, dataclasses; from millstream.handlers.decoding import compile_decoder\n"
        "from millstream.handlers.encoding import encode_output\n"
        "M = dataclasses.make_dataclass('M', [('a', int)])\n"
        "encode_output(compile_decoder(M)([b'a', b'1']))\n"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


ACCEPTED: list[tuple[Any, bytes, object]] = [
    (str, b"", ""),
    (str, "é\0 x".encode(), "é\0 x"),
    (bytes, b"\xff\0", b"\xff\0"),
    (int, b"0515", 515),
    (int, b"-5", -5),
    (int, b"+5", 5),
    (int, b"9" * 4000, int("9" * 4000)),
    (float, b"-11.0", -11.0),
    (float, b".5", 0.5),
    (float, b"5.", 5.0),
    (float, b"+1E-3", 0.001),
    (bool, b"TRUE", True),
    (bool, b"0", False),
    (Decimal, b"1.10", Decimal("1.10")),
    (Decimal, b"-1E+3", Decimal("-1E+3")),
    (datetime, b"2013-01-01T05:00:00Z", datetime(2013, 1, 1, 5, tzinfo=UTC)),
    (datetime, b"2013-01-01 05:00:00", datetime(2013, 1, 1, 5)),  # noqa: DTZ001 - as it was published
    (date, b"2013-01-01", date(2013, 1, 1)),
    (UUID, b"12345678-1234-5678-1234-567812345678", UUID(int=0x12345678123456781234567812345678)),
    (Colour, b"red", Colour.RED),
    (Level, b"0", Level.LOW),
    (Loose, b"YES", Loose.YES),
    (Literal["a", 1, True], b"true", True),
    (Literal["a", None], b"", None),
    (Literal["", "a"], b"", ""),
    (list, b' [1, "a", null] ', [1, "a", None]),
    (list[int], b"[1,2]", [1, 2]),
    (dict[str, list[float]], b'{"a":[1,2.5]}', {"a": [1.0, 2.5]}),
    (tuple[int, str], b'[1,"a"]', (1, "a")),
    (set[int], b"[1,1]", {1}),
    (Point, b'{"x":1}', Point(1)),
    (list[Price], b'[{"amount":"1.5"}]', [Price(Decimal("1.5"))]),
    (Rows, b"3", 3),
    (Positive, b"3", 3),
    (Positive | None, b"", None),
    (Annotated[int | None, "a word"], b"", None),
    (Annotated[list[int], msgspec.Meta(max_length=2)], b"[1,2]", [1, 2]),
    (str | None, b"x", "x"),
]


@pytest.mark.parametrize(("annotation", "raw", "value"), ACCEPTED)
def test_each_type_reads_its_text_form(annotation: Any, raw: bytes, value: object) -> None:
    found = one(annotation)(raw)
    assert found == value
    assert type(found) is type(value)


REFUSED: list[tuple[Any, bytes, str]] = [
    (str, b"a\xff", r"'f' must be UTF-8 text, not b'a\xff'"),
    (int, b"1.0", "'f' must be a whole number, not '1.0'"),
    (int, b"9" * 5000, "'f' must be a whole number"),
    (int, b"\xff", r"not b'\xff'"),
    (float, b"1e999", "not '1e999'"),
    (bool, b"yes", "'f' must be true, false, 1 or 0, not 'yes'"),
    (bool, b"", "but it is empty"),
    (Decimal, b"1e99999999999999999999", "'f' must be a decimal number"),
    (datetime, b"yesterday", "'f' must be a date and time in ISO 8601, not 'yesterday'"),
    (date, b"2013-02-30", "'f' must be a date in ISO 8601, not '2013-02-30'"),
    (UUID, b"1234", "'f' must be a UUID, not '1234'"),
    (Colour, b"RED", "'f' must be one of 'red', 'blue', not 'RED'"),
    (Colour, b"\xff", r"not b'\xff'"),
    (Literal["a", 2], b"b", "'f' must be one of 'a', '2', not 'b'"),
    (list, b"", "'f' must be JSON for list, but it is empty"),
    (list, b"[1", "'f' must be JSON for list, not '[1' (Input data was truncated)"),
    (list, b"[NaN]", "'f' must be JSON for list"),
    (list, b"[" * 200_000, "'f' must be JSON for list"),
    (list[int], b'["a"]', "'f' must be JSON for list[int], not '[\"a\"]' (Expected `int`, got `str`"),
    (list[float], b'["NaN"]', "'f' must be JSON for list[float]"),
    (list[Decimal], b'["NaN"]', "'f' must be JSON for list[decimal.Decimal]"),
    (dict[str, int], b"[]", "'f' must be JSON for dict[str, int]"),
    (list[Price], b'[{"amount":"Infinity"}]', "'f' must be JSON for list["),
    (Point, b"{}", "(Object missing required field `x`)"),
    (Positive, b"0", "'f' must be a whole number, not '0' (Expected `int` >= 1)"),
    (Annotated[list[int], msgspec.Meta(max_length=1)], b"[1,2]", "of length <= 1"),
]


@pytest.mark.parametrize(("annotation", "raw", "words"), REFUSED)
def test_a_value_that_does_not_fit_is_refused_with_the_reason(annotation: Any, raw: bytes, words: str) -> None:
    with pytest.raises(DecodeError) as caught:
        one(annotation)(raw)
    assert words in str(caught.value)
    assert "field 'f'" in str(caught.value)
    if raw:
        with pytest.raises(DecodeError):
            one(annotation | None)(raw)


NO_NUMBERS = ["", " 1", "1\n", "1_0", "--1", "1-2", "+", "1,5", "\u0661", "0x1", "NaN", "nan", "-inf", "null"]
NUMBERS = {int: "a whole number", float: "a number", Decimal: "a decimal number"}


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize(("kind", "name"), NUMBERS.items())
def test_a_text_that_is_no_number_is_refused_for_a_number_field(kind: type, name: str, text: str) -> None:
    model = dataclasses.make_dataclass("M", [("f", kind, field(default=0))])
    found = f"not {text!r}" if text else "but it is empty"
    assert refusal(model, pairs(f=text)) == f"field 'f' must be {name}, {found}"


@pytest.mark.parametrize("annotation", [str, bytes, int, float, bool, Decimal, datetime, Colour, list[int], Point])
def test_an_absent_field_that_is_required_is_named(annotation: Any) -> None:
    model = dataclasses.make_dataclass("M", [("a", int), ("f", annotation)])
    assert "field 'f' is missing; it must be" in refusal(model, [b"a", b"1"])
    single = dataclasses.make_dataclass("M", [("f", annotation)])
    assert refusal(single, [b"a", b"1"]) == refusal(single, [])


def test_a_field_of_the_model_may_not_appear_twice() -> None:
    assert refusal(Point, [b"x", b"1", b"x", b"1"]) == "field 'x' appears twice"
    assert refusal(Point, [b"y", b"1", b"x", b"1", b"n", b"", b"y", b""]) == "field 'y' appears twice"


def test_a_name_without_a_value_is_refused_even_after_a_good_entry() -> None:
    decode = compile_decoder(Point)
    assert decode([b"x", b"1", b"y", b"2"]) == Point(1, 2.0)
    with pytest.raises(DecodeError, match="a name but no value"):
        decode([b"x", b"1", b"y"])


def test_a_megabyte_is_a_value_like_any_other() -> None:
    assert one(str)(b"x" * 2_000_000) == "x" * 2_000_000
    assert len(one(list[str])(json.dumps(["x" * 1_000_000]).encode())[0]) == 1_000_000


@pytest.mark.parametrize(
    "raw", [b"x" * 1_000_000, b"\xff" * 1_000_000, b"\x1b[2J\0" * 1000, "é\u202e\n".encode() * 999]
)
def test_a_refused_value_is_shown_short_and_without_control_characters(raw: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        one(int)(raw)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 40 + encoding.SHOWN_CHARS


def test_an_error_in_a_models_own_code_is_a_decode_error() -> None:
    @dataclass
    class Picky:
        a: int

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("a must not\nbe \x1bnegative")
            raise KeyError(self.a)

    assert refusal(Picky, [b"a", b"-1"]) == r"Picky refuses the fields: ValueError: a must not be \x1bnegative"
    assert refusal(Picky, [b"a", b"3"]) == "Picky refuses the fields: KeyError: 3"


class Exits(enum.Enum):
    """Its lookup of an unknown value ends the program."""

    KNOWN = "known"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        sys.exit(f"no {value}")


@dataclass
class Exiting:
    """It ends the program when it is made."""

    a: int

    def __post_init__(self) -> None:
        sys.exit("no more")


def test_a_message_whose_model_ends_the_program_is_refused_and_ends_none() -> None:
    assert refusal(Exiting, [b"a", b"1"]) == "Exiting refuses the fields: SystemExit: no more"
    model = dataclasses.make_dataclass("M", [("f", Exits)])
    assert refusal(model, [b"f", b"other"]) == "field 'f' must be one of 'known', not 'other'"


KINDS = (str, int, float, bytes, str | None, int | None, float | None, bool, Decimal, Colour, Point)
MODELS = [decoding._Decoder(dataclasses.make_dataclass("M", [("f", kind)])) for kind in KINDS]
DECODERS = [(decoder.decode_slowly, decoder.generate()) for decoder in MODELS]

NUMERALS = st.text("0123456789+-.eE_ \n", max_size=8).map(str.encode)


@given(raw=st.binary() | NUMERALS | st.sampled_from([b"", b"-0", b"nan", b"1e400"]))
@example(raw=b"-0")
def test_the_fast_decoder_never_differs_from_the_slow_one(raw: bytes) -> None:
    for slow, *fast in DECODERS:
        outcomes = []
        for decode in (slow, *fast, *fast):  # the second time, the places of the fields are known
            try:
                outcomes.append(repr(decode([b"f", raw])))
            except DecodeError as error:
                outcomes.append(str(error))
        assert len(set(outcomes)) == 1


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (complex, "complex"),
        (object, "object"),
        (Any, "Any"),
        (int | str, "a choice of types"),
        (int | str | None, "a choice of types"),
        (timedelta, "timedelta"),
        (type(None), "NoneType"),
        (Access, "a Flag"),
        (list[complex], "complex inside list[complex]"),
        (dict[str, Callable[[], int]], "inside dict"),
        (Literal["1", 1], "two values with the same text '1'"),
        (enum.Enum("Odd", {"A": (1, 2)}), "a choice that includes (1, 2)"),
        (Annotated[Decimal, msgspec.Meta(ge=0)], "Can only set `ge`"),
        (typing.TypeVar("T"), "~T"),
    ],
)
def test_an_annotation_that_cannot_be_decoded_is_a_config_error(annotation: Any, words: str) -> None:
    model = dataclasses.make_dataclass("M", [("a", int), ("f", annotation)])
    with pytest.raises(ConfigError) as caught:
        compile_decoder(model)
    message = str(caught.value)
    assert message.startswith("M.f: not supported as a field: ")
    assert words in message
    assert "use str, bytes, int, float" in message
    assert message.isprintable()


def test_a_type_that_is_no_model_or_cannot_be_filled_is_a_config_error() -> None:
    @dataclass(init=False)
    class OwnInit:
        a: int

        def __init__(self) -> None:
            self.a = 1

    class Aliased(pydantic.BaseModel):
        a: int = pydantic.Field(validation_alias=pydantic.AliasChoices("a", "b"))

    wrong: list[tuple[Any, str]] = [
        (int, "int is not a model; use a dataclass"),
        (pydantic.dataclasses.dataclass(type("Hybrid", (), {})), "Hybrid is not a model"),
        (pydantic.RootModel[int], "is not a model"),
        (dataclasses.make_dataclass("Empty", []), "Empty has no fields"),
        (dataclasses.make_dataclass("M", [("a", "Nowhere")]), "M: its annotations cannot be read: name 'Nowhere'"),
        (dataclasses.make_dataclass("M", [("a", InitVar[int])]), "M.a: InitVar is not supported"),
        (dataclasses.make_dataclass("M", [("b", int), ("a", InitVar[int], 3)]), "M.a: InitVar is not supported"),
        (OwnInit, "OwnInit: its __init__ does not take its fields"),
        (Aliased, "Aliased.a: AliasChoices is not supported; give it one plain alias"),
    ]
    for model, words in wrong:
        with pytest.raises(ConfigError) as caught:
            compile_decoder(model)
        assert words in str(caught.value)
