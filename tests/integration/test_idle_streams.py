"""What the idle streams of a handler without a key cost Redis."""

from dataclasses import replace

import pytest

from millstream.delivery.reliable_stream import ReliableStream
from millstream.redis_client.client import Client
from millstream.worker import WorkerPolicy
from millstream.worker.in_flight import InFlight
from millstream.worker.settling.idle_claims import IdleClaimer
from tests.support.waiting import eventually
from tests.support.workers import QUICK, double, make, make_context, working

pytestmark = [pytest.mark.worker]

STREAMS = 200
CALM = replace(QUICK, sweep_ms=500, block_ms=1_000, threads=1)


def calls(client: Client, command: str) -> int:
    """Return how often the server has run a command."""
    stats = client.execute("INFO", "commandstats").decode()
    return int((stats.partition(f"cmdstat_{command}:calls=")[2] or "0").partition(",")[0])


def trips(client: Client) -> int:
    """Return how often the server has read from a connection."""
    stats = client.execute("INFO", "stats").decode()
    return int(stats.partition("total_reads_processed:")[2].partition("\r")[0])


def join(client: Client, consumer: str, number: int) -> ReliableStream:
    stream = ReliableStream(client, f"in{number}", app="app", handler="handle", consumer=consumer, into="out")
    stream.join()
    return stream


def add_empty_streams(client: Client) -> None:
    for number in range(STREAMS):
        client.pipeline([("XADD", f"in{number}", "*", "n", number), ("XTRIM", f"in{number}", "MAXLEN", 0)])


def wait_until_blocked(client: Client) -> None:
    eventually(lambda: b"blocked_clients:1\r" in client.execute("INFO", "clients"), "a read that blocks")


def test_a_message_in_one_of_many_streams_costs_no_reads_of_the_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of all streams, two at a time, after each message would be 200 reads for each."""
    monkeypatch.setattr("millstream.worker.fetching.entry_fetcher._FRESH_MS", 3_600_000.0)
    add_empty_streams(client)
    messages = 40
    with working(client, make(double, pattern="in*"), policy=CALM):
        eventually(lambda: client.execute("XINFO", "GROUPS", f"in{STREAMS - 1}"))
        wait_until_blocked(client)
        before = calls(client, "xreadgroup")
        for number in range(messages):
            client.execute("XADD", f"in{number}", "*", "n", number)
            eventually(lambda: client.execute("XLEN", "out") == number + 1)  # noqa: B023 - it is over by then
            wait_until_blocked(client)
        assert calls(client, "xreadgroup") - before < messages * STREAMS / 10


def test_a_round_trip_asks_many_streams_for_idle_entries_and_all_of_these_are_claimed(client: Client) -> None:
    add_empty_streams(client)
    streams = {f"in{number}": join(client, "w", number) for number in range(STREAMS)}
    context = make_context(client, make(double, pattern="in*"), in_flight=InFlight(WorkerPolicy(), 16))
    claimer = IdleClaimer(context, streams)

    def asks_all_at_once() -> bool:
        before, asked = trips(client), calls(client, "xpending")
        assert not claimer.claim_idle()
        return calls(client, "xpending") - asked == STREAMS and trips(client) - before < STREAMS / 10

    eventually(asks_all_at_once, "a few round trips")  # a thread of another test may still use a client of its own

    for number in (7, 150):
        client.execute("XADD", f"in{number}", "*", "n", number)
        gone = join(client, "gone", number)
        gone.nack([one.id for one in gone.fetch(count=1)])
    assert not claimer.claim_idle()
    assert {one.stream.stream for one in context.in_flight.deliveries} == {"in7", "in150"}
    client.execute("XGROUP", "DESTROY", "in3", streams["in3"].group)
    assert not claimer.claim_idle()
    assert client.execute("XINFO", "GROUPS", "in3"), "it has joined again"
