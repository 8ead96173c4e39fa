"""Where queries begin: at times, and where consumer groups stand; on real Redis, without Spark."""

import pytest

from millstream.errors import ConfigError, DataLoss
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.offsets import Position
from millstream.spark.source.options import parse
from millstream.spark.source.read_range import ReadRange
from tests.support.planning import planned_end

pytestmark = [pytest.mark.spark]


def fill(client: Client, stream: str, *ids: str) -> None:
    client.pipeline([("XADD", stream, entry_id, "a", "1") for entry_id in ids])


def planner(client: Client, subscribe: str = "s", **options: str) -> BatchPlanner:
    return BatchPlanner(client, parse({"url": client.url, "subscribe": subscribe, **options}, {}), cores=1)


def starts(client: Client, subscribe: str = "s", **options: str) -> list[str]:
    """Where a streaming query begins in each stream: the id of the last entry that it leaves out."""
    found = planner(client, subscribe, **options).starting_offsets("latest")
    return [str(found[name].id) for name in subscribe.split(",")]


def sizes(plan: BatchPlanner) -> dict[str, int]:
    """How many entries a first batch of all that is there would read of each stream."""
    start = plan.starting_offsets("latest")
    ends = planned_end(plan, start)
    parts = [piece for task in plan.plan_tasks(start, ends) for piece in task]
    return {piece.stream: piece.size for piece in parts}


# --- times ---


def test_each_stream_may_begin_at_its_own_time(client: Client) -> None:
    for stream in "abc":
        fill(client, stream, "10-0", "20-0", "20-1", "30-0")
    found = starts(client, "a,b,c", startingOffsetsByTimestamp='{"a": 20, "b": 11}', startingOffsets='{"c": "30-0"}')
    assert found == [f"19-{2**64 - 1}", f"10-{2**64 - 1}", "30-0"]
    plan = planner(
        client,
        "a,b,c",
        startingOffsetsByTimestamp='{"a": 20, "b": 31, "c": 30}',
        startingOffsets="earliest",
        startingOffsetsByTimestampStrategy="latest",
    )
    start = plan.starting_offsets("latest")
    assert (start["b"], start["c"]) == (Position(EntryId(30, 0), 4), Position(EntryId(29, 2**64 - 1), None))


def test_a_time_that_no_entry_has_reached_is_an_error_or_the_end_of_the_stream(client: Client) -> None:
    fill(client, "early", "10-0")
    fill(client, "late", "10-0", "90-0")
    times = {"startingTimestamp": "50"}
    with pytest.raises(ConfigError, match=r"starting time in 'early'; .*Strategy\", \"latest\""):
        starts(client, "early,late", **times)
    assert starts(client, "early,late", **times, startingOffsetsByTimestampStrategy="latest")[0] == "10-0"
    usual = planner(client, "early,late", **times).starting_offsets("earliest")
    assert usual["early"] == Position(EntryId(10, 0), 1), "spark.read has nothing to read there, which is no error"
    with pytest.raises(ConfigError, match="early"):
        planner(client, "early,late", **times, startingOffsetsByTimestampStrategy="error").starting_offsets("earliest")
    fill(client, "early", "50-0")
    assert starts(client, "early,late", **times)[0] == f"49-{2**64 - 1}", "an entry of that very millisecond will do"


def test_the_error_counts_streams_without_entries_at_the_start_time_and_names_three(client: Client) -> None:
    for n in range(9):
        fill(client, f"s{n}", "10-0")
    with pytest.raises(ConfigError, match="'s0', 's1', 's2' and 6 more"):
        starts(client, ",".join(f"s{n}" for n in range(9)), startingTimestamp="11")


def test_a_stream_that_does_not_exist_yet_is_read_from_the_start_time_on(client: Client) -> None:
    plan = planner(client, startingTimestamp="50")
    start = plan.starting_offsets("latest")
    assert planned_end(plan, start) == start, "nothing to read, and nothing lost"
    fill(client, "s", "49-0", "50-0", "51-0")
    ends = planned_end(plan, start)
    ((piece,),) = plan.plan_tasks(start, ends)
    assert (piece.after, piece.until) == (EntryId(49, 2**64 - 1), EntryId(51, 0))


def test_a_batch_read_ends_before_a_time_for_each_stream(client: Client) -> None:
    for stream in "abc":
        fill(client, stream, "10-0", "20-0", "30-0")
    plan = planner(client, "a,b,c", endingOffsetsByTimestamp='{"a": 20, "b": 99}', endingOffsets='{"c": "20-0"}')
    parts = [piece for task in plan.plan_batch_read(ReadRange()) for piece in task]
    assert [(piece.stream, str(piece.until)) for piece in parts] == [
        ("a", f"19-{2**64 - 1}"),
        ("b", "30-0"),
        ("c", "20-0"),
    ]


