"""`millstream dlq redrive --rate`: spread over time, and stopped, killed or failed between two letters."""

import signal
import time
from functools import partial

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.commandline import call, ended, in_a_terminal, running
from tests.support.dead_letters import KEYS, add_dead_letter, entries, left
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker]

REDRIVE = ("dlq", "redrive", "--all", "--yes", "--rate")
BOTH = "return redis.call('XLEN', KEYS[1]) + redis.call('XLEN', KEYS[2])"


def add(client: Client, count: int) -> None:
    """Dead letters with the numbers from 1 to `count`."""
    for number in range(1, count + 1):
        add_dead_letter(client, [b"n", b"%d" % number])


def redriven(client: Client) -> list[int]:
    """The numbers of the letters that are in the stream again."""
    return [int(pairs[3]) for pairs in entries(client)]


def has_redriven(client: Client, count: int) -> bool:
    return bool(client.execute("XLEN", "orders") >= count)


def test_a_redrive_at_a_rate_is_spread_over_the_time_that_the_rate_takes(client: Client) -> None:
    add(client, 5)
    began = time.monotonic()
    done = call(*REDRIVE, "1200/m", "--json", url=client.url)
    assert time.monotonic() - began >= 4 / 20
    assert (done.code, done.json()) == (0, {"selected": 5, "redriven": 5, "dry_run": False})
    assert redriven(client) == [1, 2, 3, 4, 5]
    (record,) = AuditLog(client).read()
    assert (record.about["rate"], record.result) == ("20/s", "5 of 5 redriven")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_redrive_that_is_stopped_says_how_many_were_redriven_and_leaves_the_rest(
    client: Client, number: int, code: int
) -> None:
    add(client, 3)
    with running(*REDRIVE, "5/d", "--json", url=client.url) as process:
        eventually(lambda: redriven(client) == [1], "the first letter to be redriven")
        process.send_signal(number)
        done = ended(process)
    assert done.json() == {"selected": 3, "redriven": 1, "dry_run": False}
    assert (done.code, done.err) == (code, "stopped: 2 dead letters are left; repeat the command for the rest\n")
    assert (redriven(client), left(client)) == ([1], 2)
    assert AuditLog(client).read()[0].result == "1 of 3 redriven"


def test_a_redrive_at_a_rate_that_is_killed_loses_and_doubles_nothing(client: Client) -> None:
    add(client, 300)
    for count in (40, 100):
        with running(*REDRIVE, "200", url=client.url):
            eventually(partial(has_redriven, client, count), f"{count} letters to be redriven")
        assert client.execute("EVAL", BOTH, 2, "orders", KEYS.dead_letters) == 300
    assert call(*REDRIVE, "100000", url=client.url).code == 0
    assert sorted(redriven(client)) == list(range(1, 301))


def test_a_redrive_that_fails_says_how_many_were_redriven_before(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        add(client, 2_000)
        with running(*REDRIVE, "10", url=client.url) as process:
            eventually(partial(has_redriven, client, 2), "two letters to be redriven")
            client.execute("CONFIG", "SET", "maxmemory", "1")
            done = ended(process)
        moved = len(redriven(client))
        assert (done.code, done.out) == (3, "")
        assert f"{moved} of 2,000 redriven before the error\n" in done.err
        assert left(client) == 2_000 - moved


def test_a_redrive_shows_its_progress_on_a_terminal(client: Client) -> None:
    add(client, 2)
    shown = in_a_terminal(*REDRIVE, "5/d", url=client.url, env={"TERM": "xterm"}, until=b"1 of 2 redriven")
    assert shown.code == 130
    assert "50 %" in shown.out
    assert "1 dead letter redriven" in shown.out
    assert left(client) == 1


def test_a_rate_is_an_option_of_redrive_alone_and_names_itself_where_it_is_wrong(client: Client) -> None:
    add(client, 1)
    for rate in ("0", "60/y"):
        refused = call(*REDRIVE, rate, url=client.url)
        assert (refused.code, "--rate" in refused.err, "60/m" in refused.err) == (2, True, True)
    purged = call("dlq", "purge", "--all", "--yes", "--rate", "60/m", url=client.url)
    assert (purged.code, "no such option: --rate" in purged.err) == (2, True)
    assert call("dlq", "redrive", "--all", "--rate", "60/m", "--dry-run", url=client.url).code == 0
    assert left(client) == 1
