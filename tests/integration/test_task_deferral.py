"""What the engine's task defers: keys that are parked, or wait for long, while their batch and other keys go on."""

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from millstream import App, Message, Retry, State
from millstream.admin.inspection import inspect
from millstream.admin.key_queues import list_queues, park, skip, unpark
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.keyed_stream import KeyedStream, queue_of_key
from millstream.delivery.reliable_stream import TRIM, ReliableStream
from millstream.errors import ConfigError
from millstream.handlers.handler import Handler
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.redis_client.replies import mapping_of
from millstream.spark import key_blocks
from millstream.testing.invariants import check_invariants
from tests.support.stream_reports import counted
from tests.support.task_fixtures import Item, Row, TaskFixture, only
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import working

pytestmark = [pytest.mark.spark]

KEYS = HandlerKeys("app", "handle", "in")
HOUR_MS = 3_600_000.0
A = b"kA"


class Deferral(TaskFixture):
    """A bench whose entries are in the stream as well, and a run on Spark that has begun."""

    batch: list[Row]

    def begin(self, handler: Handler) -> None:
        self.token = self._commit_store(handler).new_token(["in"])
        self._commit_store(handler).begin_run(["in"])

    def run(self, handler: Handler, rows: list[Row]) -> dict[str, Any]:
        """A whole batch."""
        report = self.process(handler, self.rows(*rows))
        self._commit_store(handler).advance_committed({"in": EntryId(max(n for n, _, _ in rows), 0)})
        return report

    def _commit_store(self, handler: Handler) -> CommitStore:
        keyed = handler.key is not None
        return CommitStore(self.client, app=handler.app, handler=handler.name, token=self.token, keyed=keyed)

    def queues(self) -> dict[bytes | None, tuple[str, int]]:
        return {queue.key: (queue.state, queue.length) for queue in list_queues(self.client, KEYS)}

    def check(self) -> None:
        assert check_invariants(self.client, KEYS, "in") == []


@pytest.fixture
def bench(client: Client) -> Deferral:
    return Deferral(client)


def parking(bench: Deferral, **options: Any) -> Handler:
    handler = bench.handler(**{"retry": Retry(attempts=2, delay_ms=1, then="park"), **options})
    bench.begin(handler)
    return handler


def worker(client: Client) -> KeyedStream:
    def queue_of(entry_id: bytes, pairs: Any) -> bytes:
        return queue_of_key(mapping_of(pairs).get(b"k"), entry_id)

    stream = KeyedStream(client, "in", queue_of=queue_of, app="app", handler="handle", consumer="w1", into="out")
    stream.join()
    return stream


def test_a_key_is_parked_after_its_last_attempt_and_its_later_messages_wait(bench: Deferral) -> None:
    handler = parking(bench)
    report = bench.run(handler, bench.add(1, 2, 3, 4, 5, keys="ABABA", fail=9))
    assert (report["committed"], report["deferred"], report["dead"]) == (2, 3, 0)
    report = bench.run(handler, bench.add(6, 7, keys="AB"))
    assert (report["committed"], report["deferred"]) == (1, 1)
    assert (bench.outputs(), bench.queues()) == ([2, 4, 7], {b"A": ("parked", 4)})
    (queue,) = list_queues(bench.client, KEYS)
    assert (queue.first_id, queue.failed_attempts, queue.parked_reason) == (
        "1-0",
        2,
        "failed: RuntimeError: attempt 2 fails",
    )
    assert bench.process_deferred(handler) == {}
    bench.check()


def test_an_unparked_key_goes_on_in_order_with_its_state_and_new_attempts(bench: Deferral) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, keys="A") + bench.add(2, 3, keys="AB", fail=9) + bench.add(4, keys="A"))
    works = replace(handler, retry=Retry(attempts=20, delay_ms=0, then="park"))
    assert unpark(bench.client, KEYS, A)
    bench.run(works, bench.add(5, keys="A"))
    assert bench.queues() == {b"A": ("ready", 3)}
    (queue,) = list_queues(bench.client, KEYS)
    assert queue.why == "waits for the Spark run, number 1 of the ready queues"
    bench.seen.clear()
    bench.process_deferred(works)
    assert [(n, attempt) for _, n, attempt in bench.seen] == [*((2, n + 1) for n in range(10)), (4, 1), (5, 1)]
    bench.run(works, bench.add(6, keys="A"))
    assert bench.outputs() == [1, 3, 2, 4, 5, 6]
    bench.check()
    assert bench.client.execute("EXISTS", KEYS.parked, KEYS.ready, KEYS.crashes, KEYS.offsets) == 0
    assert bench.client.execute("HGET", KEYS.state, "A") == b"\x81\xa3sum\x12"