def test_a_batch_read_may_leave_out_one_of_several_streams_and_begins_early_by_default(
    client: Client,
) -> None:
    for stream in "abc":
        fill(client, stream, "10-0", "20-0")
    plan = planner(client, "a,b,c", startingOffsets='{"a": "10-0", "b": "latest"}')
    parts = [piece for task in plan.plan_batch_read(ReadRange()) for piece in task]
    assert {piece.stream: piece.after < EntryId(10, 0) for piece in parts} == {"a": False, "c": True}


def test_a_batch_read_names_the_missing_streams(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    fill(client, "orders", "10-0")
    planner(client, "orders").plan_batch_read(ReadRange())
    assert not caplog.records
    assert planner(client, "order,orders,refund").plan_batch_read(ReadRange())
    assert "streams do not exist: 'order', 'refund'" in caplog.text
    caplog.clear()
    pattern = parse({"url": client.url, "subscribePattern": "oder*"}, {})
    assert BatchPlanner(client, pattern, cores=1).plan_batch_read(ReadRange()) == []
    assert "no subscribed stream exists" in caplog.text


# --- groups ---


def deliver(client: Client, group: str, stream: str, count: int, *, confirm: bool = True) -> None:
    """Let a worker of `group` take some entries."""
    if not any(about[1].decode() == group for about in client.execute("XINFO", "GROUPS", stream)):
        client.execute("XGROUP", "CREATE", stream, group, "0")
    reply = client.execute("XREADGROUP", "GROUP", group, "worker", "COUNT", count, "STREAMS", stream, ">")
    ids = [entry[0] for entry in reply[0][1]]
    if confirm:
        client.execute("XACK", stream, group, *ids)


def test_a_query_begins_where_a_group_of_workers_is(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    for stream in "ab":
        fill(client, stream, *(f"{n}-0" for n in range(1, 11)))
    deliver(client, "workers", "a", 4)
    options = {"startingOffsets": "group", "startingGroup": "workers"}
    start = planner(client, "a,b,later", **options).starting_offsets("latest")
    assert start == {"a": Position(EntryId(4, 0), 4), "b": Position(ZERO_ID, 0), "later": Position(ZERO_ID, 0)}
    assert not caplog.records
    assert sizes(planner(client, "a,b,later", **options)) == {"a": 6, "b": 10}
    assert [record.getMessage() for record in caplog.records] == [
        "subscribed streams do not exist: 'later'; reading them as soon as they do"
    ]
    deliver(client, "workers", "a", 3, confirm=False)
    assert starts(client, "a", **options) == ["7-0"]
    assert "its 3 pending entries, in 1 streams, stay with its consumers" in caplog.text


def test_the_group_may_be_set_for_some_streams_only(client: Client) -> None:
    for stream in "abc":
        fill(client, stream, *(f"{n}-0" for n in range(1, 11)))
        deliver(client, "workers", stream, 4)
    found = starts(client, "a,b,c", startingOffsets='{"a": "group", "b": "earliest"}', startingGroup="workers")
    assert found == ["4-0", "0-0", "10-0"]


def test_entries_trimmed_before_their_group_read_them_are_a_loss(client: Client) -> None:
    fill(client, "s", *(f"{n}-0" for n in range(1, 21)))
    deliver(client, "workers", "s", 4)
    client.execute("XTRIM", "s", "MAXLEN", 10)
    plan = planner(client, startingOffsets="group", startingGroup="workers")
    with pytest.raises(DataLoss, match="lost 6 entries after 4-0"):
        planned_end(plan, plan.starting_offsets("latest"))


def test_a_group_that_no_stream_has_is_refused_unless_it_is_the_querys_own(client: Client) -> None:
    fill(client, "s", "1-0")
    with pytest.raises(ConfigError, match="no stream has the consumer group 'wrokers'"):
        starts(client, startingOffsets="group", startingGroup="wrokers")
    assert starts(client, startingOffsets="group", group="own") == ["0-0"]
    assert starts(client, "none", startingOffsets="group", startingGroup="wrokers") == ["0-0"]


def test_a_group_without_count_or_past_the_end_still_gives_the_start(client: Client) -> None:
    fill(client, "s", "1-0", "2-0", "3-0")
    options = {"startingOffsets": "group", "startingGroup": "g"}
    client.execute("XGROUP", "CREATE", "s", "g", "2-0")
    assert planner(client, **options).starting_offsets("latest") == {"s": Position(EntryId(2, 0), None)}
    client.execute("XGROUP", "SETID", "s", "g", "9-0")
    assert planner(client, **options).starting_offsets("latest") == {"s": Position(EntryId(3, 0), 3)}
