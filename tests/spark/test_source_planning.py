"""How the source plans: shares, offset ranges, seeks and committed offsets; on real Redis, without Spark."""

import json
import time
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.delivery.commit_store import CommitStore
from millstream.errors import AccessDenied, ConfigError, DataLoss
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.source.batch_limits import Advance, BatchLimits
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.fair_shares import MAX_PARTIAL_STREAMS, FairFill, divide, round_robin
from millstream.spark.source.offset_ranges import (
    OffsetRange,
    TaskSizing,
    assign,
    split_at,
    split_evenly,
)
from millstream.spark.source.offset_seek import Seek, position_after, seek
from millstream.spark.source.offsets import Offsets, Position, dump, load, unpack
from millstream.spark.source.options import parse
from millstream.spark.source.progress_group import ProgressGroup, group_positions
from millstream.spark.source.stream_info import fetch
from millstream.spark.source.subscription import Subscription
from millstream.testing import topologies
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.planning import planned_end
from tests.support.reading import as_planned

pytestmark = [pytest.mark.spark]

backlogs = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 10_000), min_size=1, max_size=30)


def fill(client: Client, stream: str, count: int, *, ms: int | None = None) -> None:
    ids = (f"{ms}-{n + 1}" if ms is not None else f"{n + 1}-0" for n in range(count))
    commands = [("XADD", stream, entry_id, "a", "1") for entry_id in ids]
    for at in range(0, count, 5000):
        client.pipeline(commands[at : at + 5000])


def planner(client: Client, **options: str) -> BatchPlanner:
    return BatchPlanner(client, parse({"url": client.url, "subscribe": "s", **options}, {}), cores=2)


# --- shares of a limited batch ---


@given(backlogs, st.integers(1, 20_000))
def test_shares_never_exceed_the_limit_or_the_backlog_and_leave_no_stream_out(
    waiting: dict[str, int], limit: int
) -> None:
    shares = divide(waiting, limit)
    assert sum(shares.values()) == min(limit, sum(waiting.values())) or len(waiting) >= limit
    assert sum(shares.values()) <= limit
    assert all(1 <= share <= waiting[name] for name, share in shares.items())
    assert len(shares) == min(limit, len(waiting))


def test_shares_are_proportional_and_rotate_where_there_are_too_many_streams() -> None:
    assert divide({"a": 100, "b": 10, "c": 1}, 10) == {"a": 8, "b": 1, "c": 1}
    many = dict.fromkeys("abcde", 5)
    batches, last = [], ""
    for _ in range(5):
        batch = divide(many, 2, last)
        last = [*batch][-1]
        batches.append("".join(batch))
    assert batches == ["ab", "cd", "ea", "bc", "de"]


crowds = st.lists(st.integers(1, 3000), min_size=MAX_PARTIAL_STREAMS + 1, max_size=400).map(
    lambda sizes: {f"s{n:03}": size for n, size in enumerate(sizes)}
)


@given(crowds, st.integers(1, 20_000))
def test_many_streams_fill_a_batch_and_few_of_them_are_read_in_part(waiting: dict[str, int], limit: int) -> None:
    shares = divide(waiting, limit)
    assert sum(shares.values()) == min(limit, sum(waiting.values()))
    assert all(1 <= share <= waiting[name] for name, share in shares.items())
    assert sum(share < waiting[name] for name, share in shares.items()) <= 2 * MAX_PARTIAL_STREAMS


@given(crowds, st.integers(400, 20_000))
def test_each_of_many_streams_is_read_before_one_is_read_again(waiting: dict[str, int], limit: int) -> None:
    served: list[str] = []
    while not served or len(served) < len(waiting):
        batch = list(divide(waiting, limit, served[-1] if served else ""))
        served += batch[: len(waiting) - len(served)]
    assert served == sorted(waiting)


def test_a_large_stream_among_many_gets_the_rest_of_the_batch() -> None:
    shares = divide({"giant": 10**6, **{f"s{n:03}": 5 for n in range(300)}}, 10_000)
    assert shares["giant"] == 10_000 - 300 * 5
    assert len(shares) == 301