def test_a_parked_key_that_fails_again_is_parked_again_and_a_skip_leaves_it_parked(bench: Deferral) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, keys="AA", fail=9))
    unpark(bench.client, KEYS, A)
    assert bench.process_deferred(handler)["deferred"] == 1
    assert (bench.queues(), skip(bench.client, KEYS, A, error="x")) == ({b"A": ("parked", 2)}, "1-0")
    assert bench.queues() == {b"A": ("parked", 1)}
    bench.check()
    assert [(letter.reason, letter.attempts) for letter in bench.dead()] == [("skipped", 2)]


@pytest.mark.parametrize("engine", ["spark", "workers"])
def test_a_deferred_message_for_another_handler_does_not_count(bench: Deferral, engine: str) -> None:
    handler = parking(bench)
    other = (2, b"A", {REDRIVE_FIELD: b"app.other", "k": "A"})
    bench.client.execute("XADD", "in", "1-0", "n", 1, "k", "A", "fail", 2)
    bench.client.execute("XADD", "in", "2-0", REDRIVE_FIELD, "app.other", "k", "A")
    bench.run(handler, [(1, b"A", {"n": 1, "k": "A", "fail": 2}), other, *bench.add(3, keys="A")])
    assert bench.queues() == {b"A": ("parked", 3)}
    works = replace(handler, retry=Retry(attempts=20, delay_ms=0))
    unpark(bench.client, KEYS, A)
    if engine == "spark":
        assert bench.process_deferred(works)["committed"] == 2
    else:
        with working(bench.client, works) as loop:
            eventually(lambda: loop.loop_metrics.done == 3)
        assert loop.loop_metrics.committed == 2
    assert (bench.outputs(), bench.queues(), counted(bench.client, "handle")) == ([1, 3], {}, [(2, 2)])


@pytest.mark.parametrize("again", [False, True], ids=["next batch", "same batch"])
def test_a_repeated_batch_defers_nothing_twice(bench: Deferral, again: bool) -> None:
    handler = parking(bench)
    rows = bench.add(1, 2, 3, keys="AAB", fail=9)
    bench.process(handler, bench.rows(*rows))
    bench.begin(handler)
    if again:
        unpark(bench.client, KEYS, A)
    report = bench.process(handler, bench.rows(*rows, *bench.add(4, keys="A")))
    assert (report["committed"], report["deferred"]) == (0, 1)
    assert bench.queues() == {b"A": ("ready" if again else "parked", 3)}
    bench.check()


def test_a_key_that_an_operator_parks_while_it_runs_is_not_committed_and_waits(bench: Deferral) -> None:
    app = App("app")

    def handle(item: Item, state: State) -> dict[str, int]:
        if item.n == 2:
            park(bench.client, KEYS, A, "stop it")
        return {"n": item.n}

    handler = only(app, handle, key="k", into="out")
    bench.begin(handler)
    report = bench.run(handler, bench.add(1, 2, 3, keys="AAB"))
    assert (bench.outputs(), report["deferred"], bench.queues()) == ([3], 2, {b"A": ("parked", 2)})
    unpark(bench.client, KEYS, A)
    bench.process_deferred(replace(handler, function=lambda item, state: {"n": item.n}))
    assert bench.outputs() == [3, 1, 2]
    bench.check()


def test_a_queued_message_that_is_skipped_while_it_runs_is_not_committed(bench: Deferral) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, keys="AA", fail=9))
    unpark(bench.client, KEYS, A)

    def handle(item: Item, message: Message, state: State) -> dict[str, int]:
        if item.n == 1:
            assert skip(bench.client, KEYS, A, error="x")
        return {"n": item.n}

    bench.process_deferred(replace(handler, function=handle))
    assert (bench.outputs(), [letter.id for letter in bench.dead()]) == ([2], ["1-0"])
    bench.check()


