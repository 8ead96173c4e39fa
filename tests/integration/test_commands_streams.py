"""The commands about leased streams."""

import json
from collections.abc import Iterator

import pytest

from millstream.balancer import Balancer, BalancerPolicy, StreamAdded, StreamDisowned
from millstream.client import Client
from millstream.naming import ServiceKeys
from tests.integration.commandline import call

KEYS = ServiceKeys("calls")
QUICK = BalancerPolicy(lease_ms=600)


@pytest.fixture
def client(millstream_url: str) -> Iterator[Client]:
    with Client(millstream_url) as connected:
        yield connected


def test_streams_are_announced_shown_released_and_done(client: Client) -> None:
    url = ("--url", client.url)
    for name, info in (("call:1", '{"tariff": 1}'), ("call:2", "null")):
        assert call("announce", "calls", name, "--info", info, *url).code == 0
    found = json.loads(call("streams", "calls", "--json", *url).out)
    assert (found["streams"], found["unread"], found["consumers"]) == (0, 2, [])
    client.execute("XADD", "call:1", "*", "n", 1)
    client.execute("XGROUP", "CREATE", "call:1", "readers", "0")
    with Balancer(client.url, "calls", consumer="me", policy=QUICK) as balancer:
        leases = {}
        for _ in range(2):
            notice = balancer.next(5)
            assert isinstance(notice, StreamAdded)
            leases[notice.stream] = notice.lease
        assert leases["call:1"].info == {"tariff": 1}
        found = json.loads(call("streams", "calls", "--group", "readers", "--json", *url).out)
        assert {row["stream"]: (row["consumer"], row["lag"]) for row in found["shown"]} == {
            "call:1": ("me", 1), "call:2": ("me", None),
        }  # fmt: skip
        shown = call("streams", "calls", *url).out
        assert "2 streams: 2 with an owner, 0 free; 0 announced and not read yet, 0 given up" in shown
        assert call("release", "calls", "call:1", *url).out == "call:1 is released\n"
        told = [balancer.next(5) for _ in range(2)]
        assert any(isinstance(one, StreamDisowned) and one.lease == leases["call:1"] for one in told)
        again = next(one.lease for one in told if isinstance(one, StreamAdded))
        assert (again.stream, again.token > leases["call:1"].token) == ("call:1", True)
        assert call("done", "calls", "call:2", "--yes", *url).out == "call:2 is done\n"
        gone = balancer.next(5)
        assert isinstance(gone, StreamDisowned)
        assert gone.stream == "call:2"
    assert client.execute("HKEYS", KEYS.streams) == [b"call:1"]


def test_what_is_not_known_is_named(client: Client) -> None:
    url = ("--url", client.url)
    unknown = call("streams", "cals", *url)
    assert (unknown.code, "nothing was ever announced to 'cals'" in unknown.err) == (2, True)
    call("announce", "calls", "call:1", *url)
    not_read = call("release", "calls", "call:1", "call:9", *url)
    assert (not_read.code, "'call:1', 'call:9'" in not_read.err) == (2, True)
    wrong = call("announce", "calls", "call:2", "--info", "night", *url)
    assert (wrong.code, "is not JSON" in wrong.err) == (2, True)
    unasked = call("done", "calls", "call:1", *url)
    assert (unasked.code, "add --yes" in unasked.err) == (2, True)