@settings(max_examples=40)
@given(crowds, st.integers(1, 20_000), st.integers(0, 400))
def test_asking_for_the_backlog_in_rotation_may_end_when_the_batch_is_full(
    waiting: dict[str, int], limit: int, at: int
) -> None:
    last_served = f"s{at:03}"
    filling, seen = FairFill(limit), {}
    for name in round_robin(waiting, last_served):
        seen[name] = waiting[name]
        filling.add(waiting[name])
        if filling.is_full:
            break
    assert divide(seen, limit, last_served) == divide(waiting, limit, last_served)


# --- pieces ---


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_offset_ranges_are_assigned_to_tasks_whole_and_evenly(sizes: list[int], tasks: int) -> None:
    chunks = [OffsetRange(f"s{n:02}", ZERO_ID, EntryId(9, 9), size, size) for n, size in enumerate(sizes)]
    dealt = assign(chunks, tasks, sum(sizes))
    assert sorted(piece for some in dealt for piece in some) == chunks
    loads = [sum(piece.size for piece in some) for some in dealt]
    assert len(loads) == min(tasks, len(chunks))
    assert max(loads) <= sum(sizes) / tasks + max(sizes)


parts_of_streams = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 300)), min_size=1, max_size=12)


@given(parts_of_streams, st.integers(1, 8), st.integers(1, 2000))
def test_tasks_read_each_stream_in_order_and_none_has_too_much(
    streams: list[tuple[int, int]], tasks: int, most: int
) -> None:
    chunks = [
        OffsetRange(f"s{number}", EntryId(n, 0), EntryId(n + 1, 0), size, size)
        for number, (parts, size) in enumerate(streams)
        for n in range(parts)
    ]
    dealt = assign(chunks, tasks, most)
    round_robin = [piece for task in dealt for piece in task]
    assert sorted(round_robin) == sorted(chunks)
    assert sorted(round_robin, key=lambda piece: piece.stream) == sorted(
        chunks, key=lambda piece: (piece.stream, piece.after)
    )
    assert all(len(task) == 1 or sum(piece.size for piece in task) <= most for task in dealt)
    assert [*as_planned(round_robin)] == round_robin


@given(
    st.tuples(st.integers(0, 50), st.integers(0, 2**64 - 1)),
    st.tuples(st.integers(0, 50), st.integers(0, 2**64 - 1)),
    st.integers(1, 9),
)
def test_estimated_splits_cover_the_range_without_gap_or_overlap(
    a: tuple[int, int], b: tuple[int, int], parts: int
) -> None:
    after, until = sorted((EntryId(*a), EntryId(*b)))
    chunks = split_evenly(OffsetRange("s", after, until, 100, 100, untouched=True), parts)
    assert (chunks[0].after, chunks[-1].until) == (after, until)
    assert all(one.until == two.after for one, two in pairwise(chunks))
    assert len(chunks) <= parts


def test_an_offset_range_is_split_at_known_ids_with_exact_counts() -> None:
    piece = OffsetRange("s", EntryId(0, 0), EntryId(100, 0), 25, 25)
    marks = [EntryId(40, 0), EntryId(80, 0), EntryId(100, 0), EntryId(200, 0)]
    counts = [(part.after.ms, part.until.ms, part.rows) for part in split_at(piece, 10, marks)]
    assert counts == [(0, 40, 10), (40, 80, 10), (80, 100, 5)]


def test_small_batches_are_one_task_and_large_ones_as_many_as_cores() -> None:
    spread = TaskSizing(cores=4)
    assert [spread.task_count(total) for total in (1, 2000, 5000, 1_000_000)] == [1, 1, 3, 4]
    assert TaskSizing(cores=4, max_records=1000).task_count(10_000) == 10
    assert TaskSizing(cores=4, min_partitions=7).task_count(70) == 7


# --- cursors ---


def test_a_seek_finds_the_nth_entry_over_chunks_and_leaves_nothing_behind(client: Client) -> None:
    fill(client, "s", 25_000)
    fill(client, "t", 10)
    found = seek(client, {"s": Seek(EntryId(5, 0), 12_000, 3), "t": Seek(ZERO_ID, 4, 2), "gone": Seek(ZERO_ID, 1, 1)})
    ids = {stream: walked.ids for stream, walked in found.items()}
    assert ids == {"s": [EntryId(12_005, 0), EntryId(24_005, 0)], "t": [EntryId(4, 0), EntryId(8, 0)], "gone": []}
    assert client.execute("XINFO", "GROUPS", "s") == []


