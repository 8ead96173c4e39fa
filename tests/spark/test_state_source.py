"""`spark.read` of the states of a handler: a table with a row for each key of each stream."""

import json

import msgspec
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame

from millstream.handlers.upcasting import encode_state
from millstream.model import State
from millstream.redis_client.key_names import HandlerKeys
from tests.support.pages import run_python
from tests.support.sources import Bench

pytestmark = [pytest.mark.spark]


def store(bench: Bench, stream: str, count: int) -> set[tuple[str, bytes, int]]:
    keys = [b"%d\xff" % n for n in range(count)]
    state = HandlerKeys("shop", "total", stream).state
    bench.client.pipeline([("HSET", state, key, encode_state(State(n=n))) for n, key in enumerate(keys)])
    return {(stream, key, n) for n, key in enumerate(keys)}


def read(bench: Bench, **options: str) -> DataFrame:
    return bench.spark.read.format("redis-state").options(url=bench.url, handler="shop.total", **options).load()


def test_the_states_of_all_streams_are_rows_and_several_tasks_read_them(bench: Bench) -> None:
    expected = {one for stream in ("a", "b", "c", "{d}.0") for one in store(bench, stream, 1_500)}
    frame = read(bench, minPartitions="3")
    assert frame.schema.simpleString() == "struct<stream:string,key:binary,state:string,version:int>"
    assert frame.rdd.getNumPartitions() >= 3
    rows = frame.collect()
    assert len(rows) == 6_000
    assert {(row["stream"], bytes(row["key"]), json.loads(row["state"])["n"]) for row in rows} == expected
    sums = (
        read(bench).selectExpr("stream", "cast(get_json_object(state, '$.n') as long) as n").groupBy("stream").sum("n")
    )
    assert {row[0]: row[1] for row in sums.collect()} == dict.fromkeys(("a", "b", "c", "{d}.0"), 1_124_250)
    assert {row["stream"] for row in read(bench, streams="a,b,none").select("stream").distinct().collect()} == {
        "a",
        "b",
    }


def test_the_state_may_be_binary_and_columns_may_be_chosen(bench: Bench) -> None:
    store(bench, "a", 2)
    rows = read(bench, stateAs="binary").collect()
    assert sorted(msgspec.msgpack.decode(bytes(row["state"]))["n"] for row in rows) == [0, 1]
    source = bench.spark.read.format("redis-state").options(url=bench.url, handler="shop.total")
    assert sorted(row["state"] for row in source.schema("state string").load().collect()) == ['{"n":0}', '{"n":1}']


def test_a_handler_without_states_is_an_empty_table_and_one_that_has_not_run_an_error(bench: Bench) -> None:
    bench.client.execute("HSET", HandlerKeys("shop", "total", "a").meta, "committed_id", "1-1")
    assert read(bench).count() == 0
    with pytest.raises(PySparkException, match=r"no handler 'shop\.else' has run on this Redis"):
        bench.spark.read.format("redis-state").options(url=bench.url, handler="shop.else").load().count()
    with pytest.raises(AnalysisException, match="did you mean 'handler'"):
        bench.spark.read.format("redis-state").options(url=bench.url, handlr="shop.total").load()


def test_the_program_of_the_page_shows_the_sums(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    state = HandlerKeys("shop", "total", "orders").state
    for customer, amount in ((b"ann", 25.5), (b"bob", 30.0)):
        bench.client.execute("HSET", state, customer, encode_state(State(sum=amount)))
    found = run_python("docs/spark-state.md", replaced={"redis://localhost:6379/0": bench.url})
    assert [tuple(row) for row in found["sums"].orderBy("customer").collect()] == [("ann", 25.5), ("bob", 30.0)]
    assert "bob" in capfd.readouterr().out