def test_a_queued_message_that_is_parked_while_it_runs_is_not_committed(bench: Deferral) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, keys="AA", fail=9))
    unpark(bench.client, KEYS, A)

    def handle(item: Item, message: Message, state: State) -> dict[str, int]:
        park(bench.client, KEYS, A, "stop it")
        return {"n": item.n}

    bench.process_deferred(replace(handler, function=handle))
    assert (bench.outputs(), bench.queues()) == ([], {b"A": ("parked", 2)})
    bench.check()


def test_a_key_with_distant_attempts_is_deferred_and_its_attempts_are_counted_on(bench: Deferral) -> None:
    retry = Retry(attempts=3, delay_ms=1, factor=HOUR_MS, max_delay_ms=HOUR_MS, jitter=0)
    handler = parking(bench, retry=retry)
    report = bench.run(handler, bench.add(1, keys="A", fail=2) + bench.add(2, 3, keys="AB"))
    assert (report["committed"], report["deferred"], report["retries"]) == (1, 2, 2)
    assert bench.queues() == {b"A": ("backing off", 2)}
    ready = bench.runnable(handler)
    assert ready.queues == []
    assert ready.wait_ms is not None
    assert 0 < ready.wait_ms <= HOUR_MS + 1
    bench.client.execute("ZADD", KEYS.backoff, 1, A)
    bench.process_deferred(handler)
    assert (bench.outputs(), bench.seen[-2:]) == ([3, 1, 2], [(b"A", 1, 3), (b"A", 2, 1)])
    bench.check()
    assert bench.client.execute("EXISTS", KEYS.crashes) == 0


@pytest.mark.parametrize("advance", [True, False], ids=["whole batch", "half batch"])
def test_an_unkeyed_message_with_a_long_back_off_delays_no_other_and_can_move_to_workers(
    bench: Deferral, advance: bool
) -> None:
    def handle(item: Item, message: Message) -> dict[str, int]:
        if item.fail:
            raise RuntimeError("no")
        return {"n": item.n}

    handler = only(
        App("app"), handle, into="out", retry=Retry(attempts=2, delay_ms=HOUR_MS, max_delay_ms=HOUR_MS, then="block")
    )
    bench.begin(handler)
    rows: list[Row] = [(n, None, fields) for n, _, fields in bench.add(1, 2, 3, keys="ABC", fail=9)]
    report = bench.run(handler, rows) if advance else bench.process(handler, bench.rows(*rows))
    assert (report["committed"], report["deferred"], bench.runnable(handler).queues) == (2, 1, [])
    stream = ReliableStream(bench.client, "in", app="app", handler="handle", consumer="u1", into="out")
    stream.join()
    found = [*stream.claim_idle(), *stream.fetch(count=10)]
    assert [(one.id, one.attempt) for one in found] == [(b"1-0", 2 if advance else 1)]
    assert stream.commit([stream.effects_of(found[0])]) == []
    assert bench.client.execute("EXISTS", KEYS.crashes) == 0
    assert bench.client.execute("XPENDING", "in", KEYS.group)[0] == 0


@pytest.mark.parametrize("advance", [True, False], ids=["whole batch", "half batch"])
def test_parked_keys_move_from_spark_to_workers_and_back_in_order(bench: Deferral, advance: bool) -> None:
    handler = parking(bench)
    rows = bench.add(1, 2, 3, keys="AAB", fail=9)
    (bench.run if advance else lambda h, r: bench.process(h, bench.rows(*r)))(handler, rows)
    bench.add(4, 5, keys="AB")
    keyed = worker(bench.client)
    keyed.enqueue_new(count=10, max_pending=100)
    assert bench.queues() == {b"A": ("parked", 3), b"B": ("ready", 1)}
    bench.check()
    bench.begin(handler)
    assert bench.queues() == {b"A": ("parked", 3)}
    bench.check()
    works = replace(handler, retry=Retry(attempts=20, delay_ms=0))
    position = bench._commit_store(handler).begin_run(["in"])["in"]
    left = [
        (n, k, f)
        for n, k, f in [(4, b"A", {"n": 4}), (5, b"B", {"n": 5})]
        if n > (position.committed_id or EntryId(0, 0)).ms
    ]
    report = bench.run(works, [*left, *bench.add(6, keys="A")])
    assert (bench.queues(), report["deferred"]) == ({b"A": ("parked", 4)}, 1)
    unpark(bench.client, KEYS, A)
    bench.process_deferred(works)
    assert bench.outputs() == [3, 5, 1, 2, 4, 6]
    bench.check()