def test_a_seek_removes_the_groups_of_a_killed_planner_but_no_live_one(client: Client) -> None:
    fill(client, "s", 10)
    now_ms = time.time_ns() // 1_000_000
    # The clock of the driver that lives is ten minutes behind.
    dead, live = f"millstream:plan:{now_ms - 2 * 3_600_000}:x", f"millstream:plan:{now_ms - 600_000}:x"
    for group in (dead, live, "workers"):
        client.execute("XGROUP", "CREATE", "s", group, "0")
    assert seek(client, {"s": Seek(ZERO_ID, 3, 1)})["s"].ids == [EntryId(3, 0)]
    assert {group[1].decode() for group in client.execute("XINFO", "GROUPS", "s")} == {live, "workers"}


def test_the_error_of_a_user_without_rights_to_groups_names_the_rights() -> None:
    with topologies.acl_server(["reader >secret ~* +@all -xgroup"]) as server, Client(server.urls["reader"]) as client:
        fill(client, "s", 10)
        with pytest.raises(AccessDenied, match="grant XGROUP, XREADGROUP and XINFO"):
            seek(client, {"s": Seek(ZERO_ID, 3, 1)})
        plan = planner(client, startingOffsets="earliest")
        assert advance(plan, plan.starting_offsets("latest"), None)["s"].entries_added == 10


# --- the planner ---


def advance(plan: BatchPlanner, start: Mapping[str, Position], limit: int | None) -> Offsets:
    return planned_end(plan, start, limit=limit)


def test_counts_stay_exact_batch_after_batch_while_the_stream_is_trimmed_behind_the_query(client: Client) -> None:
    fill(client, "s", 1000)
    plan = planner(client, startingOffsets="earliest")
    at = plan.starting_offsets("latest")
    for taken in range(100, 1001, 100):
        at = advance(plan, at, 100)
        assert at == {"s": Position(EntryId(taken, 0), taken)}
        client.execute("XTRIM", "s", "MAXLEN", 1000 - taken + 50)
    assert advance(plan, at, 100) == at


def test_counts_become_unknown_when_entries_vanish_ahead_of_the_query(client: Client) -> None:
    fill(client, "s", 30)
    plan = planner(client, startingOffsets="earliest")
    at = advance(plan, plan.starting_offsets("latest"), 5)
    client.execute("XDEL", "s", "15-0")
    assert advance(plan, at, 20) == {"s": Position(EntryId(26, 0), None)}


@pytest.mark.parametrize(("start", "limit", "entries"), [(5, 10, 10), (5, 100, 25), (None, 10, 10), (None, 100, None)])
def test_a_planned_batch_counts_its_entries_where_a_limit_or_the_offsets_allow(
    client: Client, start: int | None, limit: int, entries: int | None
) -> None:
    fill(client, "s", 30)
    planned = planner(client).plan_next(Offsets({"s": Position(EntryId(5, 0), start)}), BatchLimits(max_entries=limit))
    assert isinstance(planned, Advance)
    assert (planned.end["s"].id, planned.entries) == (EntryId(min(5 + limit, 30), 0), entries)


@pytest.mark.parametrize(("trimmed", "known"), [(0, 12), (2, 12), (5, None)])
def test_counts_become_unknown_when_the_stream_is_trimmed_past_the_query_during_planning(
    client: Client, trimmed: int, known: int | None
) -> None:
    fill(client, "s", 20)
    before = fetch(client, ["s"])["s"]
    assert before is not None
    client.execute("XTRIM", "s", "MAXLEN", 20 - trimmed)
    start, found = Position(EntryId(4, 0), 4), EntryId(12, 0)
    assert position_after(start, 8, found, before, fetch(client, ["s"])["s"]) == Position(found, known)


