"""`batch_wait_ms` of a handler of lists with a key, on workers: a burst of a key becomes one run."""

from dataclasses import dataclass
from typing import Any

import pytest

from millstream import Message, State
from millstream.admin.key_queues import list_queues
from millstream.delivery.keyed_stream import KeyedStream
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.testing.invariants import check_invariants
from tests.support.fields import text_fields
from tests.support.keyed_fixtures import ids, lease_keys, routed
from tests.support.waiting import eventually
from tests.support.workers import KEYS, KINDS, dead, either, make, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

LONGEST_MS = 60_000


@dataclass
class Event:
    """A model."""

    n: int
    key: str


def add(client: Client, *numbers: int, key: str) -> list[EntryId]:
    """Add messages in one transaction: no worker reads some of them, and the others only after a wait is over."""
    commands = [("XADD", "in", "*", "n", n, "key", key) for n in numbers]
    ids = client.pipeline([("MULTI",), *commands, ("EXEC",)])[-1]
    return [EntryId.parse(one) for one in ids]


def gather(events: list[Event], messages: list[Message], state: State) -> dict[str, Any]:
    """Write the numbers of a list, the id of its first message, and how many messages the state has counted before."""
    before = state.get("count", 0)
    state["count"] = before + len(events)
    numbers = [event.n for event in events]
    if 13 in numbers:
        raise ValueError("thirteen")
    return {"ns": " ".join(map(str, numbers)), "key": events[0].key, "before": before, "first": messages[0].id}


def lists(client: Client, key: str) -> list[list[int]]:
    """The lists of a key that were committed, in order; each on the state of the one before."""
    rows = [text_fields(pairs) for _, pairs in client.execute("XRANGE", "out", "-", "+")]
    ours = [row for row in rows if row["key"] == key]
    found = [[int(n) for n in row["ns"].split()] for row in ours]
    assert [int(row["before"]) for row in ours] == [sum(map(len, found[:at])) for at in range(len(ours))]
    return found


@KINDS
def test_a_list_that_is_full_runs_at_once_and_another_key_waits_from_its_first_message_on(
    client: Client, kind: str
) -> None:
    handler = make(either(gather, kind), key="key", batch_size=5, batch_wait_ms=LONGEST_MS)
    (first, *_) = add(client, 1, 2, 3, key="b")
    with working(client, handler) as loop:
        eventually(lambda: client.execute("ZSCORE", KEYS.backoff, b"kb"))
        add(client, *range(10, 13), key="a")
        eventually(lambda: client.execute("ZSCORE", KEYS.backoff, b"ka"))
        add(client, 13 + 1, 15, 16, key="a")
        add(client, *range(30, 40), key="c")
        eventually(lambda: loop.loop_metrics.committed >= 15)
        eventually(lambda: client.execute("ZCARD", KEYS.backoff) == 2)
        assert lists(client, "a") == [[10, 11, 12, 14, 15]], "the sixth waits for others"
        assert lists(client, "c") == [[30, 31, 32, 33, 34], [35, 36, 37, 38, 39]]
        assert lists(client, "b") == []
        assert float(client.execute("ZSCORE", KEYS.backoff, b"kb")) == first.ms + LONGEST_MS
        queues = list_queues(client, KEYS)
        assert {(queue.state, queue.failed_attempts) for queue in queues} == {("backing off", 0)}
        assert check_invariants(client, KEYS, "in") == []


@KINDS
def test_fewer_messages_run_together_once_the_first_has_waited(client: Client, kind: str) -> None:
    wait_ms = 500
    handler = make(either(gather, kind), key="key", batch_size=50, batch_wait_ms=wait_ms)
    with working(client, handler) as loop:
        eventually(lambda: loop._ordering.streams)
        (first, *_) = add(client, *range(10), key="a")
        eventually(lambda: lists(client, "a"))
        assert lists(client, "a") == [list(range(10))]
        (output,) = client.execute("XRANGE", "out", "-", "+")
        assert EntryId.parse(output[0]).ms >= first.ms + wait_ms
        assert pending(client) == 0
    assert client.execute("EXISTS", KEYS.backoff, KEYS.ready, KEYS.crashes) == 0


def test_a_wait_goes_on_with_another_worker(client: Client) -> None:
    handler = make(gather, key="key", batch_size=5, batch_wait_ms=LONGEST_MS)
    add(client, 1, 2, 3, key="a")
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("ZSCORE", KEYS.backoff, b"ka"))
        due = client.execute("ZSCORE", KEYS.backoff, b"ka")
    assert client.execute("ZSCORE", KEYS.backoff, b"ka") == due
    with working(client, handler, "w2"):
        add(client, 4, 5, key="a")
        eventually(lambda: lists(client, "a"))
    assert lists(client, "a") == [[1, 2, 3, 4, 5]]
    assert check_invariants(client, KEYS, "in") == []


def test_messages_that_have_waited_in_the_stream_wait_no_more(client: Client) -> None:
    client.execute("XADD", "in", "5-0", "n", 1, "key", "a")
    with working(client, make(gather, key="key", batch_size=5, batch_wait_ms=LONGEST_MS)):
        eventually(lambda: lists(client, "a"))
    assert lists(client, "a") == [[1]]


def test_a_failing_message_is_split_off_and_nothing_waits_for_others_meanwhile(client: Client) -> None:
    add(client, *range(11, 16), key="a")
    with working(client, make(gather, key="key", batch_size=5, batch_wait_ms=LONGEST_MS)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 3)
        add(client, *range(20, 23), key="a")
        eventually(lambda: loop.loop_metrics.committed >= 8)
    assert [(one.reason, one.attempts) for one in dead(client)] == [("failed", 3)]
    assert lists(client, "a") == [[11], [12], [14, 15, 20, 21, 22]]
    assert check_invariants(client, KEYS, "in") == []


def test_a_call_leases_as_many_short_lists_as_it_has_room_for_and_cuts_none_short(client: Client) -> None:
    worker = routed(client, "AABBCCCCCCCDD")
    worker.list_size, worker.list_wait_ms = 10, LONGEST_MS

    def lease() -> list[tuple[bytes, list[int]]]:
        return [(one.queue, ids(one)) for one in lease_keys(worker, entries=10, run=10).leases]

    assert lease() == [(b"kA", [1, 2]), (b"kB", [3, 4])], "of C there would be six of seven"
    assert lease() == [(b"kC", [5, 6, 7, 8, 9, 10, 11]), (b"kD", [12, 13])]


def test_a_handler_without_a_wait_sends_the_same_calls_as_before(client: Client) -> None:
    with working(client, make(gather, key="key", batch_size=5)) as loop:
        (stream,) = eventually(lambda: list(loop._ordering.streams.values()))
        assert isinstance(stream, KeyedStream)
        assert len(stream._lease_args(1, 1, 1, 1, False, (1, True))) == 16
        assert stream._enqueue_args(b"0-0", (b"1-0", b"ka"), 9)[4:] == (b"1-0", b"ka")
