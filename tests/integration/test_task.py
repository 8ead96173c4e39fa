"""The engine's task, on real Redis and Arrow batches: what one execution of a partition does."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from millstream import After, App, Message, Reject, Retry, State
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.delivery.effects import MAX_COMMIT_OUTPUTS, Effects
from millstream.errors import StaleOwner, Unfinished
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.spark.engine import watchdog
from tests.support.memory import relieved_once_refused
from tests.support.stream_reports import counted
from tests.support.task_fixtures import Item, Row, TaskFixture, only
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.spark]


ENDLESS_S = 1e6


@pytest.fixture
def bench(client: Client) -> TaskFixture:
    return TaskFixture(client)


def back_off_until(monkeypatch: pytest.MonkeyPatch, happened: Callable[[], bool]) -> None:
    """Have no back-off end before `happened`: how fast the machine is makes no difference then."""
    sleep = asyncio.sleep

    async def until(delay_s: float) -> None:
        while not happened():
            await sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", until)


def test_messages_of_a_key_run_in_order_and_their_state_is_kept(bench: TaskFixture) -> None:
    batch = bench.rows(*((n, b"ab"[n % 2 : n % 2 + 1], {"n": n}) for n in range(1, 2001)))
    report = bench.process(bench.handler(), batch)
    for key in (b"a", b"b"):
        ours = [n for k, n, _ in bench.seen if k == key]
        assert ours == sorted(ours)
        assert len(ours) == 1000
    assert report["committed"] == 2000
    assert report["last_id"] == "2000-0"
    state = msgspec.msgpack.decode(bench.client.execute("HGET", HandlerKeys("app", "handle", "in").state, "a"))
    assert state == {"sum": sum(range(2, 2001, 2))}


def test_a_failing_message_is_retried_at_the_head_of_its_key_while_other_keys_go_on(
    bench: TaskFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_off_until(monkeypatch, lambda: (b"k29", 29, 1) in bench.seen)
    slow = bench.handler(retry=Retry(attempts=3, delay_ms=150, jitter=0))
    rows: list[Row] = [(1, b"a", {"n": 1, "fail": 2}), (2, b"a", {"n": 2})]
    rows += [(n, b"k%d" % n, {"n": n}) for n in range(3, 30)]
    report = bench.process(slow, bench.rows(*rows))
    assert report["retries"] == 2
    assert [(n, attempt) for key, n, attempt in bench.seen if key == b"a"] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    second_try = bench.seen.index((b"a", 1, 2))
    assert all((b"k%d" % n, n, 1) in bench.seen[:second_try] for n in range(3, 30))
    assert bench.outputs().index(1) < bench.outputs().index(2)


def test_hundreds_of_keys_that_back_off_at_once_do_not_delay_another(
    bench: TaskFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_off_until(monkeypatch, lambda: (b"good", 999, 1) in bench.seen)
    handler = bench.handler(retry=Retry(attempts=2, delay_ms=200, jitter=0))
    rows: list[Row] = [(n, b"bad%03d" % n, {"n": n, "fail": 1}) for n in range(1, 301)]
    report = bench.process(handler, bench.rows(*rows, (999, b"good", {"n": 999})))
    first_retry = next(i for i, (_, _, attempt) in enumerate(bench.seen) if attempt == 2)
    assert (b"good", 999, 1) in bench.seen[:first_retry]
    assert report["committed"] == 301
    assert report["retries"] == 300


def test_a_message_is_a_dead_letter_after_its_last_attempt_and_its_key_goes_on(
    bench: TaskFixture,
) -> None:
    report = bench.process(bench.handler(), bench.rows((1, b"a", {"n": 5, "fail": 9}), (2, b"a", {"n": 7})))
    (letter,) = bench.dead()
    assert (letter.reason, letter.attempts, letter.key, letter.id) == ("failed", 3, b"a", "1-0")
    assert letter.error == "RuntimeError: attempt 3 fails"
    assert "in handle" in letter.traceback
    assert "millstream/lifecycle" not in letter.traceback
    assert bench.outputs() == [7]
    assert report["dead"] == 1
    state = msgspec.msgpack.decode(bench.client.execute("HGET", HandlerKeys("app", "handle", "in").state, "a"))
    assert state == {"sum": 7}


def test_processing_a_partition_twice_applies_it_once(bench: TaskFixture) -> None:
    handler, batch = bench.handler(), bench.rows(*((n, b"%d" % (n % 5), {"n": n}) for n in range(1, 101)))
    bench.process(handler, batch)
    again = bench.process(handler, batch)
    assert sorted(bench.outputs()) == list(range(1, 101))
    assert again["committed"] == 0
    assert len(bench.seen) == 100


def test_messages_up_to_the_committed_offset_are_skipped(bench: TaskFixture) -> None:
    handler = bench.handler()
    CommitStore(bench.client, app="app", handler="handle", token=1).advance_committed({"in": EntryId(50, 0)})
    bench.process(handler, bench.rows(*((n, b"a", {"n": n}) for n in range(1, 101))))
    assert bench.outputs() == list(range(51, 101))


def test_a_twin_that_commits_first_within_a_run_is_detected_and_the_rest_uses_its_state(
    bench: TaskFixture,
) -> None:
    rows: list[Row] = [(n, b"a", {"n": n}) for n in range(1, 21)]
    twin = TaskFixture(bench.client)
    app = App("app")

    def handle(item: Item, state: State) -> dict[str, int]:
        bench.seen.append((None, item.n, 1))
        if len(bench.seen) == 10:  # while we work on the tenth, the twin commits the first fifteen
            with ThreadPoolExecutor(1) as pool:  # an event loop of its own
                pool.submit(twin.process, twin.handler(), twin.rows(*rows[:15])).result()
        state["sum"] = state.get("sum", 0) + item.n
        return {"n": item.n}

    report = bench.process(only(app, handle, key="k", into="out"), bench.rows(*rows))
    assert report["refused"] == 1
    assert report["committed"] == 5
    assert bench.outputs() == list(range(1, 21))
    state = msgspec.msgpack.decode(bench.client.execute("HGET", HandlerKeys("app", "handle", "in").state, "a"))
    assert state == {"sum": sum(range(1, 21))}


def test_an_older_run_stops_and_writes_nothing(bench: TaskFixture) -> None:
    handler = bench.handler()
    CommitStore(bench.client, app="app", handler="handle", token=2).begin_run(["in"])
    with pytest.raises(StaleOwner):
        bench.process(handler, bench.rows((1, b"a", {"n": 1})))
    assert bench.outputs() == []


def test_a_message_without_its_key_is_a_dead_letter_or_unordered_as_the_handler_chooses(bench: TaskFixture) -> None:
    rows: Sequence[Row] = [(1, None, {"n": 1}), (2, b"", {"n": 2}), (3, b"a", {"n": 3})]
    bench.process(bench.handler(), bench.rows(*rows))
    assert [(letter.reason, letter.id) for letter in bench.dead()] == [
        ("missing-key", "1-0"),
        ("missing-key", "2-0"),
    ]
    assert "no field 'k'" in bench.dead()[0].error
    bench.process(bench.handler(missing_key="unordered", name="other"), bench.rows(*rows))
    assert sorted(bench.outputs()) == [1, 2, 3, 3]
    assert bench.client.execute("HKEYS", HandlerKeys("app", "other", "in").state) == [b"a"]


def test_reject_undecodable_and_bad_output_are_dead_letters_at_once_with_their_bytes_kept(
    bench: TaskFixture,
) -> None:
    app = App("app")

    def handle(item: Item, state: State) -> dict[str, object]:
        if item.n == 2:
            raise Reject("no twos")
        if item.n == 3:
            state["thing"] = object()
        return {"n": float("nan") if item.n == 4 else item.n}

    rows: list[Row] = [(n, b"a", {"n": n}) for n in range(1, 6)]
    rows += [(6, b"a", {"n": "six", b"\xff\x00": b"\xfe" * 10}), (7, b"a", {})]
    bench.process(only(app, handle, key="k", into="out"), bench.rows(*rows))
    assert bench.outputs() == [1, 5]
    found = {letter.id: (letter.reason, letter.attempts) for letter in bench.dead()}
    assert found == {
        "2-0": ("rejected", 1),
        "3-0": ("bad-output", 1),
        "4-0": ("bad-output", 1),
        "6-0": ("undecodable", 1),
        "7-0": ("undecodable", 1),
    }
    assert bench.dead()[3].pairs == [b"n", b"six", b"\xff\x00", b"\xfe" * 10]


def test_an_exception_of_any_kind_fails_its_own_message_only(bench: TaskFixture) -> None:
    app = App("app")
    raised: list[type[BaseException]] = [
        SystemExit,
        asyncio.CancelledError,
        RecursionError,
        MemoryError,
        StopIteration,
    ]

    def handle(item: Item) -> dict[str, int]:
        if item.n < len(raised):
            raise raised[item.n]
        return {"n": item.n}

    rows: list[Row] = [(n + 1, b"%d" % n, {"n": n}) for n in range(len(raised) + 3)]
    bench.process(only(app, handle, key="k", into="out", retry=Retry(attempts=1)), bench.rows(*rows))
    assert bench.outputs() == [5, 6, 7]
    assert sorted(letter.error.partition(":")[0] for letter in bench.dead()) == sorted(r.__name__ for r in raised)


class Oddity(BaseException):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Oddity(), UnicodeDecodeError("utf-8", b"x", 0, 1, "\ud800")])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_error_of_any_kind_is_a_failed_message_with_its_reason(
    bench: TaskFixture, error: BaseException, kind: str
) -> None:
    app = App("app")

    @app.handler("in", key="k", name="handle", retry=Retry(attempts=2, delay_ms=1))
    def plain(item: Item) -> None:
        if item.n == 2:
            raise error

    async def coroutine(item: Item) -> None:
        plain(item)

    handler = app.handlers["handle"]
    if kind == "async":
        handler = replace(handler, function=coroutine, is_async=True)
    assert bench.process(handler, bench.rows(*((n, b"a", {"n": n}) for n in (1, 2, 3))))["committed"] == 3
    assert [(letter.id, letter.reason, letter.attempts) for letter in bench.dead()] == [("2-0", "failed", 2)]


def test_a_handler_that_cancels_its_own_task_fails_and_the_rest_of_its_key_is_done(bench: TaskFixture) -> None:
    app = App("app")

    @app.handler("in", key="k", name="handle", into="out", retry=Retry(attempts=1))
    async def handle(item: Item) -> dict[str, int]:
        if item.n == 2:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(ENDLESS_S)
        return {"n": item.n}

    done = bench.process(app.handlers["handle"], bench.rows(*((n, b"a", {"n": n}) for n in (1, 2, 3, 4))))
    assert (done["committed"], bench.outputs()) == (4, [1, 3, 4])
    assert [(letter.id, letter.reason) for letter in bench.dead()] == [("2-0", "failed")]


def test_a_handler_that_cancels_other_tasks_fails_the_spark_task_so_that_no_message_is_skipped(
    bench: TaskFixture,
) -> None:
    app = App("app")

    @app.handler("in", key="k", name="handle", into="out")
    async def handle(item: Item) -> dict[str, int]:
        if item.n == 1:
            main = min(asyncio.all_tasks(), key=lambda task: int(task.get_name().rpartition("-")[2]))
            for task in asyncio.all_tasks() - {main, asyncio.current_task()}:
                task.cancel()
        await asyncio.sleep(0.01)
        return {"n": item.n}

    rows = bench.rows(*((n, b"k%d" % n, {"n": n}) for n in range(10)))
    with pytest.raises(Unfinished, match="are unfinished"):
        bench.process(app.handlers["handle"], rows)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_attempt_beyond_its_time_limit_has_failed_and_its_key_goes_on(
    bench: TaskFixture, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The watchdog timer would kill this process, were it held up for some seconds.
    monkeypatch.setattr(watchdog, "_MIN_GRACE_MS", watchdog._MAX_GRACE_MS)
    app = App("app")

    @app.handler("in", key="k", name="handle", into="out", retry=Retry(attempts=2, delay_ms=1), time_limit_ms=1_000)
    def plain(item: Item) -> dict[str, int]:
        while item.n == 2:
            with contextlib.suppress(Exception):
                time.sleep(ENDLESS_S)
        return {"n": item.n}

    async def coroutine(item: Item) -> dict[str, int]:
        await asyncio.sleep(ENDLESS_S if item.n == 2 else 0)
        return {"n": item.n}

    handler = app.handlers["handle"]
    if kind == "async":
        handler = replace(handler, function=coroutine, is_async=True)
    done = bench.process(handler, bench.rows(*((n, b"a", {"n": n}) for n in (1, 2, 3))))
    assert (done["committed"], bench.outputs()) == (3, [1, 3])
    assert [letter.error for letter in bench.dead()] == ["it took longer than its time limit of 1,000 ms"]


def test_a_plain_handler_may_have_an_event_loop_of_its_own(bench: TaskFixture) -> None:
    app = App("app")

    @app.handler("in", key="k", name="handle", into="out")
    def handle(item: Item) -> dict[str, int]:
        return {"n": asyncio.run(asyncio.sleep(0, item.n))}

    bench.process(app.handlers["handle"], bench.rows(*((n, b"a", {"n": n}) for n in (1, 2, 3))))
    assert bench.outputs() == [1, 2, 3]


@pytest.mark.parametrize("mistake", ["\ud800", SystemExit(3), Oddity()])
def test_a_key_function_that_fails_in_any_way_makes_a_dead_letter(bench: TaskFixture, mistake: object) -> None:
    app = App("app")

    def key(message: Message) -> str:
        if isinstance(mistake, BaseException):
            raise mistake
        return str(mistake)

    @app.handler("in", key=key, name="handle")
    def handle(item: Item) -> None: ...

    assert bench.process(app.handlers["handle"], bench.rows((1, None, {"n": 1})))["dead"] == 1
    assert [letter.reason for letter in bench.dead()] == ["undecodable"]


def test_a_sibling_that_fails_the_task_makes_no_dead_letters_of_running_messages(bench: TaskFixture) -> None:
    app = App("app")

    async def handle(item: Item) -> None:
        running.add(item.n)
        if item.n == 0:
            await eventually_async(lambda: len(running) == 18, "all others to run")
            CommitStore(bench.client, app="app", handler="handle", token=2).begin_run(["in"])
        elif item.n == 1:
            raise ValueError("its retry commits what came before, which a newer run refuses")
        else:
            await asyncio.sleep(ENDLESS_S)

    running = set[int]()
    handler = only(app, handle, key="k", retry=Retry(attempts=2, delay_ms=1))
    others: list[Row] = [(n, b"%d" % n, {"n": n}) for n in range(3, 20)]
    with pytest.raises(BaseExceptionGroup, match="unhandled") as raised:
        bench.process(handler, bench.rows((1, b"0", {"n": 0}), (2, b"0", {"n": 1}), *others))
    assert raised.group_contains(StaleOwner)
    assert bench.dead() == []


def test_a_twin_that_starts_after_the_batch_has_ended_stops_at_once(bench: TaskFixture) -> None:
    app = App("app")

    def handle(item: Item) -> dict[str, int]:
        bench.seen.append((None, item.n, 1))
        if len(bench.seen) == 1:
            twin = TaskFixture(bench.client)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(twin.process, twin.handler(), batch).result()
            CommitStore(bench.client, app="app", handler="handle", token=1).advance_committed({"in": EntryId(3, 0)})
        return {"n": item.n}

    batch = bench.rows(*((n, b"a", {"n": n}) for n in range(1, 4)))
    bench.process(only(app, handle, key="k", into="out"), batch)
    assert bench.outputs() == [1, 2, 3]
    assert len(bench.seen) == 3


def test_state_with_a_name_that_is_not_text_is_bad_output_and_its_key_goes_on(bench: TaskFixture) -> None:
    app = App("app")

    def handle(item: Item, state: State) -> dict[str, int]:
        if item.n == 1:
            state[5] = 1  # type: ignore[index]
        return {"n": item.n}

    bench.process(only(app, handle, key="k", into="out"), bench.rows((1, b"a", {"n": 1}), (2, b"a", {"n": 2})))
    assert bench.outputs() == [2]
    assert [letter.reason for letter in bench.dead()] == ["bad-output"]


def test_damaged_state_makes_dead_letters_not_a_dead_task(bench: TaskFixture) -> None:
    for damaged in (b"\xc1", b"\x81\xa1\xff\x01"):
        bench.client.execute("FLUSHALL")
        bench.client.execute("HSET", HandlerKeys("app", "handle", "in").state, "a", damaged)
        bench.process(bench.handler(), bench.rows((1, b"a", {"n": 1}), (2, b"b", {"n": 2})))
        assert bench.outputs() == [2]
        assert "damaged" in bench.dead()[0].error


def test_async_handlers_of_different_keys_run_together_and_of_one_key_in_order(bench: TaskFixture) -> None:
    app = App("app")
    active: set[int] = set()
    most = 0

    async def handle(item: Item, message: Message) -> dict[str, int]:
        nonlocal most
        active.add(item.n)
        most = max(most, len(active))
        await eventually_async(lambda: most >= 20, "as many to run at once as may")
        active.discard(item.n)
        return {"n": item.n}

    rows: list[Row] = [(n, b"%d" % (n % 40), {"n": n}) for n in range(1, 201)]
    bench.process(only(app, handle, key="k", into="out", concurrency=20), bench.rows(*rows))
    assert most == 20
    outputs = bench.outputs()
    for key in range(40):
        ours = [n for n in outputs if n % 40 == key]
        assert ours == sorted(ours)
        assert len(ours) == 5


def test_unkeyed_messages_are_each_committed_once(bench: TaskFixture) -> None:
    app = App("app")

    def handle(item: Item) -> list[dict[str, int]]:
        return [{"n": item.n}, {"n": -item.n}]

    handler = only(app, handle, into="out")
    batch = bench.rows(*((n, None, {"n": n}) for n in range(1, 1201)))
    bench.process(handler, batch)
    bench.process(handler, batch)
    assert sorted(map(abs, bench.outputs())) == sorted([*range(1, 1201)] * 2)


def test_a_redriven_entry_runs_in_its_own_handler_only_and_without_the_redrive_field(bench: TaskFixture) -> None:
    app = App("app")
    pairs: list[Sequence[bytes]] = []

    def handle(message: Message) -> None:
        pairs.append(message.pairs)

    rows: list[Row] = [
        (1, b"a", {REDRIVE_FIELD: b"app.handle", "n": 1}),
        (2, b"a", {REDRIVE_FIELD: b"app.another", "n": 2}),
        (3, b"a", {"n": 3}),
        (4, b"a", {REDRIVE_FIELD: b"app.another", "n": 4}),
        (5, b"a", {REDRIVE_FIELD: b"app.handle", "n": 5}),
    ]
    report = bench.process(only(app, handle, key="k"), bench.rows(*rows))
    assert pairs == [[b"n", b"1"], [b"n", b"3"], [b"n", b"5"]]
    assert (report["messages"], report["committed"]) == (5, 3)
    assert counted(bench.client, "handle") == [(3, 3)]


def test_a_run_longer_than_a_commit_is_committed_in_parts(bench: TaskFixture) -> None:
    report = bench.process(bench.handler(), bench.rows(*((n, b"a", {"n": n}) for n in range(1, 1301))))
    assert bench.outputs() == list(range(1, 1301))
    assert report["committed"] == 1300
    assert report["refused"] == 0


@pytest.mark.parametrize("keys", [b"aaaa", b"abcd"], ids=["one key", "many keys"])
def test_outputs_beyond_those_of_one_call_to_redis_are_committed_in_parts(
    bench: TaskFixture, monkeypatch: pytest.MonkeyPatch, keys: bytes
) -> None:
    commit = CommitStore.commit
    sizes: list[int] = []

    def measured(store: CommitStore, units: Mapping[str, Sequence[Effects]], **options: Any) -> list[Effects]:
        sizes.append(sum(len(unit.outputs) for some in units.values() for unit in some))
        return commit(store, units, **options)

    monkeypatch.setattr(CommitStore, commit.__name__, measured)

    def handle(item: Item) -> list[dict[str, int]]:
        return [{"n": item.n}] * (MAX_COMMIT_OUTPUTS // 2)

    rows = bench.rows(*((n, keys[n - 1 : n], {"n": n}) for n in range(1, 5)))
    bench.process(only(App("app"), handle, key="k", into="out"), rows)
    assert bench.client.execute("XLEN", "out") == 2 * MAX_COMMIT_OUTPUTS
    assert [size for size in sizes if size] == [MAX_COMMIT_OUTPUTS] * 2


def test_the_task_waits_for_memory_and_continues_without_counting_an_attempt(bench: TaskFixture) -> None:
    with relieved_once_refused(bench.client.url):
        bench.process(bench.handler(), bench.rows((1, b"a", {"n": 1})))
    assert bench.seen == [(b"a", 1, 1)]
    assert bench.outputs() == [1]


def test_a_task_sets_the_timers_of_a_message_beside_its_output_and_state(bench: TaskFixture) -> None:
    def handle(message: Message, state: State) -> list[Any]:
        state["n"] = number = int(message.fields["n"])
        return [{"n": number}, After("1h", {"n": number}, name=f"remind-{number}")]

    handler = only(App("app"), handle, name="handle", key="k", into="out")
    done = bench.process(handler, bench.rows(*((n, b"a", {"n": n, "k": "a"}) for n in (1, 2))))
    assert (done["committed"], bench.outputs()) == (2, [1, 2])
    assert len(DelayedMessages(bench.client).find("in", limit=10)) == 2


def test_a_handler_that_changes_its_message_changes_neither_the_dead_letter_nor_what_of_its_key_is_done(
    bench: TaskFixture,
) -> None:
    def handle(message: Message) -> dict[str, int]:
        n = int(message.fields["n"])
        if n == 2:
            message.stream, message.id, message.pairs, message.key = "other", "9-0", [], b"other"
            raise Reject("no")
        return {"n": n}

    handler = only(App("app"), handle, name="handle", key="k", into="out")
    for numbers in (range(1, 3), range(3, 10)):  # as in two batches, the first of which is not at its end yet
        bench.process(handler, bench.rows(*((n, b"a", {"n": n}) for n in numbers)))
    assert bench.outputs() == [1, *range(3, 10)]
    (dead,) = bench.dead()
    assert (dead.stream, dead.id, dead.key, list(dead.pairs)) == ("in", "2-0", b"a", [b"n", b"2"])


def test_a_handler_of_lists_that_changes_its_messages_has_done_those_that_were_published(bench: TaskFixture) -> None:
    def handle(messages: list[Message]) -> list[dict[str, str]]:
        outputs = [{"n": message.text("n", "")} for message in messages]
        for message in messages:
            message.id = "9-0"
        return outputs

    handler = only(App("app"), handle, name="handle", into="out")
    for _ in range(2):  # Spark may repeat a task
        bench.process(handler, bench.rows(*((n, None, {"n": n}) for n in range(1, 4))))
    assert bench.outputs() == [1, 2, 3]