def test_counts_are_unknown_among_deleted_entries_and_known_again_at_the_end(client: Client) -> None:
    fill(client, "s", 30)
    client.execute("XDEL", "s", "15-0")
    plan = planner(client, startingOffsets="earliest")
    at = plan.starting_offsets("latest")
    assert at == {"s": Position(ZERO_ID, None)}
    at = advance(plan, at, 20)
    assert at == {"s": Position(EntryId(21, 0), None)}
    at = advance(plan, at, 20)
    assert at == {"s": Position(EntryId(30, 0), 30)}


def test_a_query_passes_a_deleted_end_of_a_stream_without_waiting(client: Client) -> None:
    fill(client, "s", 10)
    client.pipeline([("XDEL", "s", f"{n}-0") for n in range(6, 11)])
    plan = planner(client, startingOffsets="earliest")
    at = plan.starting_offsets("latest")
    for _ in range(4):
        at = advance(plan, at, 3)
    assert at == {"s": Position(EntryId(10, 0), 10)}


def test_offsets_survive_json_sorted(client: Client) -> None:
    offsets = {"b": Position(EntryId(5, 6), None), "a": Position(EntryId(2**63, 2**64 - 1), 7)}
    assert list(dump(offsets)) == ["a", "b"]
    assert load(dump(offsets)) == offsets
    for wrong in ({"a": "5-0"}, {"a": [5, 0]}, {"a": ["5-0"]}, {"a": ["x", 1]}):
        with pytest.raises(ConfigError):
            load(wrong)


def test_offsets_of_many_streams_are_packed(client: Client) -> None:
    offsets = {f's"{n}é': Position(EntryId(n, n % 3), n % 5 or None) for n in range(2000)}
    packed = dump(offsets)
    assert list(packed) == ["packed"]
    assert len(packed["packed"]) < 20_000
    assert load(json.loads(json.dumps(packed))) == offsets
    assert unpack(packed) == {name: [str(at.id), at.entries_added] for name, at in offsets.items()}
    assert dump(dict(reversed(offsets.items()))) == packed
    assert load({"packed": ["5-0", 1]}) == {"packed": Position(EntryId(5, 0), 1)}
    for damaged in ("", "eJ", packed["packed"][:-40], "AAAA"):
        with pytest.raises(ConfigError, match="another source"):
            load({"packed": damaged})


def pages(client: Client) -> int:
    """How many SCAN the server has run."""
    return commands_run(client.execute)["scan"]


def test_names_among_many_keys_are_scanned_in_slices(client: Client) -> None:
    client.pipeline([("XADD", f"s{n}", "1-0", "a", "1") for n in range(5000)])
    clock = ManualClock()
    subscription = Subscription(client, (), "s*", clock=clock)
    first = subscription.names()
    assert len(first) == 5000, "the first time all of them"
    client.pipeline([("DEL", "s7"), ("XADD", "s5000", "1-0", "a", "1")])
    assert subscription.names() is first, "not within a second"
    clock.now_ms += 1000
    clock.step_ms = 60.0  # each read of the clock takes longer than a slice
    reads, before = 1, pages(client)
    while subscription.names() is first:
        reads += 1
    made = pages(client) - before
    assert reads == made + 1 > 3, "a page of about a thousand keys at each look, and one to find that there is no other"
    assert set(first) - set(subscription.names()) == {"s7"}
    assert set(subscription.names()) - set(first) == {"s5000"}
    clock.step_ms, clock.now_ms = 0.0, clock.now_ms + 20_000
    client.execute("DEL", "s8")
    assert len(subscription.names()) == 4999, "who looks rarely looks longer"


