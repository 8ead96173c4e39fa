"""What the idle streams of a handler without a key cost Redis."""

from dataclasses import replace

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire
from tests.support.waiting import eventually
from tests.support.workers import QUICK, double, make, working

pytestmark = [pytest.mark.worker]

STREAMS = 200
CALM = replace(QUICK, sweep_ms=500, block_ms=1_000, threads=1)


def calls(client: Client, command: str) -> int:
    """Return how often the server has run a command."""
    stats = client.execute("INFO", "commandstats").decode()
    return int((stats.partition(f"cmdstat_{command}:calls=")[2] or "0").partition(",")[0])


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
