"""The policy of a balancer, and the queue between a balancer and its program."""

import asyncio
import threading
import time
from typing import Any

import pytest

from millstream.balancer import Balancer, BalancerPolicy, Lease, StreamAdded, StreamDisowned
from millstream.balancer.notification_queue import NotificationQueue
from millstream.errors import ConfigError
from tests.support.waiting import FAIL_SAFE_S, eventually, eventually_async

pytestmark = [pytest.mark.balancer]

# --- The policy ---


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lease_ms": 299}, "lease_ms=299: use 300 to 300,000"),
        ({"lease_ms": 300_001}, "lease_ms=300001"),
        ({"weight": 0}, "weight=0"),
        ({"weight": -1.0}, "weight=-1.0"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"weight": float("inf")}, "weight=inf"),
        ({"moves": 0}, "moves=0"),
        ({"moves": 1.5}, "moves=1.5"),
        ({"recover": "never"}, "recover='never'"),
        ({"max_streams": 0}, "max_streams=0"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"max_losses": 0}, "max_losses=0"),
        ({"drain_ms": 0}, "drain_ms=0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BalancerPolicy(**option)


@pytest.mark.parametrize(
    "option",
    [
        {"lease_ms": 300},
        {"lease_ms": 300_000},
        {"weight": 0.001},
        {"weight": 1_000_000},
        {"moves": 1},
        {"moves": 1e-9},
        {"recover": "claim"},
        {"max_streams": 1},
        {"max_waiting": 1},
        {"max_losses": 1},
        {"drain_ms": 1},
        {"max_streams": None, "max_losses": None},
    ],
)
def test_a_policy_at_the_limits_of_its_ranges_is_accepted(option: dict[str, Any]) -> None:
    BalancerPolicy(**option)


def test_the_consumer_name_unassigned_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be called 'unassigned'"):
        Balancer("redis://127.0.0.1:1", "calls", consumer="unassigned")


def test_a_weight_is_a_number_or_a_function_that_is_called_each_time() -> None:
    weights = iter([1.0, 2.5])
    policy = BalancerPolicy(weight=lambda: next(weights))
    assert [policy.weight_now(), policy.weight_now()] == [1.0, 2.5]
    assert BalancerPolicy(weight=3).weight_now() == 3


@pytest.mark.parametrize("weight", [lambda: 0.0, lambda: float("nan"), lambda: 1 / 0, lambda: "heavy", lambda: None])
def test_a_weight_function_that_returns_no_weight_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        BalancerPolicy(weight=weight).weight_now()


def test_the_consumer_is_named_after_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "pod-1.example.org")
    assert Balancer("redis://127.0.0.1:1", "service").consumer == "pod-1-example-org"


@pytest.mark.parametrize("service", ["", "two words", "{tag}", "x" * 300])
def test_a_service_name_that_keys_cannot_hold_is_refused(service: str) -> None:
    with pytest.raises(ConfigError, match="service name"):
        Balancer("redis://127.0.0.1:1", service)


def test_a_notification_has_the_name_of_its_stream() -> None:
    lease = Lease(stream="s", token=7)
    assert (StreamAdded(lease=lease).stream, StreamDisowned(lease=lease, why="stuck").stream) == ("s", "s")


# --- The postbox ---


def fill(box: NotificationQueue[int], count: int) -> None:
    for n in range(count):
        box.put(n)


def fill_once_a_thread_waits(box: NotificationQueue[int], count: int) -> None:
    eventually(lambda: box._changed._waiters, "somebody to wait")  # type: ignore[attr-defined]
    fill(box, count)


def test_the_queue_waits_for_items_and_returns_them_in_order() -> None:
    box: NotificationQueue[int] = NotificationQueue()
    assert box.get(0) is None
    threading.Thread(target=fill_once_a_thread_waits, args=(box, 3)).start()
    assert [box.get(FAIL_SAFE_S) for _ in range(3)] == [0, 1, 2]
    began_s = time.monotonic()
    assert box.get(0.05) is None
    assert time.monotonic() - began_s >= 0.05