def test_ten_thousand_streams_are_planned_and_only_changed_ones_are_asked_about(client: Client) -> None:
    names = [f"s{n:05}" for n in range(10_000)]
    commands = [("XADD", name, f"{n}-0", "a", "1") for name in names for n in (1, 2, 3)]
    for at in range(0, len(commands), 5000):
        client.pipeline(commands[at : at + 5000])
    options = parse({"url": client.url, "subscribePattern": "s*", "startingOffsets": "earliest"}, {})
    plan = BatchPlanner(client, options, cores=2, clock=ManualClock())  # without time there is nothing else to ask
    start = plan.starting_offsets("latest")
    before = asked(client)
    for limit, expected in ((None, 30_000), (21_000, 21_000)):
        trips = round_trips(client)
        end = advance(plan, start, limit)
        tasks = plan.plan_tasks(start, end)
        trips = round_trips(client) - trips
        assert sum(piece.size for task in tasks for piece in task) == expected
        assert len(tasks) == 2
        assert trips < 100, "many streams share one"
    rest = advance(plan, end, 20_000)
    assert sum(piece.size for task in plan.plan_tasks(end, rest) for piece in task) == 9_000
    assert advance(plan, rest, 20_000) is rest
    assert asked(client) == before, "nothing has changed since the beginning"
    client.pipeline([("XADD", name, "4-0", "a", "1") for name in names[:3]])
    more = advance(plan, rest, 20_000)
    assert sorted(name for name in more if more[name] != rest[name]) == names[:3]
    assert len(plan.plan_tasks(rest, more)[0]) == 3
    assert advance(plan, more, None) is more
    assert asked(client) == before + 3


def round_trips(client: Client) -> int:
    """How often the server has had something to read."""
    stats = client.execute("INFO", "stats").decode()
    return int(stats.partition("total_reads_processed:")[2].partition("\r")[0])


def asked(client: Client) -> int:
    """How often streams were asked about."""
    return commands_run(client.execute)["xinfo|stream"]


def test_entries_that_a_limit_left_waiting_are_read_even_if_nothing_changes_in_their_stream(client: Client) -> None:
    for name in ("a", "b", "c"):
        fill(client, name, 10)
    plan = planner(client, subscribe="a,b,c", startingOffsets="earliest")
    at, taken = plan.starting_offsets("latest"), 0
    while (end := advance(plan, at, 4)) is not at:
        taken += sum(end[name].id.ms - at[name].id.ms for name in end)
        at = end
    assert taken == 30
    again = dict(at)
    fill(client, "d", 1)
    client.execute("XADD", "b", "11-0", "a", "1")
    assert advance(plan, again, 4) == again | {"b": Position(EntryId(11, 0), 11)}, "from offsets of another time, too"


def test_progress_groups_of_many_streams_are_written_in_chunks(client: Client) -> None:
    names = [f"s{n:04}" for n in range(2500)]
    client.pipeline([("XADD", name, "1-0", "a", "1") for name in names])
    client.execute("XGROUP", "CREATE", names[7], "g", "0")
    clock = ManualClock()
    lag = ProgressGroup(client, "g", clock=clock)
    at = {name: Position(EntryId(1, 0), 1) for name in names}

    def shown() -> int:
        found = group_positions(client, "g", names)
        return sum(found[name].position == at[name] for name in found)

    lag.publish(Offsets(at))
    assert shown() == 2500, "as long as it takes no time"
    at = {name: Position(EntryId(2, 0), 2) for name in names}
    clock.step_ms = 200.0
    offsets = Offsets(at)
    for expected in (500, 1000, 1500, 2000, 2500):
        lag.publish(offsets)
        assert shown() == expected
    at = at | {names[0]: Position(EntryId(3, 0), 3), names[2400]: Position(EntryId(3, 0), 3)}
    client.pipeline([("XGROUP", "DESTROY", names[0], "g"), ("DEL", names[2400])])
    lag.publish(Offsets(at))
    assert (shown(), len(group_positions(client, "g", names))) == (2499, 2499)


# --- the handler engine's committed_id ---


def committed_planner(client: Client, committed_id: str | None) -> BatchPlanner:
    if committed_id is not None:
        client.execute("HSET", HandlerKeys("app", "h", "s").meta, "committed_id", committed_id)
        assert CommitStore(client, app="app", handler="h").committed_ids(["s"]) == {"s": EntryId.parse(committed_id)}
    names = {"committedApp": "app", "committedHandler": "h"}
    return planner(client, layout="packed", startingOffsets="committed", **names)


