"""The commands about leased streams."""

import subprocess
import sys
from functools import partial

import pytest

from millstream.balancer import Balancer, BalancerPolicy, StreamAdded, StreamDisowned
from millstream.balancer.protocol import service_of
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys
from tests.support.commandline import call
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import make, working

pytestmark = [pytest.mark.cli, pytest.mark.balancer]

KEYS = ServiceKeys("calls")
STEADY = BalancerPolicy(lease_ms=300_000)


def test_streams_are_announced_listed_released_and_removed(client: Client) -> None:
    url = ("--url", client.url)
    for name, info in (("call:1", '{"tariff": 1}'), ("call:2", "null")):
        assert call("lease", "add", "calls", name, "--info", info, *url).code == 0
    assert call("lease", "list", "calls", "--json", *url).out == ""
    counted = call("lease", "list", "calls", "--count", "--json", *url).json()
    assert (counted["service"], counted["streams"], counted["unread"], counted["consumers"]) == ("calls", 0, 2, [])
    client.execute("XADD", "call:1", "*", "n", 1)
    client.execute("XGROUP", "CREATE", "call:1", "readers", "0")
    with Balancer(client.url, "calls", consumer="me", policy=STEADY) as balancer:
        leases = {}
        for _ in range(2):
            notice = balancer.next(FAIL_SAFE_S)
            assert isinstance(notice, StreamAdded)
            leases[notice.stream] = notice.lease
        assert leases["call:1"].info == {"tariff": 1}
        found = call("lease", "list", "calls", "--group", "readers", "--json", *url).json_lines()
        assert {row["stream"]: (row["consumer"], row["lag"]) for row in found} == {
            "call:1": ("me", 1),
            "call:2": ("me", None),
        }
        assert {row["stream"]: row["lag_exact"] for row in found} == {"call:1": True, "call:2": False}
        counted = call("lease", "list", "calls", "--count", "--json", *url).json()
        assert (counted["streams"], counted["owned"], counted["consumers"][0]["name"]) == (2, 2, "me")
        hint = call("lease", "list", "calls", "--group", "nosuch", *url).err
        assert "none of these streams has a group 'nosuch'; see: millstream group list STREAM" in hint
        shown = call("lease", "list", "calls", *url).out
        assert "2 streams: 2 with an owner, 0 free; 0 announced but not read yet, 0 dead letters" in shown
        only_counted = call("lease", "list", "calls", "--count", *url).out
        assert (only_counted.splitlines()[0], "call:1" in only_counted) == (shown.splitlines()[0], False)
        assert call("lease", "release", "calls", "call:1", "--yes", *url).out == "call:1 is released\n"
        notices = [balancer.next(FAIL_SAFE_S) for _ in range(2)]
        assert any(isinstance(one, StreamDisowned) and one.lease == leases["call:1"] for one in notices)
        again = next(one.lease for one in notices if isinstance(one, StreamAdded))
        assert (again.stream, again.token > leases["call:1"].token) == ("call:1", True)
        assert call("lease", "remove", "calls", "call:2", "--yes", *url).out == "call:2 is removed\n"
        gone = balancer.next(FAIL_SAFE_S)
        assert isinstance(gone, StreamDisowned)
        assert gone.stream == "call:2"
    assert client.execute("HKEYS", KEYS.streams) == [b"call:1"]


def test_the_error_names_an_unknown_service_or_stream(client: Client) -> None:
    url = ("--url", client.url)
    unknown = call("lease", "list", "cals", *url)
    assert (unknown.code, "unknown service 'cals'" in unknown.err) == (1, True)
    call("lease", "add", "calls", "call:1", *url)
    not_read = call("lease", "release", "calls", "call:1", "call:9", "--yes", *url)
    assert (not_read.code, "'call:1', 'call:9'" in not_read.err) == (1, True)
    assert "see: millstream lease list calls" in not_read.err
    wrong = call("lease", "add", "calls", "call:2", "--info", "night", *url)
    assert (wrong.code, "is not JSON" in wrong.err) == (2, True)
    unasked = call("lease", "remove", "calls", "call:1", *url)
    assert (unasked.code, "add --yes" in unasked.err) == (2, True)


