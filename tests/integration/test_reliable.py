"""The reliable stream: which worker holds an entry, and that of all that try only its holder commits, once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from millstream.delivery.commit_store import ENTRY_PREFIX, CommitStore, CommittedPosition
from millstream.delivery.consumer_removal import remove_consumers
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.delivery.effects import Effects, Unit
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import AccessDenied, ConfigError, GroupMissing, OutOfMemory, StaleOwner
from millstream.groups import Consumer, Group
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.encoding import pack_output
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, WAITING, HandlerKeys
from millstream.redis_client.replies import mapping_of
from millstream.worker.static_membership import StaticMembership
from tests.support.deployments import lent_cluster
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker]

KEYS = HandlerKeys("app", "handle", "in")
LONG_MS = 3_600_000


def worker(client: Client, name: str = "w1", *, join: bool = True) -> ReliableStream:
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer=name, into="out")
    if join:
        stream.join()
    return stream


def fill(client: Client, count: int, first: int = 1) -> None:
    client.pipeline([("XADD", "in", f"{n}-0", "n", n) for n in range(first, first + count)])


def effect(stream: ReliableStream, delivery: Delivery) -> Effects:
    unit = stream.effects_of(delivery)
    unit.add_outputs([pack_output({"n": delivery.pairs[1]})])
    return unit


def outputs(client: Client) -> list[int]:
    return [int(pairs[1]) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def ids(deliveries: list[Delivery]) -> list[int]:
    return [int(delivery.id.partition(b"-")[0]) for delivery in deliveries]


def pending(client: Client) -> list[tuple[str, str]]:
    found = client.execute("XPENDING", "in", KEYS.group, "-", "+", 1000)
    return [(entry_id.decode(), owner.decode()) for entry_id, owner, _, _ in found]


def spark(client: Client, token: int = 0) -> CommitStore:
    store = CommitStore(client, app="app", handler="handle", into="out")
    return store.with_token(token or store.new_token(["in"]))


def test_a_commit_acknowledges_its_entries_with_their_effects_and_no_others(client: Client) -> None:
    fill(client, 3)
    mine = worker(client)
    found = mine.fetch(count=10)
    assert (ids(found), mine.fetch(count=10)) == ([1, 2, 3], [])
    assert mine.commit([effect(mine, found[0]), effect(mine, found[2])]) == []
    assert (outputs(client), pending(client)) == ([1, 3], [("2-0", "w1")])


def test_repeating_a_commit_whose_reply_was_lost_changes_nothing(client: Client) -> None:
    fill(client, 1)
    mine = worker(client)
    unit = effect(mine, mine.fetch(count=1)[0])
    assert mine.commit([unit]) == []
    assert mine.commit([unit]) == [unit]
    assert outputs(client) == [1]


def test_a_worker_whose_entry_was_claimed_commits_nothing_and_the_claiming_worker_does(client: Client) -> None:
    fill(client, 2)
    late, other = worker(client, "late"), worker(client, "other")
    fetched = late.fetch(count=10)
    claimed = other.claim_idle()
    assert ids(claimed) == [1, 2]
    assert [d.deliveries for d in claimed] == [2, 2]
    late_units = [effect(late, one) for one in fetched]
    assert late.commit(late_units) == late_units
    assert late.ack(*fetched) != []
    assert late.renew_claims([one.id for one in fetched]) == [one.id for one in fetched]
    assert pending(client) == [("1-0", "other"), ("2-0", "other")]
    assert other.commit([effect(other, one) for one in claimed]) == []
    assert (outputs(client), pending(client)) == ([1, 2], [])


def test_ids_alone_are_acknowledged_beside_effects_but_for_those_that_another_worker_has_claimed(
    client: Client,
) -> None:
    fill(client, 11)
    mine = worker(client)
    fetched = {one.id: one for one in mine.fetch(count=20)}
    worker(client, "w2")
    client.execute("XCLAIM", "in", KEYS.group, "w2", 0, "2-0", "10-0")
    alone = [one for one in reversed(fetched) if one != b"5-0"]  # ids of two lengths, in no order
    units: list[Unit] = [*alone, effect(mine, fetched[b"5-0"])]
    refused = mine.commit(units)
    assert sorted(map(repr, refused)) == ["b'10-0'", "b'2-0'"]
    assert outputs(client) == [5]
    assert pending(client) == [("2-0", "w2"), ("10-0", "w2")]


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_ids_alone_that_were_committed_before_the_group_was_set_back_are_refused(
    client: Client, has_checkpoint: bool
) -> None:
    fill(client, 3)
    stream = worker(client)
    first = [one.id for one in stream.fetch(count=3)]
    assert stream.commit(first) == []
    if has_checkpoint:
        assert stream.checkpoint() == "noted"
    client.execute("XGROUP", "SETID", "in", KEYS.group, "0")
    fill(client, 2, first=4)
    again = stream.fetch(count=5)
    assert ids(again) == [1, 2, 3, 4, 5]
    assert stream.commit([one.id for one in again]) == first
    assert pending(client) == []
    assert client.execute("HGET", KEYS.meta, "committed") == b"5"


def test_ids_alone_from_before_the_start_of_the_handler_are_refused(client: Client) -> None:
    fill(client, 3)
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer="w1", start="latest")
    stream.join()
    client.execute("XGROUP", "SETID", "in", KEYS.group, "0")
    read = [one.id for one in stream.fetch(count=3)]
    assert stream.commit(read) == read
    assert pending(client) == []


def test_claimed_entries_are_not_idle_and_returned_ones_are_claimed_at_once(client: Client) -> None:
    fill(client, 3)
    mine, other = worker(client), worker(client, "w2")
    found = mine.fetch(count=10)
    assert other.claim_idle(idle_ms=30_000) == []
    assert mine.nack([found[1].id]) == []
    assert ids(other.claim_idle(idle_ms=30_000)) == [2]
    assert mine.renew_claims([one.id for one in found]) == [b"2-0"]
    assert ids(mine.claim_idle(own=True, excluding={b"1-0"})) == [3]


def test_failed_attempts_count_for_the_next_worker_until_the_entry_is_committed(client: Client) -> None:
    fill(client, 1)
    mine, other = worker(client), worker(client, "w2")
    (first,) = mine.fetch(count=1)
    first.attempt = 2
    mine.record_failures([first])
    (claimed,) = other.claim_idle()
    other.begin_isolation(claimed, "b w2")
    assert (claimed.attempt, other.isolation_state(claimed)) == (3, (0, "b w2"))
    assert other.ack(claimed) == []
    assert client.execute("EXISTS", KEYS.crashes) == 0


def test_the_end_of_an_isolated_run_removes_its_own_isolation_and_no_other(client: Client) -> None:
    fill(client, 1)
    mine, other = worker(client), worker(client, "w2")
    (first,) = mine.fetch(count=1)
    mine.begin_isolation(first, "a w1")
    (claimed,) = other.claim_idle()
    assert other.isolation_state(claimed) == (0, "a w1")
    other.record_deaths(claimed, 1)
    assert other.isolation_state(claimed) == (1, "")
    other.begin_isolation(claimed, "b w2")
    mine.end_isolation([first])
    assert other.isolation_state(claimed) == (1, "b w2")
    other.end_isolation([claimed])
    assert other.isolation_state(claimed) == (1, "")


def test_a_nack_takes_back_the_delivery_and_may_delay_the_next_claim(client: Client) -> None:
    fill(client, 2)
    mine, other = worker(client), worker(client, "w2")
    first, second = mine.fetch(count=2)
    mine.nack([first.id])
    mine.nack([second.id], idle_ms=10_000)
    (claimed,) = other.claim_idle(idle_ms=30_000)
    assert (claimed.id, claimed.deliveries) == (b"1-0", 1)
    (later,) = other.claim_idle(idle_ms=10_000)
    assert (later.id, later.deliveries) == (b"2-0", 1)
    other.renew_claims([later.id])
    assert client.execute("XPENDING", "in", KEYS.group, "2-0", "2-0", 1)[0][3] == 1


def test_a_dead_letter_replaces_its_entry_in_one_step(client: Client) -> None:
    fill(client, 1)
    mine = worker(client)
    (found,) = mine.fetch(count=1)
    letter = DeadLetter(
        stream="in",
        id="1-0",
        pairs=found.pairs,
        key=None,
        app="app",
        handler="handle",
        attempts=1,
        reason="rejected",
        error="no",
        time_ms=1,
    )
    assert mine.dead_letter((found, letter)) == []
    assert (client.execute("XLEN", KEYS.dead_letters), pending(client)) == (1, [])


def test_a_dead_letter_for_an_entry_has_its_attempts_and_error_and_can_be_redriven(client: Client) -> None:
    fill(client, 1)
    mine = worker(client)
    (found,) = mine.fetch(count=1)
    found.attempt = 2
    letter = mine.new_dead_letter(found, reason="rejected", error="not ours", traceback="at home")
    assert mine.dead_letter((found, letter)) == []
    box = DeadLetterQueue(client)
    (filed,) = box.find(DeadLetterFilter(app="app"))
    assert filed.letter == replace(letter, letter_id=filed.letter_id)
    assert (letter.id, letter.pairs, letter.attempts, letter.key) == ("1-0", found.pairs, 2, None)
    (sent,) = box.redrive([filed.ref])
    assert sent.new_id is not None
    (again,) = mine.fetch(count=1)
    assert again.pairs == [REDRIVE_FIELD, b"app.handle", *found.pairs]
    assert mine.new_dead_letter(again, reason="failed", error="again").pairs == found.pairs


def test_a_dead_letter_with_an_unknown_reason_is_refused_before_anything_is_committed(client: Client) -> None:
    fill(client, 1)
    mine = worker(client)
    (found,) = mine.fetch(count=1)
    unparsable: Any = "unparsable"
    with pytest.raises(ConfigError, match="the reason 'unparsable': use one of missing-key, undecodable, rejected"):
        mine.dead_letter((found, mine.new_dead_letter(found, reason=unparsable, error="no")))
    assert (client.execute("XLEN", KEYS.dead_letters), pending(client)) == (0, [("1-0", "w1")])


# Coming and going


def silent_worker(monkeypatch: pytest.MonkeyPatch, client: Client, silent_ms: int = 0) -> ReliableStream:
    monkeypatch.setattr(ReliableStream, "consumer_idle_ms", silent_ms)
    return worker(client, "w1")


def consumers(client: Client) -> set[str]:
    return {one.name for one in Group(client, "in", KEYS.group).consumers()}


def test_consumers_without_pending_entries_that_are_idle_for_long_are_removed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = silent_worker(monkeypatch, client, silent_ms=50)
    fill(client, 1)
    mine.fetch(count=1)
    group = Group(client, "in", KEYS.group)
    for name in ("gone", WAITING):
        group.create_consumer(name)
    eventually(mine.remove_idle_consumers, "it to be silent for long enough")
    assert consumers(client) == {"w1", WAITING}


def test_an_idle_consumer_with_a_pending_entry_or_a_registered_name_stays(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = silent_worker(monkeypatch, client)
    fill(client, 1)
    worker(client, "holds").fetch(count=1)
    names = StaticMembership(client, "app", "pod")
    for name in [*names.acquire(2), "gone"]:
        Group(client, "in", KEYS.group).create_consumer(name)
    assert mine.remove_idle_consumers() == ["gone"]
    assert consumers(client) == {"holds", "pod-0", "pod-1"}
    names.release()
    assert mine.remove_idle_consumers() == ["pod-0", "pod-1"]
    assert pending(client) == [("1-0", "holds")]


def test_a_consumer_that_becomes_active_during_the_check_keeps_its_entries(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = silent_worker(monkeypatch, client, silent_ms=LONG_MS)
    group = mine._group
    for name in ("reads", "is given"):
        group.create_consumer(name)
    seen = [replace(one, idle_ms=LONG_MS) for one in group.consumers()]  # as if they had slept since then
    fill(client, 1)
    worker(client, "is given").fetch(count=1)
    Consumer(client, group=group.name, name="reads", streams=["in"]).read_pending()
    monkeypatch.setattr(group, "consumers", lambda: seen)
    assert mine.remove_idle_consumers() == []
    assert (consumers(client), pending(client)) == ({"reads", "is given"}, [("1-0", "is given")])


def test_a_consumer_that_is_removed_while_it_reads_loses_no_entry(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = silent_worker(monkeypatch, client)
    fill(client, 2_000)
    stop, removed, done = threading.Event(), list[str](), list[int]()

    def remove() -> None:
        while not stop.is_set():
            removed.extend(mine.remove_idle_consumers())

    with ThreadPoolExecutor() as pool, Client(client.url) as reading:
        removing = pool.submit(remove)
        try:
            other = worker(reading, "w2")
            while found := other.fetch(count=3):
                assert other.commit([effect(other, one) for one in found]) == []
                done += ids(found)
            eventually(lambda: removed, "it to be removed")
        finally:
            stop.set()
        removing.result(FAIL_SAFE_S)
    assert done == list(range(1, 2_001))
    assert (sorted(outputs(client)), pending(client)) == (done, [])


def test_a_worker_leaves_the_groups_in_which_it_has_no_pending_entries(client: Client) -> None:
    fill(client, 1)
    first, second = worker(client), worker(client, "w2")
    (found,) = first.fetch(count=1)
    assert second.fetch(count=1) == []
    remove_consumers(client, [first, second])
    assert consumers(client) == {"w1"}
    first.ack(found)
    remove_consumers(client, [first])
    assert consumers(client) == set()
    client.execute("DEL", "in")
    remove_consumers(client, [first, second])  # there is nothing to leave


def test_names_and_groups_are_read_from_all_nodes_of_a_cluster(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReliableStream, "consumer_idle_ms", 0)
    with Client(lent_cluster(request).url) as client:
        names = StaticMembership(client, "app", "pod").acquire(1)
        streams = [
            ReliableStream(client, name, app="app", handler="handle", consumer="w1") for name in ("a", "b", "c", "d")
        ]
        for one in streams:
            one.join()
            group = Group(client, one.stream, one.group)
            for name in ("gone", "w1", *names):
                group.create_consumer(name)
            assert one.remove_idle_consumers() == ["gone"]
        remove_consumers(client, streams)
        for one in streams:
            assert [found.name for found in Group(client, one.stream, one.group).consumers()] == names


def test_a_lost_group_is_created_again_and_skips_and_repeats_nothing(client: Client) -> None:
    fill(client, 10)
    mine = worker(client)
    found = mine.fetch(count=6)
    mine.commit([effect(mine, one) for one in found if one.id not in (b"2-0", b"5-0")])
    mine.checkpoint()
    mine.commit([effect(mine, found[1])])
    later = mine.fetch(count=2)  # 7 and 8, after the checkpoint
    mine.commit([effect(mine, later[1])])
    client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    with pytest.raises(GroupMissing):
        mine.fetch(count=1)
    mine.join()
    again = mine.claim_idle(idle_ms=30_000) + mine.fetch(count=10)
    assert ids(again) == [5, 7, 9, 10]
    assert mine.commit([effect(mine, one) for one in again]) == []
    assert sorted(outputs(client)) == list(range(1, 11))
    assert pending(client) == []


def test_a_checkpoint_drops_the_offsets_and_refuses_late_repeats(client: Client) -> None:
    fill(client, 3)
    mine = worker(client)
    units = [effect(mine, one) for one in mine.fetch(count=3)]
    mine.commit(units[:2])
    assert client.execute("HLEN", KEYS.offsets) == 2
    mine.checkpoint()
    assert (client.execute("EXISTS", KEYS.offsets), client.execute("HKEYS", KEYS.incomplete)) == (0, [b"3-0"])
    client.execute("XGROUP", "SETID", "in", KEYS.group, "0")  # an operator goes back: all is delivered again
    repeated = mine.fetch(count=3)
    assert len(mine.commit([effect(mine, one) for one in repeated[:2]])) == 2
    assert mine.commit(units[2:]) == []
    assert (outputs(client), pending(client)) == ([1, 2, 3], [])


def test_a_large_checkpoint_is_written_less_often_and_one_that_is_too_large_not_at_all(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 3_000)
    mine = worker(client)
    found = mine.fetch(count=3_000)
    eventually(lambda: [mine.checkpoint(), mine.checkpoint()] == ["noted", "later"])
    eventually(lambda: mine.checkpoint() == "noted")
    monkeypatch.setattr("millstream.delivery.commit_store._MAX_INCOMPLETE", 2_000)
    assert mine.checkpoint() == "too many"
    mine.ack(*found[:2_000])
    assert mine.checkpoint() == "noted"
    assert client.execute("HLEN", KEYS.incomplete) == 1_000


def test_a_checkpoint_frees_memory_at_maxmemory_too(client: Client) -> None:
    fill(client, 2)
    mine = worker(client)
    mine.commit([effect(mine, one) for one in mine.fetch(count=2)])
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        assert mine.checkpoint() == "noted"
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert client.execute("EXISTS", KEYS.offsets) == 0


@pytest.mark.parametrize("harm", [("XGROUP", "DESTROY", "in", KEYS.group), ("DEL", "in")])
def test_trimming_survives_the_loss_of_the_group_and_the_stream(client: Client, harm: tuple[str, ...]) -> None:
    mine = worker(client)
    client.execute(*harm)
    assert mine.trim() == 0
    client.execute(*harm)
    mine.report_trimmed([b"1-0"])
    assert [mapping_of(group)[b"name"].decode() for group in client.execute("XINFO", "GROUPS", "in")] == [KEYS.group]


def test_spark_takes_over_the_uncommitted_entries_of_workers_whose_commits_are_refused(client: Client) -> None:
    fill(client, 10)
    mine = worker(client)
    found = mine.fetch(count=6)
    mine.commit([effect(mine, one) for one in found if one.id not in (b"2-0", b"5-0")])
    mine.checkpoint()
    store = spark(client)
    position = store.begin_run(["in"])["in"]
    assert (position.committed_id, position.takeover_offset) == (EntryId(1, 0), EntryId(6, 0))
    assert store.incomplete("in", [f"{n}-0" for n in range(1, 7)]) == {"2-0", "5-0"}
    for late in (lambda: mine.commit([effect(mine, found[1])]), mine.checkpoint, lambda: mine.renew_claims([b"2-0"])):
        with pytest.raises(StaleOwner):
            late()
    assert pending(client) == []
    assert store.begin_run(["in"])["in"] == position


def test_workers_take_over_from_spark_after_its_key_offsets(client: Client) -> None:
    fill(client, 8)
    store = spark(client)
    store.begin_run(["in"])
    store.commit({"in": [unit_of_spark(n) for n in (1, 2, 3)]})
    store.advance_committed({"in": EntryId(3, 0)})
    store.commit({"in": [unit_of_spark(n) for n in (5, 7)]})  # a batch that died half-way
    mine = worker(client)
    with pytest.raises(StaleOwner):
        store.commit({"in": [unit_of_spark(4)]})
    found = mine.fetch(count=10)
    assert ids(found) == [4, 6, 8]
    mine.commit([effect(mine, one) for one in found])
    assert sorted(outputs(client)) == list(range(1, 9))
    assert pending(client) == []
    assert worker(client, "w2").token == mine.token


def unit_of_spark(n: int) -> Effects:
    mark = ENTRY_PREFIX + b"%d-0" % n
    return Effects(mark, b"", first_id=f"{n}-0", last_id=f"{n}-0", message_count=1, outputs=[pack_output({"n": n})])


def open_to_spark(store: CommitStore, position: CommittedPosition, end: int) -> list[int]:
    """What Spark is to process up to `end`: beyond the committed id, without a key offset, and up to the takeover offset only if incomplete."""
    assert position.committed_id is not None
    numbers = range(position.committed_id.ms + 1, end + 1)
    takeover_offset = position.takeover_offset.ms if position.takeover_offset else 0
    still_open = store.incomplete("in", [f"{n}-0" for n in numbers if n <= takeover_offset])
    marked = store.load({"in": ([ENTRY_PREFIX + b"%d-0" % n for n in numbers], [])})["in"]
    return [
        n
        for n in numbers
        if ENTRY_PREFIX + b"%d-0" % n not in marked and (n > takeover_offset or f"{n}-0" in still_open)
    ]


def test_switching_between_worker_and_spark_loses_and_doubles_nothing(client: Client) -> None:
    fill(client, 40)
    done = 0
    for round_number in range(4):
        mine = worker(client, f"w{round_number}")
        entries = mine.claim_idle() + mine.fetch(count=5)
        mine.commit([effect(mine, one) for one in entries[::2]])
        if round_number % 2:
            mine.checkpoint()
        store = spark(client)
        position = store.begin_run(["in"])["in"]
        assert position.committed_id is not None
        end = position.committed_id.ms + 6
        units = [unit_of_spark(n) for n in open_to_spark(store, position, end)]
        assert store.commit({"in": units}) == []
        if round_number != 2:
            store.advance_committed({"in": EntryId(end, 0)})
        done = max(done, end)
    last = worker(client, "last")
    rest = last.claim_idle() + last.fetch(count=100)
    last.commit([effect(last, one) for one in rest])
    assert sorted(outputs(client)) == list(range(1, 41))


def test_a_new_handler_begins_at_the_earliest_or_the_latest_entry_and_keeps_that_start(client: Client) -> None:
    fill(client, 3)
    late = ReliableStream(client, "in", app="app", handler="late", consumer="w", start="latest")
    late.join()
    fill(client, 1, first=4)
    assert ids(late.fetch(count=10)) == [4]
    client.execute("XGROUP", "DESTROY", "in", HandlerKeys("app", "late", "in").group)
    late.join()
    assert ids(late.fetch(count=10)) == [4]


def test_acknowledgements_without_effects_pass_at_maxmemory_and_effects_wait(client: Client) -> None:
    fill(client, 2)
    mine = worker(client)
    first, second = mine.fetch(count=2)
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(OutOfMemory):
            mine.commit([effect(mine, first)])
        assert mine.ack(second) == []
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert mine.commit([effect(mine, first)]) == []
    assert (outputs(client), pending(client)) == ([1], [])


def test_a_worker_without_the_rights_it_will_need_is_refused_when_it_joins(client: Client) -> None:
    client.execute("ACL", "SETUSER", "clerk", "reset", "on", ">pw", "~*", "+@all", "-xack")
    with Client(client.url.replace("redis://", "redis://clerk:pw@")) as limited, pytest.raises(AccessDenied):
        worker(limited)
    client.execute("ACL", "DELUSER", "clerk")


def test_entries_trimmed_while_pending_are_logged_and_no_longer_pending(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, 3)
    worker(client).fetch(count=3)
    client.execute("XDEL", "in", "2-0")
    assert ids(worker(client, "w2").claim_idle()) == [1, 3]
    assert "1 pending entries of stream in were trimmed or deleted before they were processed: 2-0" in caplog.text
    assert pending(client) == [("1-0", "w2"), ("3-0", "w2")]


def test_entries_behind_any_number_of_trimmed_ones_are_claimed(client: Client) -> None:
    gone: list[int] = []
    fill(client, 20)
    worker(client).fetch(count=20)
    client.execute("XTRIM", "in", "MINID", "11-0")
    again = ReliableStream(client, "in", app="app", handler="handle", consumer="w1", on_trimmed=gone.append)
    again.join()
    assert ids(again.claim_idle(own=True, count=5)) == [11, 12, 13, 14, 15]
    assert sum(gone) == 10


@pytest.fixture
def nodes_of_one_entry(client: Client) -> Iterator[None]:
    """Whole nodes are trimmed, so let each be one entry."""
    client.execute("CONFIG", "SET", "stream-node-max-entries", "1")
    yield
    client.execute("CONFIG", "SET", "stream-node-max-entries", "100")


@pytest.mark.usefixtures("nodes_of_one_entry")
def test_trimming_removes_nothing_that_any_group_still_needs(client: Client) -> None:
    fill(client, 20)
    assert worker(client, join=False).trim() == 0
    mine = worker(client)
    found = mine.fetch(count=15)
    mine.ack(*found[:5], *found[6:])
    client.execute("XGROUP", "CREATE", "in", "other", "9-0")
    assert (mine.trim(), client.execute("XRANGE", "in", "-", "+", "COUNT", 1)[0][0]) == (5, b"6-0")
    mine.ack(found[5])
    mine.trim()
    assert client.execute("XRANGE", "in", "-", "+", "COUNT", 1)[0][0] == b"9-0"
    assert ids(mine.fetch(count=20)) == [16, 17, 18, 19, 20]