@pytest.mark.parametrize(("committed_id", "begins"), [("6-0", 6), ("4-0", 4), ("2-0", 2), (None, 0)])
def test_a_batch_begins_at_the_lower_of_checkpoint_and_committed_offset(
    client: Client, caplog: pytest.LogCaptureFixture, committed_id: str | None, begins: int
) -> None:
    fill(client, "s", 8)
    plan = committed_planner(client, committed_id)
    checkpoint = Position(EntryId(4, 0), 4)
    begins = min(begins, 4)
    ((piece,),) = plan.plan_tasks({"s": checkpoint}, {"s": Position(EntryId(8, 0), 8)})
    assert (piece.after, piece.until) == (EntryId(begins, 0), EntryId(8, 0))
    assert ("Redis has lost commits" in caplog.text) == (begins < 4)


def test_a_lower_committed_offset_with_no_entry_between_is_not_warned_of(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "s", 8)
    client.pipeline([("XDEL", "s", "3-0"), ("XDEL", "s", "4-0")])
    end = {"s": Position(EntryId(8, 0), 8)}
    ((piece,),) = committed_planner(client, "2-0").plan_tasks({"s": Position(EntryId(4, 0), 4)}, end)
    assert piece.after == EntryId(4, 0)
    assert not caplog.records


def test_lost_commits_are_made_again_even_if_no_new_entry_arrives(client: Client) -> None:
    fill(client, "s", 8)
    plan = committed_planner(client, "6-0")
    done = {"s": Position(EntryId(8, 0), 8)}
    again = advance(plan, done, None)
    assert again == {"s": Position(EntryId(8, 0), None)}, "another offset, so that Spark makes a batch"
    ((piece,),) = plan.plan_tasks(done, again)
    assert (piece.after, piece.until) == (EntryId(6, 0), EntryId(8, 0))
    assert advance(committed_planner(client, "6-0"), again, None) == again, "once, not for ever"
    assert advance(committed_planner(client, "8-0"), done, None) == done


def test_a_query_continues_at_the_last_known_commit_after_redis_lost_its_last_writes(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "s", 8)
    plan = committed_planner(client, "7-0")
    checkpoint, planned = {"s": Position(EntryId(10, 0), 10)}, {"s": Position(EntryId(12, 0), 12)}
    ((piece,),) = plan.plan_tasks(checkpoint, planned)
    assert (piece.after, piece.until) == (EntryId(7, 0), EntryId(12, 0))
    back = advance(plan, checkpoint, None)
    assert back == {"s": Position(EntryId(7, 0), None)}
    assert plan.plan_tasks(checkpoint, back) == []
    assert advance(plan, back, None) == {"s": Position(EntryId(8, 0), 8)}
    assert "Redis has lost its last writes" in caplog.text
    with pytest.raises(DataLoss):
        advance(planner(client), checkpoint, None)


def test_a_query_may_begin_at_the_committed_offset_or_without_one_at_the_earliest_entry(client: Client) -> None:
    fill(client, "s", 8)
    assert committed_planner(client, None).starting_offsets("latest") == {"s": Position(ZERO_ID, 0)}
    assert committed_planner(client, "6-0").starting_offsets("latest")["s"].id == EntryId(6, 0)


def commits(client: Client, *, committed_id: int, group: Position | None) -> None:
    """Say that the handler has committed up to `committed_id`, and stands in its group at `group`."""
    client.execute("HSET", HandlerKeys("app", "h", "s").meta, "committed_id", f"{committed_id}-0")
    if group is not None:
        known = () if group.entries_added is None else ("ENTRIESREAD", group.entries_added)
        client.execute("XGROUP", "CREATE", "s", GROUP, str(group.id), *known)


GROUP = HandlerKeys("app", "h", "s").group


@pytest.mark.parametrize(
    ("committed_id", "group", "kept", "verdict"),
    [
        (6, 6, 14, None),
        (6, 6, 11, "lost 3 entries after 6-0"),
        (6, 6, 0, "lost 14 entries after 6-0"),
        (6, 4, 14, "lost up to 2 entries after 6-0"),
        (6, 4, 16, None),
        (6, 4, 15, None),
        (5, 6, 13, "lost 1 entries after 5-0"),
        (20, 18, 0, None),
    ],
)
def test_a_start_at_the_committed_offset_finds_by_the_group_entries_that_were_trimmed_unread(
    client: Client, committed_id: int, group: int, kept: int, verdict: str | None
) -> None:
    fill(client, "s", 20)
    commits(client, committed_id=committed_id, group=Position(EntryId(group, 0), group))
    client.execute("XTRIM", "s", "MAXLEN", kept)
    options = {"committedApp": "app", "committedHandler": "h", "group": GROUP}
    strict = planner(client, layout="packed", startingOffsets="committed", **options)
    if verdict is None:
        assert strict.starting_offsets("latest")["s"].id == EntryId(committed_id, 0)
        return
    with pytest.raises(DataLoss, match=verdict):
        strict.starting_offsets("latest")
    lenient = planner(client, layout="packed", startingOffsets="committed", failOnDataLoss="false", **options)
    assert lenient.starting_offsets("latest") == {"s": Position(EntryId(committed_id, 0), 20 - kept)}


