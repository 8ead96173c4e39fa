"""From Arrow record batches to rows for streams, without a session."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.errors import ConfigError, OutputError
from millstream.spark.sink.options import Layout
from millstream.spark.sink.row_encoder import RowMaker, check_columns

pytestmark = [pytest.mark.sink, pytest.mark.spark]

ONE = Layout(stream="a")


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def rows(given: pa.RecordBatch, layout: Layout = ONE) -> dict[str, list[list[Any]]]:
    schema = from_arrow_schema(given.schema)
    check_columns(layout, schema)
    return {stream: list(map(list, some)) for stream, some in RowMaker(layout, schema)(given)}


def text(value: Any, kind: pa.DataType | None = None) -> str:
    ((_, _, found),) = rows(batch(c=pa.array([value], kind)))["a"]
    return str(found)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (1, pa.int8(), "1"),
        (True, None, "true"),
        (0.1, None, "0.1"),
        (1e22, None, "1e22"),
        (Decimal("1.10"), None, "1.10"),
        (date(2024, 2, 29), None, "2024-02-29"),
        (datetime(2024, 1, 1, 12, tzinfo=UTC), pa.timestamp("us", "Europe/Berlin"), "2024-01-01T12:00:00+00:00"),
        (datetime.fromisoformat("2024-01-01T12:00"), pa.timestamp("us"), "2024-01-01T12:00:00"),
        ([1, 2], None, "[1,2]"),
        ({"x": "y", "when": date(2024, 1, 1)}, None, '{"x":"y","when":"2024-01-01"}'),
        ([("k", 1.5)], pa.map_(pa.string(), pa.float64()), '{"k":1.5}'),
    ],
)
def test_values_are_written_as_the_text_that_is_read_back(value: Any, kind: pa.DataType | None, expected: str) -> None:
    assert text(value, kind) == expected


def test_a_null_is_written_as_a_missing_field() -> None:
    assert rows(batch(x=[1, None], y=["a", "b"]))["a"] == [["*", "x", "1", "y", "a"], ["*", "y", "b"]]
    assert rows(batch(x=pa.nulls(1), y=["a"]))["a"] == [["*", "y", "a"]]


def test_rows_are_grouped_by_stream_in_their_order() -> None:
    found = rows(batch(stream=["a", "b", "a"], n=[1, 2, 3]), Layout(stream_column="stream"))
    assert found == {"a": [["*", "n", "1"], ["*", "n", "3"]], "b": [["*", "n", "2"]]}


def test_a_slice_of_a_batch_is_read_as_a_slice() -> None:
    pairs = pa.array([[("a", "1")], [("b", "2"), ("b", "3")], [("c", None)]], pa.map_(pa.string(), pa.string()))
    layout = Layout(stream="a", fields_as="fields", fields_column="fields")
    given = batch(fields=pairs, id=["1-1", "1-2", "1-3"]).slice(1, 1)
    assert rows(given, layout)["a"] == [["*", "b", "2", "b", "3"]]


def test_a_row_may_be_one_json_field() -> None:
    found = rows(batch(n=[1], gone=pa.array([None], pa.string())), Layout(stream="a", fields_as="json"))
    assert json.loads(found["a"][0][2]) == {"n": 1, "gone": None}


BY_COLUMN, FIELDS = Layout(stream_column="stream"), Layout(stream="a", fields_as="fields", fields_column="fields")
TEXTS = pa.map_(pa.string(), pa.string())


@pytest.mark.parametrize(
    ("given", "layout", "complaint"),
    [
        (batch(n=[1]), BY_COLUMN, "there is no column 'stream' to name each row's stream"),
        (batch(stream=[1], n=[1]), BY_COLUMN, "the column 'stream' is of type bigint; cast it to string"),
        (batch(n=[1]), Layout(stream="a", id_column="i"), "there is no column 'i' among n"),
        (batch(stream=["a"]), BY_COLUMN, "no column is left for the fields"),
        (batch(d=pa.array([1], pa.duration("us"))), ONE, "the column d is of type interval day to second"),
        (batch(m=pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64()))), ONE, "the column m is a map whose keys"),
        (batch(s=[{"d": None}]).cast(pa.schema([("s", pa.struct([("d", pa.duration("us"))]))])), ONE, "the column s.d"),
        (batch(fields=[1]), FIELDS, "needs a map from text"),
    ],
)
def test_the_error_names_unwritable_columns_before_anything_is_written(
    given: pa.RecordBatch, layout: Layout, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(given, layout)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("given", "layout", "complaint"),
    [
        (batch(stream=["a", None], n=[1, 2]), BY_COLUMN, "the column stream is null in a row: fill it"),
        (batch(stream=["a", ""], n=[1, 2]), BY_COLUMN, "the column stream is empty in a row"),
        (batch(x=[1.0, float("nan")]), ONE, "the column x holds NaN or an infinity"),
        (batch(x=[[float("inf")]]), ONE, "field 'x' cannot be written"),
        (batch(x=[1, None]), ONE, "every column of a row is null"),
        (batch(i=[None, "1-1"], n=[1, 2]), Layout(stream="a", id_column="i"), "the column i is null in a row"),
        (batch(fields=pa.array([None], TEXTS)), FIELDS, "the column fields is null in a row"),
        (batch(fields=pa.array([[]], TEXTS)), FIELDS, "the column fields has 0 fields in a row"),
    ],
)
def test_the_error_of_an_unwritable_value_names_the_column(
    given: pa.RecordBatch, layout: Layout, complaint: str
) -> None:
    with pytest.raises(OutputError) as caught:
        rows(given, layout)
    assert complaint in str(caught.value)


def test_a_stream_name_that_keys_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a}b' cannot be used"):
        rows(batch(stream=["a}b"], n=[1]), BY_COLUMN)