def test_many_threads_receive_each_item_once() -> None:
    box: NotificationQueue[int] = NotificationQueue()
    received: list[int] = []

    def drain() -> None:
        while (item := box.get()) is not None:
            received.append(item)

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in range(1_000):
        box.put(n)
    box.end()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(received) == list(range(1_000))


def test_removed_items_leave_the_rest_of_the_queue_in_order() -> None:
    box: NotificationQueue[int] = NotificationQueue()
    for n in range(6):
        box.put(n)
    assert box.get() == 0
    assert box.remove(lambda n: n % 2 == 1 or n == 0) == [1, 3, 5]
    assert (box.queued(), len(box)) == ([2, 4], 2)


def test_an_ended_queue_returns_its_remaining_items_without_waiting() -> None:
    box: NotificationQueue[int] = NotificationQueue()
    box.put(1)
    box.end()
    assert [box.get(), box.get()] == [1, None]
    assert asyncio.run(box.get_async()) is None


def test_a_queue_ends_once_and_accepts_no_item_afterwards() -> None:
    box: NotificationQueue[int] = NotificationQueue()
    assert box.end(1, 2)
    assert not box.end(3)
    box.put(4)
    assert [box.get(0), box.get(0), box.get(0)] == [1, 2, None]


def test_tasks_that_wait_in_an_event_loop_are_notified_of_the_end() -> None:
    box: NotificationQueue[int] = NotificationQueue()

    async def program() -> list[int | None]:
        waiting = [asyncio.create_task(box.get_async()) for _ in range(3)]
        await eventually_async(lambda: len(box._waiters) == 3, "all of them to wait")
        threading.Thread(target=box.end).start()
        return await asyncio.wait_for(asyncio.gather(*waiting), FAIL_SAFE_S)

    assert asyncio.run(program()) == [None] * 3


def fill_once_a_task_waits(box: NotificationQueue[int], count: int) -> None:
    eventually(lambda: box._waiters, "somebody to wait")
    fill(box, count)


def test_items_put_by_a_thread_wake_the_event_loop() -> None:
    box: NotificationQueue[int] = NotificationQueue()

    async def program() -> list[int | None]:
        threading.Thread(target=fill_once_a_task_waits, args=(box, 3)).start()
        return [await asyncio.wait_for(box.get_async(), FAIL_SAFE_S) for _ in range(3)]

    assert asyncio.run(program()) == [0, 1, 2]


def test_many_tasks_receive_each_item_once() -> None:
    box: NotificationQueue[int] = NotificationQueue()

    async def program() -> list[int | None]:
        tasks = [asyncio.create_task(box.get_async()) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(fill, box, 50)
        return await asyncio.wait_for(asyncio.gather(*tasks), FAIL_SAFE_S)

    assert sorted(item for item in asyncio.run(program()) if item is not None) == list(range(50))
    assert not box._waiters, "those who wait no more are forgotten"


def test_a_cancelled_wait_loses_no_item() -> None:
    box: NotificationQueue[int] = NotificationQueue()

    async def program() -> list[int]:
        received = []
        for n in range(200):
            task = asyncio.create_task(box.get_async())
            await asyncio.sleep(0)
            box.put(n)
            if n % 3 == 0:
                await asyncio.sleep(0)
            task.cancel()
            try:
                item = await task
            except asyncio.CancelledError:
                continue
            assert item is not None
            received.append(item)
        while (item := box.get(0)) is not None:
            received.append(item)
        return received

    assert sorted(asyncio.run(program())) == list(range(200))


@pytest.mark.parametrize("is_closed", [True, False], ids=["before", "between a check and the call"])
def test_a_closed_event_loop_that_waited_does_not_stop_the_thread_that_puts_items(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    box: NotificationQueue[int] = NotificationQueue()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(box.get_async())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: is_closed)
    box.put(1)
    assert box.get(0) == 1
    waiting.get_coro().close()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
