"""The limit of a handler on both engines: never exceeded, and no other value of the field is held up."""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream import App, Limit, Message, Retry, State
from millstream.admin.key_queues import list_queues
from millstream.delivery.keyed_stream import KeyedStream
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.spark.engine.task_permits import TaskPermit, TaskPermits
from millstream.spark.key_blocks import read_chunks
from millstream.testing.invariants import check_invariants
from tests.support.task_fixtures import TaskFixture, only
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, dead, make, now_ms, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]


class Running:
    """Counts how many messages of each tenant run at the same time, and when each began."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.began_ms: dict[str, list[float]] = defaultdict(list)
        self.attempts: Counter[int] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def one(self, message: Message) -> Iterator[None]:
        """A run of a message."""
        tenant = message.text("tenant") or ""
        with self._lock:
            self.began_ms[tenant].append(time.monotonic() * 1000)
            self.attempts[message.attempt] += 1
            self.now[tenant] += 1
            self.most[tenant] = max(self.most[tenant], self.now[tenant])
        try:
            yield
        finally:
            with self._lock:
                self.now[tenant] -= 1


def publish(client: Client, count: int, tenant: str, *, keys: int = 4, **fields: Any) -> None:
    items = [part for pair in fields.items() for part in pair]
    commands = [
        ("XADD", "in", "*", "n", n, "key", f"{tenant}{n % keys}", "tenant", tenant, *items) for n in range(count)
    ]
    client.pipeline(commands)


def numbers(client: Client) -> dict[str, list[int]]:
    """The numbers of the outputs, by key, in order."""
    found: dict[str, list[int]] = defaultdict(list)
    for _, (_, n, _, key) in client.execute("XRANGE", "out", "-", "+"):
        found[key.decode()].append(int(n))
    return found


def check_all(client: Client, **counts: int) -> None:
    """Check: each message of each tenant has one output, in the order of its key, and nothing is left."""
    found = numbers(client)
    for tenant, count in counts.items():
        some = [n for key, values in found.items() if key.startswith(tenant) for n in values]
        assert sorted(some) == list(range(count))
    assert all(values == sorted(values) for values in found.values())
    assert pending(client) == 0
    assert dead(client) == []
    assert client.execute("HLEN", KEYS.crashes) == 0, "a wait counts as no attempt"
    assert check_invariants(client, KEYS, "in") == []


ONCE = Retry(attempts=1)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_no_more_messages_of_a_tenant_run_at_once_than_its_limit_on_all_workers_together(
    client: Client, is_async: bool
) -> None:
    running = Running()

    def plain(message: Message) -> dict[str, str | None]:
        with running.one(message):
            time.sleep(0.005)
        return {"n": message.text("n"), "key": message.text("key")}

    async def coroutine(message: Message) -> dict[str, str | None]:
        with running.one(message):
            await asyncio.sleep(0.005)
        return {"n": message.text("n"), "key": message.text("key")}

    limit = Limit(per="tenant", at_once=2)
    handler = make(coroutine if is_async else plain, key="key", limit=limit, retry=ONCE)
    publish(client, 40, "a", keys=8)
    publish(client, 20, "b", keys=2)
    with working(client, handler, "w1"), working(client, handler, "w2"):
        eventually(lambda: client.execute("XLEN", "out") == 60, "all outputs")
    check_all(client, a=40, b=20)
    assert running.most["a"] <= 2
    assert running.most["b"] <= 2
    assert running.attempts == {1: 60}
    assert client.execute("KEYS", f"{KEYS.base}:permits:*") == []


def test_a_tenant_at_its_limit_holds_up_no_other_tenant(client: Client) -> None:
    running, gate = Running(), threading.Event()

    def handle(message: Message) -> dict[str, str | None]:
        with running.one(message):
            if message.text("tenant") == "a":
                gate.wait(FAIL_SAFE_S)
        return {"n": message.text("n"), "key": message.text("key")}

    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1), retry=ONCE)
    publish(client, 200, "a", keys=200)
    publish(client, 50, "b", keys=5)
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("XLEN", "out") == 50, "the other tenant")
        eventually(lambda: running.most["a"], "a run of the tenant at its limit")
        assert running.most["a"] == 1
        gate.set()
        eventually(lambda: client.execute("XLEN", "out") == 250, "all outputs")
    check_all(client, a=200, b=50)
    assert running.most["a"] == 1


def test_messages_of_a_tenant_begin_as_far_apart_as_its_rate_demands(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, asked_ms = Running(), list[float]()
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, *args: Any) -> list[float]:
        began_ms = time.monotonic() * 1000
        waits = real_exchange(self, *args)
        for (_, share), wait_ms in zip(args[-1], waits, strict=True):
            if wait_ms == 0 and share.value == b"a":
                asked_ms.append(began_ms)
        return waits

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)

    def handle(message: Message) -> dict[str, str | None]:
        with running.one(message):
            return {"n": message.text("n"), "key": message.text("key")}

    handler = make(handle, key="key", limit=Limit(per="tenant", rate="1200/m", cost="tokens"), retry=ONCE)
    publish(client, 12, "a", tokens=2)
    publish(client, 12, "b", tokens=0)
    with working(client, handler, "w1"), working(client, handler, "w2"):
        eventually(lambda: client.execute("XLEN", "out") == 24, "all outputs")
    check_all(client, a=12, b=12)
    # Each takes 100 ms of the rate, and a tenth of a second may be caught up on. The server times the permits: the first
    # is granted after the question, the last before its run.
    assert running.began_ms["a"][-1] - min(asked_ms) >= 10 * 100
    assert running.attempts == {1: 24}


@pytest.mark.parametrize("cost", ["", "many", "-1", "nan", "1201"])
def test_a_message_whose_cost_is_no_cost_is_a_dead_letter(client: Client, cost: str) -> None:
    handler = make(lambda message: None, key="key", limit=Limit(per="tenant", rate="1200/m", cost="tokens"))
    publish(client, 1, "a", tokens=cost)
    publish(client, 1, "b")
    with working(client, handler, "w1"):
        eventually(lambda: len(dead(client)) == 2, "the dead letters")
    assert {one.reason for one in dead(client)} == {"undecodable"}
    assert sorted("no field 'tokens'" in one.error for one in dead(client)) == [False, True]


def test_a_retry_waits_for_a_permit_with_its_attempts(client: Client) -> None:
    running = Running()

    def handle(message: Message) -> dict[str, str | None]:
        with running.one(message):
            if message.attempt < 3:
                raise RuntimeError("again")
        return {"n": message.text("n"), "key": message.text("key")}

    limit = Limit(per="tenant", at_once=1, rate="100/s")
    handler = make(handle, key="key", limit=limit, retry=Retry(attempts=3, delay_ms=1))
    publish(client, 9, "a", keys=3)
    with working(client, handler, "w1"), working(client, handler, "w2"):
        eventually(lambda: client.execute("XLEN", "out") == 9, "all outputs")
    check_all(client, a=9)
    assert running.attempts == {1: 9, 2: 9, 3: 9}
    assert running.most["a"] == 1


def test_the_permits_of_a_lost_lease_end_with_it(client: Client) -> None:
    handler = make(
        lambda message: {"n": message.text("n"), "key": message.text("key")}, key="key", limit=Limit(at_once=1)
    )
    client.execute("HSET", KEYS.permits(b""), "7 gone w9 1-1", "kgone")
    publish(client, 3, "a")
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("XLEN", "out") == 3, "all outputs")
    check_all(client, a=3)


def test_a_handler_without_a_limit_of_messages_asks_for_no_permit(client: Client) -> None:
    handler = make(
        lambda message: {"n": message.text("n"), "key": message.text("key")}, key="key", limit=Limit(rate="6000/m")
    )
    assert (handler.rate, handler.limit) == (100.0, None)
    publish(client, 3, "a")
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("XLEN", "out") == 3, "all outputs")
    assert client.execute("KEYS", f"{KEYS.base}:free-at:*") == []


# --- Spark ---


def limited(running: Running, **limit: Any) -> Handler:
    def handle(message: Message, state: State) -> dict[str, str | None]:
        state["count"] = state.get("count", 0) + 1
        with running.one(message):
            return {"n": message.text("n"), "key": message.text("key")}

    return only(App("app"), handle, key="key", into="out", limit=Limit(**limit), retry=ONCE)


def batch_of(fixture: TaskFixture, *tenants: str, keys: int = 2) -> Any:
    rows = []
    for at, tenant in enumerate(tenants, 1):
        key = f"{tenant}{at % keys}"
        fields = {"n": at, "key": key, "tenant": tenant}
        fixture.client.execute("XADD", "in", f"{at}-0", "n", at, "key", key, "tenant", tenant)
        rows.append((at, key.encode(), fields))
    return fixture.rows(*rows)


@pytest.fixture
def fixture(client: Client) -> TaskFixture:
    return TaskFixture(client)


def test_a_task_defers_the_keys_of_a_tenant_at_its_limit_and_runs_those_of_others(fixture: TaskFixture) -> None:
    running = Running()
    handler = limited(running, per="tenant", at_once=1)
    client = fixture.client
    client.execute("HSET", KEYS.permits(b"a"), "another task 1-0", f"t{int(time.time() * 1000) + 3_600_000}")
    fixture.process(handler, batch_of(fixture, *"aabbab"))
    assert sorted(fixture.outputs()) == [3, 4, 6]
    waiting = list_queues(client, KEYS)
    assert {one.key: (one.state, one.length, one.failed_attempts) for one in waiting} == {
        b"a0": ("backing off", 1, 0),
        b"a1": ("backing off", 2, 0),
    }
    client.execute("DEL", KEYS.permits(b"a"))
    run_deferred(fixture, handler, 6)
    assert fixture.client.execute("HLEN", KEYS.crashes) == 0
    assert fixture.dead() == []
    assert running.attempts == {1: 6}


def run_deferred(fixture: TaskFixture, handler: Handler, outputs: int) -> None:
    def step() -> bool:
        fixture.process_deferred(handler)
        return len(fixture.outputs()) == outputs

    eventually(step, "all outputs")


def let_wait_for_an_hour(client: Client) -> None:
    """Let the keys that were refused a permit of the tenant `a` ask again in an hour, unless they are woken."""
    due_ms = round(now_ms(client)) + 3_600_000
    for queue in client.execute("ZRANGE", KEYS.limited(b"a"), 0, -1):
        for times in (KEYS.limited(b"a"), KEYS.backoff):
            client.execute("ZADD", times, "XX", due_ms, queue)


def test_a_permit_that_is_returned_wakes_a_deferred_key(fixture: TaskFixture) -> None:
    handler = limited(Running(), per="tenant", at_once=1)
    task = fixture.task(handler)
    permits = TaskPermits.of(handler, task._commit_store, lambda operation: operation())
    assert permits is not None
    (chunk,) = read_chunks([batch_of(fixture, *"aa")])
    runs = task._loader.split_into_runs(chunk)
    first = permits.take(runs[0], Message("in", "9-9", [b"tenant", b"a"]))
    assert isinstance(first, TaskPermit)
    fixture.client.execute("DEL", "in")
    fixture.process(handler, batch_of(fixture, *"aa"))
    assert fixture.outputs() == []
    let_wait_for_an_hour(fixture.client)
    assert fixture.runnable(handler).queues == []
    permits.give_back(first)
    assert len(fixture.runnable(handler).queues) == 1
    run_deferred(fixture, handler, 2)


def test_a_task_keeps_the_rate_of_a_tenant(fixture: TaskFixture) -> None:
    running = Running()
    handler = limited(running, per="tenant", rate="20/s")
    fixture.process(handler, batch_of(fixture, *"aaaaaabb", keys=3))
    run_deferred(fixture, handler, 8)
    assert running.began_ms["a"][-1] - running.began_ms["a"][0] >= 2 * 50
    assert running.attempts == {1: 8}
    assert fixture.client.execute("HLEN", KEYS.crashes) == 0