def test_a_start_at_the_committed_offset_warns_where_a_loss_cannot_be_excluded(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "s", 20)
    commits(client, committed_id=6, group=None)
    client.execute("XTRIM", "s", "MAXLEN", 5)
    assert committed_planner(client, None).starting_offsets("latest") == {"s": Position(EntryId(6, 0), 15)}
    assert "some may have been unread" in caplog.text


def test_a_stream_that_is_gone_or_recreated_below_the_committed_offset_is_not_skipped(client: Client) -> None:
    fill(client, "s", 20)
    commits(client, committed_id=6, group=None)
    client.execute("DEL", "s")
    plan = committed_planner(client, None)
    at = plan.starting_offsets("latest")
    with pytest.raises(DataLoss, match="was deleted or recreated"):
        advance(plan, at, None)
    client.pipeline([("XADD", "s", f"{n}-0", "a", "1") for n in range(1, 6)])
    for stale in (at, {"s": Position(ZERO_ID, 0)}):
        with pytest.raises(DataLoss):
            advance(plan, stale, None)
    with pytest.raises(DataLoss, match="recreated with ids below 6-0"):
        plan.starting_offsets("latest")
    client.execute("XADD", "s", "9-0", "a", "1")
    with pytest.raises(DataLoss, match="recreated with ids below 6-0"):
        advance(plan, {"s": Position(ZERO_ID, 0)}, None)


def test_a_position_without_count_past_the_end_of_its_stream_is_a_loss_unless_it_was_asked_for(
    client: Client,
) -> None:
    fill(client, "s", 8)
    beyond = {"s": Position(EntryId(100, 0), None)}
    with pytest.raises(DataLoss, match="was deleted or recreated"):
        advance(planner(client), beyond, None)
    assert advance(planner(client, startingOffsets="100-0"), beyond, None) == beyond


def test_entries_trimmed_after_a_stream_was_discovered_are_a_loss(client: Client) -> None:
    pattern = BatchPlanner(client, parse({"url": client.url, "subscribePattern": "s*"}, {}), cores=1)
    fill(client, "s1", 10)
    found = advance(pattern, {}, None)
    assert found == {"s1": Position(ZERO_ID, 0)}
    assert pattern.plan_tasks({}, found) == []
    client.execute("XTRIM", "s1", "MAXLEN", 7)
    with pytest.raises(DataLoss, match="lost 3 entries"):
        advance(pattern, found, None)


def test_a_discovered_stream_continues_after_the_committed_offset_of_its_handler(client: Client) -> None:
    plan = committed_planner(client, "6-0")
    assert plan.starting_offsets("latest") == {"s": Position(EntryId(6, 0), None)}
    fill(client, "s", 8)
    assert advance(plan, {}, None) == {"s": Position(EntryId(6, 0), None)}


def test_a_trim_that_an_earlier_deletion_hides_is_reported(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    fill(client, "s", 30)
    client.execute("XDEL", "s", "15-0")
    plan = planner(client, startingOffsets="earliest")
    at = advance(plan, plan.starting_offsets("latest"), 5)
    assert at == {"s": Position(EntryId(5, 0), None)}
    assert advance(plan, at, 5) == {"s": Position(EntryId(10, 0), None)}
    assert not caplog.records, "nothing was trimmed past the query"
    client.execute("XTRIM", "s", "MAXLEN", 20)
    for _ in range(2):
        advance(plan, at, 5)
    assert caplog.text.count("some may have been unread") == 1
