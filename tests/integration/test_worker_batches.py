"""Handlers that take lists, on a worker: outputs are written once, and only the message at fault is dead-lettered."""

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from millstream import Message, Reject, Retry
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck
from millstream.handlers.encoding import pack_output
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from tests.support.clocks import LeapClock
from tests.support.stream_reports import counted
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    KINDS,
    dead,
    either,
    ending,
    fill,
    give_up_no_run,
    make,
    outputs,
    pending,
    working,
)

pytestmark = [pytest.mark.worker]


@dataclass
class Number:
    """A model."""

    n: int


def doubled(numbers: list[Number]) -> list[dict[str, int]]:
    return [{"n": number.n} for number in numbers]


@KINDS
def test_a_handler_of_lists_gets_many_messages_at_once_and_each_is_committed_once(client: Client, kind: str) -> None:
    sizes: list[int] = []

    def handle(numbers: list[Number], messages: list[Message]) -> list[dict[str, int]]:
        sizes.append(len(numbers))
        assert [message.text("n") for message in messages] == [str(number.n) for number in numbers]
        return doubled(numbers)

    fill(client, 3_000)
    with working(client, make(either(handle, kind), batch_size=50)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 3_000)
    assert sorted(outputs(client)) == list(range(3_000))
    assert (pending(client), loop.loop_metrics.refused) == (0, 0)
    assert max(sizes) == 50


@KINDS
def test_a_batch_without_outputs_is_acknowledged(client: Client, kind: str) -> None:
    seen: list[int] = []

    def handle(numbers: list[Number]) -> None:
        seen.extend(number.n for number in numbers)

    fill(client, 300)
    with working(client, make(either(handle, kind))) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 300)
    assert (sorted(seen), pending(client)) == (list(range(300)), 0)


@KINDS
def test_only_the_messages_that_fail_their_batch_die_and_the_others_are_written_once(client: Client, kind: str) -> None:
    attempts: Counter[int] = Counter()

    def handle(messages: list[Message]) -> list[dict[str, str | None]]:
        numbers = [int(message.text("n") or "") for message in messages]
        attempts.update(numbers)
        if 13 in numbers:
            raise ValueError("thirteen")
        if 77 in numbers:
            raise Reject("no seventy-seven")
        return [{"n": message.text("n")} for message in messages]

    fill(client, 100)
    handler = make(either(handle, kind), batch_size=100, batch_wait_ms=200, retry=Retry(attempts=3, delay_ms=10))
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 100)
    assert sorted(outputs(client)) == [n for n in range(100) if n not in (13, 77)]
    assert sorted((one.reason, one.attempts) for one in dead(client)) == [("failed", 3), ("rejected", 2)]
    assert attempts[13] == 3
    assert client.execute("EXISTS", KEYS.crashes) == 0


def test_the_other_messages_of_a_failed_batch_with_a_single_attempt_are_still_committed(client: Client) -> None:
    def handle(numbers: list[Number]) -> list[dict[str, int]]:
        if any(number.n == 5 for number in numbers):
            raise ValueError
        return doubled(numbers)

    fill(client, 20)
    with working(client, make(handle, batch_wait_ms=200, retry=Retry(attempts=1))) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 20)
    assert sorted(outputs(client)) == [n for n in range(20) if n != 5]
    assert [one.reason for one in dead(client)] == ["failed"]


@KINDS
def test_undecodable_messages_and_those_redriven_to_another_handler_are_not_in_the_list(
    client: Client, kind: str
) -> None:
    fill(client, 5)
    client.execute("XADD", "in", "*", "n", "five")
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.other", "n", "6")
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.handle", "n", "7")
    with working(client, make(either(doubled, kind), batch_wait_ms=200)) as loop:
        eventually(lambda: loop.loop_metrics.done >= 8)
    assert (loop.loop_metrics.committed, counted(client, "handle")) == (7, [(7, 6)])
    assert sorted(outputs(client)) == [0, 1, 2, 3, 4, 7]
    assert [(one.reason, one.attempts) for one in dead(client)] == [("undecodable", 1)]
    assert pending(client) == 0


@KINDS
def test_a_batch_waits_for_more_messages_for_its_configured_time(client: Client, kind: str) -> None:
    batches: list[list[int]] = []

    def handle(numbers: list[Number]) -> None:
        batches.append([number.n for number in numbers])

    clock = LeapClock()
    handler = make(either(handle, kind), batch_size=20, batch_wait_ms=60_000)
    with working(client, handler, clock=clock) as loop:
        for n in range(30):
            fill(client, 1, first=n)
            eventually(lambda: loop.loop_metrics.read == n + 1)  # noqa: B023 - it is over by then
        eventually(lambda: loop.loop_metrics.committed == 20)
        assert batches == [[*range(20)]]
        clock.leap(61_000)
        fill(client, 1, first=30)  # makes the loop check its clock
        eventually(lambda: loop.loop_metrics.committed >= 30)
    assert batches[1][:10] == [*range(20, 30)]


@KINDS
def test_each_batch_has_messages_of_one_stream(client: Client, kind: str) -> None:
    mixed: list[int] = []

    def handle(messages: list[Message]) -> list[dict[str, str | None]]:
        mixed.append(len({message.stream for message in messages}))
        return [{"n": message.text("n")} for message in messages]

    fill(client, 230, stream="in.a")
    fill(client, 170, stream="in.b", first=230)
    with working(client, make(either(handle, kind), pattern="in.*", batch_size=30)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 400)
    assert sorted(outputs(client)) == list(range(400))
    assert set(mixed) == {1}