def test_a_key_that_waits_on_spark_is_leased_by_the_next_worker(bench: Deferral) -> None:
    bench.run(parking(bench), bench.add(1, 2, keys="AA", fail=9))
    unpark(bench.client, KEYS, A)
    keyed = worker(bench.client)
    (lease,) = keyed.lease_keys(queues=9, entries=9, run=9, lease_ms=60_000, now_ms=0).leases
    assert [(one.id, one.attempt) for one in lease.entries] == [(b"1-0", 1), (b"2-0", 1)]
    bench.check()


def test_a_handler_without_a_key_does_not_begin_where_keys_wait(bench: Deferral) -> None:
    bench.run(parking(bench), bench.add(1, 2, keys="AA", fail=9))
    with pytest.raises(ConfigError, match="unpark them or skip"):
        bench.begin(only(App("app"), lambda message: None, name="handle"))


def test_dropping_the_progress_drops_parked_keys(bench: Deferral) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, keys="AA", fail=9))
    bench._commit_store(handler).drop_progress(["in"])
    assert (bench.queues(), bench.client.execute("XPENDING", "in", KEYS.group)[0]) == ({}, 0)


def test_an_entry_that_is_deleted_while_deferred_is_logged_and_the_next_goes_on(
    bench: Deferral, caplog: pytest.LogCaptureFixture
) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, keys="AA", fail=9))
    bench.client.execute("XDEL", "in", "1-0")
    unpark(bench.client, KEYS, A)
    with caplog.at_level(logging.WARNING):
        bench.process_deferred(replace(handler, retry=Retry(attempts=20, delay_ms=0)))
    assert (bench.outputs(), bench.dead()) == ([2], [])
    assert "were trimmed or deleted before processing; skipping them: 1-0" in caplog.text
    bench.check()


def test_deferring_does_not_recreate_a_deleted_stream(bench: Deferral, caplog: pytest.LogCaptureFixture) -> None:
    handler = parking(bench)
    rows = bench.add(1, 2, keys="AB", fail=9)
    bench.client.execute("DEL", "in")
    bench.run(handler, rows)
    assert bench.queues() == {b"A": ("parked", 1)}
    unpark(bench.client, KEYS, A)
    bench.process_deferred(handler)
    assert "were trimmed or deleted before processing; skipping them: 1-0" in caplog.text
    assert (bench.outputs(), bench.queues(), bench.client.execute("EXISTS", "in")) == ([2], {}, 0)


def test_deferred_entries_are_pending_so_that_tools_show_them_and_trimming_keeps_them(bench: Deferral) -> None:
    bench.run(parking(bench), bench.add(1, 2, keys="AB", fail=9))
    assert bench.client.execute("XPENDING", "in", KEYS.group)[:2] == [1, b"1-0"]
    (report,) = inspect(bench.client).handlers
    assert (report.engine, report.pending, report.lag, report.consumers) == ("spark", 1, 1, 0)


@pytest.mark.parametrize("seen_by", ["the jobs", "the next batch"])
def test_deferred_entries_are_not_trimmed_after_an_operator_has_destroyed_the_group(
    bench: Deferral, seen_by: str
) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, 3, keys="BAB", fail=9))
    bench.client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    bench.client.execute("XGROUP", "CREATE", "in", KEYS.group, "3-0")  # as the driver shows it again
    if seen_by == "the jobs":
        assert bench.runnable(handler).queues == []
    else:
        bench.run(handler, bench.add(4, keys="A"))
    bench.client.script(TRIM, ("in",), (1_000, ""))
    assert bench.client.execute("XPENDING", "in", KEYS.group)[1] == b"2-0"
    bench.check()