def test_a_partly_failed_release_is_not_reported_as_wrong_usage(client: Client) -> None:
    url = ("--url", client.url)
    call("lease", "add", "calls", "call:1", *url)
    with Balancer(client.url, "calls", consumer="me", policy=STEADY) as balancer:
        assert isinstance(balancer.next(FAIL_SAFE_S), StreamAdded)
        some = call("lease", "release", "calls", "nope", "call:1", "--yes", *url)
        assert (some.code, some.out, "'nope'" in some.err) == (1, "call:1 is released\n", True)
        assert call("lease", "release", "calls", "nope", "--yes", *url).code == 1


def test_many_streams_are_announced_together_or_none(client: Client) -> None:
    url = ("--url", client.url)
    first = call("lease", "add", "calls", "call:1", "call:2", *url)
    assert first.out == "call:1 is announced to calls\ncall:2 is announced to calls\n"
    assert "'calls' is a new service" in first.err
    assert call("lease", "add", "calls", "-", *url, stdin=b"call:3\ncall:4\n").code == 0
    assert call("lease", "add", "calls", "call:5", "call:a}b", *url).code == 2
    assert client.execute("XLEN", KEYS.input) == 4
    rows = call("lease", "add", "calls", "call:6", "call:7", "--json", *url).json_lines()
    assert [(row["service"], row["stream"]) for row in rows] == [("calls", "call:6"), ("calls", "call:7")]


def _has_outputs(client: Client, count: int) -> bool:
    return bool(client.execute("XLEN", "out") == count)


def _is_served_by(client: Client, service: str) -> bool:
    return service_of(client, "app.handle") == service


def test_a_stream_announced_to_a_handler_goes_to_the_service_of_the_handler(client: Client) -> None:
    url = ("--url", client.url)
    for options, listens in (({"announced": "plant"}, "plant"), ({"pattern": "none:*"}, "millstream:app.handle")):
        handler = make(lambda message: {"n": message.text("n")}, order="stream", **options)
        with working(client, handler):
            eventually(partial(_is_served_by, client, listens))
            client.execute("XADD", f"line:{listens}", "*", "n", 7)
            output = call("lease", "add", "app.handle", f"line:{listens}", *url)
            own = listens != "plant"
            assert output.out.endswith("to app.handle\n" if own else "to plant, the service of app.handle\n")
            eventually(partial(_has_outputs, client, 1 + own))
            assert call("lease", "release", "app.handle", f"line:{listens}", "--yes", *url).code == 0
            unknown = call("lease", "release", "app.handle", "nope", "--yes", *url)
            assert "unknown streams of app.handle: 'nope'" in unknown.err
            assert "1 stream" in call("lease", "list", "app.handle", *url).out


def test_dead_letters_are_counted_with_the_command_that_shows_them(client: Client) -> None:
    url = ("--url", client.url)
    client.execute("XADD", KEYS.input, "*", "no", "announcement")
    with Balancer(client.url, "calls", consumer="me", policy=STEADY):
        eventually(lambda: client.execute("XLEN", KEYS.dead) == 1)
    found = call("lease", "list", "calls", *url)
    assert "1 dead letter" in found.out
    assert "millstream lease add calls STREAM" in found.err
    assert call("lease", "list", "calls", "--count", "--json", *url).json()["dead_letters"] == 1
    shown = call("tail", "--no-follow", found.err.split("'")[1], *url)
    assert "it has no field lbs-input" in shown.out


def test_a_log_record_is_one_line_whatever_the_name_of_a_stream() -> None:
    code = (
        "import logging, millstream.cli.main as c; c._options(); logging.getLogger('x').warning('%s', 'a\\nb\\x1b[31m')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stderr.partition(b" ")[2] == b"WARNING a\\nb\\x1b[31m\n"
