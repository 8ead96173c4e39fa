"""The options of the Spark source of states, and how its tasks and rows are made."""

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from millstream.admin.state_scan import StateHash, StoredState
from millstream.errors import ConfigError, DecodeError
from millstream.handlers.upcasting import encode_state
from millstream.model import State
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.source.state_options import StateOptions, parse_state_options
from millstream.spark.source.state_partitions import assign_hashes, record_batch

pytestmark = [pytest.mark.spark]

URL = "redis://127.0.0.1:6379/0"


def options(**given: str) -> StateOptions:
    return parse_state_options({"url": URL, "handler": "shop.total", **given}, {})


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert options() == StateOptions(url=URL, app="shop", handler="total")
    assert options(STREAMS="a, b,a", minpartitions="3").streams == ("a", "b")
    assert options().schema.simpleString() == "struct<stream:string,key:binary,state:string,version:int>"
    assert (
        options(stateAs="binary").schema.simpleString() == "struct<stream:string,key:binary,state:binary,version:int>"
    )


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"handlr": "x"}, "'handlr' is unknown to redis-state; did you mean 'handler'?"),
        ({"colour": "red"}, "the options for reading states are url, handler"),
        ({"path": "x"}, "load\\(\\) takes no path here: name the handler"),
        ({"handler": "shop"}, "'shop' names no handler"),
        ({"handler": "shop.to tal"}, "handler 'to tal' must be"),
        ({"stateAs": "text"}, "option stateAs='text' must be json or binary"),
        ({"mode": "strict"}, "option mode='strict' must be permissive or failfast"),
        ({"streams": "a}b"}, "cannot be used"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_change(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        options(**given)


def test_a_handler_must_be_named() -> None:
    with pytest.raises(ConfigError, match="names no handler"):
        parse_state_options({"url": URL}, {})


def test_a_schema_may_choose_columns_but_has_no_others() -> None:
    options().check_schema(StructType([StructField("state", StringType())]))
    for wrong in (StructField("total", LongType()), StructField("key", StringType())):
        with pytest.raises(ConfigError, match=f"redis-state has no column {wrong.name} of type"):
            options().check_schema(StructType([wrong]))


def hashes(**counts: int) -> list[StateHash]:
    return [StateHash(keys=HandlerKeys("shop", "total", name), count=count) for name, count in counts.items()]


def test_tasks_have_about_as_many_states_each_and_streams_without_a_state_have_none() -> None:
    found = assign_hashes(hashes(a=9_000, b=5_000, c=4_000, d=0), min_partitions=None, cores=2)
    assert sorted(map(sorted, found)) == [["a"], ["b", "c"]]
    assert assign_hashes(hashes(a=10, b=10), min_partitions=None, cores=8) == [["a", "b"]]
    assert assign_hashes(hashes(a=10, b=10), min_partitions=2, cores=1) == [["a"], ["b"]]
    assert assign_hashes(hashes(a=0), min_partitions=None, cores=8) == []


def test_a_stream_whose_name_is_no_text_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert assign_hashes([*hashes(a=1), *hashes(**{"b\udcff": 1})], min_partitions=None, cores=1) == [["a"]]
    assert "1 streams are left out" in caplog.text


def test_rows_have_the_state_as_json_or_as_it_is_stored() -> None:
    blob = encode_state(State(n=1, name="Zoë", raw=b"\xff"))
    page = [StoredState("a", b"\xfe", blob)]
    shown = record_batch(page, options(), options().schema)
    text = '{"n":1,"name":"Zoë","raw":{"hex":"ff"}}'
    assert shown.to_pylist() == [{"stream": "a", "key": b"\xfe", "state": text, "version": 1}]
    binary = options(stateAs="binary")
    assert record_batch(page, binary, binary.schema).column("state") == pa.array([blob])
    chosen = StructType([StructField("state", StringType()), StructField("stream", StringType())])
    assert record_batch(page, options(), chosen).schema.names == ["state", "stream"]


def test_rows_have_the_version_that_a_state_is_stored_in() -> None:
    page = [StoredState("a", b"k", encode_state(State(n=1), 3)), StoredState("a", b"j", b"\x92\x00")]
    assert record_batch(page, options(), options().schema).select(["state", "version"]).to_pylist() == [
        {"state": '{"n":1}', "version": 3},
        {"state": None, "version": None},
    ]
    only_version = StructType([StructField("version", IntegerType())])
    with pytest.raises(DecodeError, match="the state of b'j' is damaged"):
        record_batch(page, options(mode="failfast"), only_version)


def test_a_damaged_state_is_null_or_an_error() -> None:
    page = [StoredState("a", b"k", b"\x01\x02")]
    assert record_batch(page, options(), options().schema).column("state").to_pylist() == [None]
    with pytest.raises(DecodeError, match="is damaged"):
        record_batch(page, options(mode="failfast"), options().schema)
