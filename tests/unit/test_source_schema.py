"""Typed columns of the Spark source: which are refused, and what is said about those that no entry has."""

import logging

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from millstream.errors import ConfigError
from millstream.spark.source.options import Columns
from millstream.spark.source.row_decoder import typed_columns
from millstream.spark.source.schema import check_schema, default_schema

pytestmark = [pytest.mark.spark]


def schema(*names: str) -> StructType:
    return StructType([StructField(name, StringType()) for name in names])


@pytest.mark.parametrize(
    ("name", "meant"),
    [("_ID", "_id"), ("_Timestamp", "_timestamp"), ("_timestmp", "_timestamp"), ("_idms", "_id_ms")],
)
def test_a_column_whose_name_resembles_a_column_of_the_entry_is_refused(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"the column {name} looks like .* did you mean {meant}[?]"):
        check_schema(Columns(), schema("n", name))


def test_a_field_name_may_begin_with_an_underscore() -> None:
    check_schema(
        Columns(),
        schema(
            "id",
            "Stream",
            "_own",
            "_state",
            "_index",
            "_time",
            "_type",
            "_key",
            "_id",
            "_stream",
            "_uid",
            "_pid",
            "_ids",
            "_idx",
        ),
    )


def test_options_that_contradict_the_schema_or_its_absence_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fieldsAs=map and \.schema"):
        check_schema(Columns(fields_as="map"), schema("n"))
    with pytest.raises(ConfigError, match="mode=failfast is for typed columns"):
        check_schema(Columns(failfast=True), default_schema(Columns()))
    check_schema(Columns(failfast=True), schema("n"))
    check_schema(Columns(fields_as="map"), default_schema(Columns(fields_as="map")))


@pytest.mark.parametrize("alike", [True, False])
def test_a_column_that_is_null_because_of_its_case_is_logged_once(
    caplog: pytest.LogCaptureFixture, alike: bool
) -> None:
    column = f"Customer{alike}"
    wanted = pa.schema([(column, pa.string()), ("n", pa.int32()), ("nowhere", pa.string())])
    entry = [b"n", b"1", column.lower().encode(), b"ann"]
    entries = [entry if alike or number % 2 else [*entry, b"more", b""] for number in range(400)]

    def warnings(some: list[list[bytes]]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            typed_columns(some, schema=wanted, names=wanted.names, failfast=False)
        return [one.getMessage() for one in caplog.records if one.name.startswith("millstream.spark.source")]

    assert warnings(entries[:100]) == [], "a few entries prove nothing"
    (message,) = warnings(entries)
    assert f"{column!r}" in message
    assert f"{column.lower()!r}" in message
    assert warnings(entries) == []


def test_a_column_of_the_entry_with_a_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="the column _id_ms must be of type bigint"):
        check_schema(Columns(), StructType([StructField("_id_ms", IntegerType())]))
