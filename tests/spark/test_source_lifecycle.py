"""What happens to streams while a query reads them: each case is either nothing, an error, or a count in the log."""

import threading
from collections.abc import Callable

import pytest
from pyspark.errors import StreamingQueryException

from millstream.errors import DataLoss, WrongType
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.offsets import Offsets, Position
from millstream.spark.source.options import parse
from millstream.spark.source.partition_reader import PartitionReader
from tests.support.planning import planned_end
from tests.support.reading import as_planned, by_stream
from tests.support.sources import Bench, CollectedRows
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]


class Query:
    """A query that runs, as far as its planner and its tasks go."""

    def __init__(self, client: Client, *, lenient: bool, **options: str) -> None:
        self.client = client
        chosen = {} if "subscribePattern" in options else {"subscribe": "s,t"}
        loss = {"failOnDataLoss": str(not lenient)}
        given = {"url": client.url, "startingOffsets": "earliest", **chosen, **loss, **options}
        self.planner = BatchPlanner(client, parse(given, {}), cores=1)
        self.lenient = lenient
        self.at = self.planner.starting_offsets("latest")

    def batch(
        self, planned: Callable[[], object] = lambda: None, dealt: Callable[[], object] = lambda: None
    ) -> list[tuple[str, str]]:
        """Read one batch; `planned` happens when its end is known, `dealt` when its tasks are."""
        start: Offsets = self.at
        end = planned_end(self.planner, start)
        planned()
        parts = [piece for task in self.planner.plan_tasks(start, end) for piece in task]
        dealt()
        reading = PartitionReader(self.client, as_planned(parts), limit_ms=1000, fail_on_data_loss=not self.lenient)
        found = [
            (name, entry[0].decode())
            for runs in reading.batches(by_stream)
            for name, entries in runs
            for entry in entries
        ]
        self.at = end
        return found


def fill(client: Client, stream: str, first: int, last: int) -> None:
    client.pipeline([("XADD", stream, f"{n}-0", "a", "1") for n in range(first, last + 1)])


def gone(client: Client) -> None:
    client.execute("DEL", "s")


def expired(client: Client) -> None:
    client.execute("PEXPIRE", "s", 1)
    eventually(lambda: not client.execute("EXISTS", "s"), "its end")


def renamed(client: Client) -> None:
    client.execute("RENAME", "s", "elsewhere")


def remade(client: Client) -> None:
    client.execute("DEL", "s")
    fill(client, "s", 101, 103)


WAYS = [gone, expired, renamed, remade]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["between batches", "planned", "dealt"])
def test_a_stream_that_disappears_at_any_moment_ends_the_query(
    client: Client, way: Callable[[Client], None], moment: str
) -> None:
    query = running(client, lenient=False)
    with pytest.raises(DataLoss, match=r"stream 's' (was deleted or recreated|lost 3 entries)"):
        happens(query, way, moment)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["between batches", "planned", "dealt"])