def test_outputs_of_a_batch_are_not_written_if_one_entry_was_claimed_and_the_rest_runs_again(
    client: Client,
) -> None:
    first: list[int] = []
    taken_over = threading.Event()

    def handle(numbers: list[Number]) -> list[dict[str, int]]:
        if not first:
            first.extend(number.n for number in numbers)
            taken_over.wait(FAIL_SAFE_S)
        return [{"sum": sum(number.n for number in numbers)}]

    fill(client, 10)
    with working(client, make(handle, batch_size=10, batch_wait_ms=300)) as loop:
        eventually(lambda: first)
        stolen = client.execute("XRANGE", "in", "-", "+")[first[-1]][0]
        client.execute("XCLAIM", "in", KEYS.group, "thief", 0, stolen)
        taken_over.set()
        eventually(lambda: loop.loop_metrics.committed >= 9)
    assert sum(outputs(client)) == sum(range(10)) - first[-1]
    assert loop.loop_metrics.refused == 1
    assert client.execute("XPENDING", "in", KEYS.group, "-", "+", 10)[0][:2] == [stolen, b"thief"]


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_plain_batch_beyond_its_time_limit_fails_all_and_its_cause_dies(client: Client, attempts: int) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(numbers: list[Number]) -> list[dict[str, int]]:
        if any(number.n == 4 for number in numbers):
            hangs.set()
            release.wait(FAIL_SAFE_S)
        return doubled(numbers)

    fill(client, 10)
    limits = {"time_limit_ms": 600_000, "batch_size": 10, "batch_wait_ms": 60_000}
    handler = make(handle, retry=Retry(attempts=attempts, delay_ms=1), **limits)
    for others in (0, 9):  # in the batch, and alone
        hangs.clear()
        with ending(HandlerStuck, client, handler, match="longer than its time limit of 600,000 ms", clock=clock):
            eventually(lambda: hangs.is_set() and len(outputs(client)) == others)  # noqa: B023 - it is over by then
            clock.leap(602_000)
    with working(client, handler):
        eventually(lambda: pending(client) == 0)
    assert sorted(outputs(client)) == [n for n in range(10) if n != 4]
    release.set()
    assert [(one.reason, one.attempts) for one in dead(client)] == [("failed", 2)]


def test_an_async_batch_beyond_its_time_limit_is_split_and_only_its_cause_dies(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(numbers: list[Number]) -> list[dict[str, int]]:
        await asyncio.sleep(2 * FAIL_SAFE_S if any(number.n == 4 for number in numbers) else 0)
        return doubled(numbers)

    give_up_no_run(monkeypatch)
    fill(client, 10)
    # Many attempts, for the others too: a slow machine may hold up a message for longer than the time limit.
    handler = make(handle, time_limit_ms=100, batch_wait_ms=100, retry=Retry(attempts=10, delay_ms=1))
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 10)
    assert sorted(outputs(client)) == [n for n in range(10) if n != 4]


@KINDS
def test_a_stop_returns_a_batch_that_still_waits_for_more(client: Client, kind: str) -> None:
    fill(client, 5)
    with working(client, make(either(doubled, kind), batch_wait_ms=60_000)) as loop:
        eventually(lambda: loop.loop_metrics.read == 5)
    assert (outputs(client), loop.loop_metrics.released) == ([], 5)
    assert pending(client) == 5


# The step in Redis


def stream_of(client: Client, name: str = "w1") -> ReliableStream:
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer=name, into="out")
    stream.join()
    return stream


def commit(stream: ReliableStream, batch: list[Delivery]) -> bool:
    """Commit a batch with one output; return whether it was accepted."""
    unit = stream.effects_of(*batch)
    unit.add_outputs([pack_output({"n": len(batch)})])
    return stream.commit([unit]) == []


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_batch_is_refused_as_a_whole_if_another_consumer_owns_one_of_its_entries(client: Client, which: int) -> None:
    mine = stream_of(client)
    fill(client, 3)
    batch = mine.fetch(count=3)
    client.execute("XCLAIM", "in", KEYS.group, "thief", 0, batch[which].id)
    assert not commit(mine, batch)
    assert (outputs(client), pending(client)) == ([], 3)
    assert commit(mine, [one for one in batch if one is not batch[which]])
    assert (outputs(client), pending(client)) == ([2], 1)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_batch_is_refused_as_a_whole_if_one_of_its_entries_is_committed_already(client: Client, which: int) -> None:
    mine = stream_of(client)
    fill(client, 3)
    batch = mine.fetch(count=3)
    assert commit(mine, [batch[which]])
    client.execute("XCLAIM", "in", KEYS.group, "w1", 0, batch[which].id, "FORCE")  # as if it had been delivered again
    assert not commit(mine, batch)
    assert outputs(client) == [1]
    assert pending(client) == 2


def test_repeating_the_commit_of_a_batch_whose_reply_was_lost_writes_nothing(client: Client) -> None:
    mine = stream_of(client)
    fill(client, 5)
    batch = mine.fetch(count=5)[::-1]
    assert commit(mine, batch)
    assert not commit(mine, batch)
    assert (outputs(client), pending(client)) == ([5], 0)
    assert client.execute("HGET", KEYS.meta, "committed") == b"5"
    assert client.execute("HGET", KEYS.meta, "max_offset") == batch[0].id


def test_a_batch_commits_incomplete_entries_below_the_committed_offset(client: Client) -> None:
    mine = stream_of(client)
    fill(client, 4)
    batch = mine.fetch(count=3)
    mine.checkpoint()
    assert client.execute("HLEN", KEYS.incomplete) == 3
    batch += mine.fetch(count=1)
    assert commit(mine, batch)
    assert client.execute("EXISTS", KEYS.incomplete) == 0
    assert not commit(mine, batch)
    assert outputs(client) == [4]