def test_a_destroyed_group_is_created_again_only_while_entries_are_deferred(bench: Deferral) -> None:
    handler = parking(bench)
    bench.run(handler, bench.add(1, 2, keys="AB", fail=9))
    bench.client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    bench.runnable(handler)
    bench.check()
    assert bench.runnable(handler).entry_count == 1
    skip(bench.client, KEYS, A, error="x")
    unpark(bench.client, KEYS, A)
    bench.client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    bench.runnable(handler)
    assert bench.client.execute("XINFO", "GROUPS", "in") == []


# What runs beside a batch


def works_of(handler: Handler) -> Handler:
    """The same handler once nothing fails any more; it adds up what it has seen of a key."""

    def handle(item: Item, message: Message, state: State) -> dict[str, int]:
        state["sum"] = state.get("sum", 0) + item.n
        return {"n": item.n}

    return replace(handler, function=handle)


def make_due_and_work_off(bench: Deferral, handler: Handler) -> None:
    """As a job does that drains key queues, at whatever moment of a batch."""
    bench.client.execute("ZADD", KEYS.backoff, "XX", 1, A)
    thread = threading.Thread(target=bench.process_deferred, args=(handler,))  # it has an event loop of its own
    thread.start()
    thread.join(FAIL_SAFE_S)
    assert not thread.is_alive()


def sums(bench: Deferral) -> bytes:
    found: bytes = bench.client.execute("HGET", KEYS.state, "A")
    return found


@pytest.mark.parametrize("moment", ["before the state is loaded", "after"])
def test_a_key_that_is_drained_while_a_batch_begins_leaves_it_no_stale_state(
    bench: Deferral, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = parking(bench, retry=Retry(attempts=3, delay_ms=HOUR_MS, max_delay_ms=HOUR_MS, jitter=0))
    works = works_of(handler)
    bench.run(handler, bench.add(1, keys="A", fail=9))
    load, done = CommitStore.load, threading.Event()

    def meanwhile(store: CommitStore, wanted: Any) -> Any:
        found = load(store, wanted) if moment == "after" else None
        if not done.is_set():
            done.set()
            make_due_and_work_off(bench, works)
        return load(store, wanted) if found is None else found

    monkeypatch.setattr(CommitStore, CommitStore.load.__name__, meanwhile)
    bench.run(works, bench.add(2, keys="A"))
    bench.process_deferred(works)
    assert (bench.outputs(), sums(bench), bench.queues()) == ([1, 2], b"\x81\xa3sum\x03", {})
    bench.check()


def test_a_key_that_a_task_has_deferred_waits_in_its_later_messages_too(
    bench: Deferral, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_blocks, "CHUNK_MESSAGES", 1)
    handler = parking(bench, retry=Retry(attempts=3, delay_ms=HOUR_MS, max_delay_ms=HOUR_MS, jitter=0))
    works = works_of(handler)

    def handle(item: Item, message: Message, state: State) -> Any:
        if item.n == 1:
            raise RuntimeError("not now")
        make_due_and_work_off(bench, works)
        return works.function(item=item, message=message, state=state)

    first, second = bench.add(1, keys="A"), bench.add(2, keys="A")
    bench.process(replace(handler, function=handle), bench.rows(*first), bench.rows(*second))
    make_due_and_work_off(bench, works)
    assert (bench.outputs(), sums(bench), bench.queues()) == ([1, 2], b"\x81\xa3sum\x03", {})


@pytest.mark.parametrize("routed", [0, 1])
def test_keys_that_half_a_batch_has_deferred_are_not_lost_when_workers_come_and_go_at_once(
    bench: Deferral, routed: int
) -> None:
    handler = parking(bench, retry=Retry(attempts=3, delay_ms=HOUR_MS, max_delay_ms=HOUR_MS, jitter=0))
    rows = bench.add(1, 2, 3, keys="BAA", fail=9)
    bench.process(handler, bench.rows(*rows))
    joined = worker(bench.client)
    if routed:
        joined.enqueue_new(count=1, max_pending=100)
    bench.begin(handler)
    committed_id = bench._commit_store(handler).begin_run(["in"])["in"].committed_id or EntryId(0, 0)
    bench.run(works_of(handler), [row for row in rows if row[0] > committed_id.ms])
    assert (bench.outputs(), bench.dead()) == ([1, 2, 3], [])
    bench.check()