def test_a_lenient_query_warns_of_a_stream_that_disappears_and_reads_its_successor(
    client: Client, way: Callable[[Client], None], moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    query = running(client, lenient=True)
    found = happens(query, way, moment)
    for _ in range(3):
        found += query.batch()
    assert "stream 's'" in caplog.text
    successors = [("s", f"{n}-0") for n in (101, 102, 103)] if way is remade else []
    assert sorted(found) == [*successors, ("t", "4-0")]
    fill(client, "s", 201, 202)
    found = query.batch() + query.batch()
    assert found == [("s", "201-0"), ("s", "202-0")]


def running(client: Client, *, lenient: bool) -> Query:
    """A query that has read three entries of `s` and of `t`, with more to come."""
    fill(client, "s", 1, 3)
    fill(client, "t", 1, 3)
    query = Query(client, lenient=lenient)
    assert len(query.batch()) == 6
    fill(client, "s", 4, 6)
    fill(client, "t", 4, 4)
    return query


def happens(query: Query, way: Callable[[Client], None], moment: str) -> list[tuple[str, str]]:
    """Let it happen, in the middle of a batch or before it."""
    if moment == "between batches":
        way(query.client)
        return query.batch()
    return query.batch(**{moment: lambda: way(query.client)})


def test_trimming_behind_the_query_and_single_deletions_are_no_loss_at_any_moment(client: Client) -> None:
    query = running(client, lenient=False)
    assert len(query.batch(planned=lambda: client.execute("XTRIM", "s", "MAXLEN", 4))) == 4
    fill(client, "s", 7, 12)
    found = query.batch(dealt=lambda: client.execute("XDEL", "s", "9-0"))
    assert found == [("s", f"{n}-0") for n in (7, 8, 10, 11, 12)]
    client.execute("XTRIM", "s", "MAXLEN", 0)
    assert query.batch() == []
    fill(client, "s", 13, 13)
    assert query.batch() == [("s", "13-0")]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("moment", ["between batches", "planned", "dealt"])
def test_a_key_that_becomes_another_type_of_value_always_ends_the_query(
    client: Client, moment: str, lenient: bool
) -> None:
    query = running(client, lenient=lenient)

    def changed(client: Client) -> None:
        client.pipeline([("DEL", "s"), ("SET", "s", "1")])

    with pytest.raises(WrongType, match="holds another type of value than"):
        happens(query, changed, moment)


def test_a_pattern_finds_a_stream_under_a_new_name_and_skips_other_types(client: Client) -> None:
    fill(client, "s1", 1, 2)
    query = Query(client, lenient=True, subscribePattern="s*")
    assert len(query.batch()) == 2
    client.execute("SET", "s2", "no stream")
    client.execute("RENAME", "s1", "s3")
    threading.Event().wait(1.1)
    found = [query.batch() for _ in range(3)]
    assert [entry for batch in found for entry in batch] == [("s3", "1-0"), ("s3", "2-0")]
    assert query.at == {"s1": Position(ZERO_ID, 0), "s3": Position(EntryId(2, 0), 2)}


def test_a_lenient_query_survives_all_losses(bench: Bench) -> None:
    for name in ("kept", "gone", "remade", "trimmed", "holed"):
        bench.add(f"s:{name}", 3)
    collected = bench.start(bench.stream(subscribePattern="s:*", startingOffsets="earliest", failOnDataLoss=False))
    eventually(lambda: len(collected.rows) == 15, "the query has begun")
    bench.client.execute("DEL", "s:gone")
    bench.client.execute("DEL", "s:remade")
    bench.add("s:remade", 2, start=10)
    ids = bench.add("s:holed", 4, start=20)
    bench.client.execute("XDEL", "s:holed", ids[1])
    bench.add("s:new", 2, start=30)
    bench.client.pipeline(
        [
            ("MULTI",),
            *(("XADD", "s:trimmed", "*", "n", n) for n in (40, 41, 42)),
            ("XTRIM", "s:trimmed", "MAXLEN", 1),
            ("EXEC",),
        ]
    )
    bench.add("s:kept", 1, start=50)
    eventually(lambda: {10, 11, 20, 22, 23, 30, 31, 42, 50} <= set(numbers(collected)), "all that is left was read")
    assert collected.query.isActive
    assert len(numbers(collected)) == len(set(numbers(collected)))


def numbers(collected: CollectedRows) -> list[int]:
    """What was read after the beginning."""
    return [n for n in collected.numbers if n >= 10]


def test_a_key_of_another_type_ends_a_running_query_with_its_name(bench: Bench) -> None:
    bench.add("s", 3)
    collected = bench.start(bench.stream("s", startingOffsets="earliest", failOnDataLoss=False))
    eventually(lambda: len(collected.rows) == 3, "the query has begun")
    bench.client.pipeline([("DEL", "s"), ("SET", "s", "1")])
    with pytest.raises(StreamingQueryException, match="than a stream: rename or delete that key"):
        collected.query.awaitTermination(int(FAIL_SAFE_S))
