"""A Redis Cluster of one node, as on the machines of developers: it has met no other, and does not know its address."""

import asyncio
from collections.abc import Iterator

import pytest

from millstream import Message
from millstream.errors import CommandFailed
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_tracking import KeyTracker
from millstream.router import Router
from tests.support.waiting import eventually
from tests.support.workers import make, working

pytestmark = [pytest.mark.worker, pytest.mark.router]

STREAMS = 20


@pytest.fixture(scope="module")
def one_node_url() -> Iterator[str]:
    with EmbeddedServer(extra={"cluster-enabled": "yes"}) as server:
        server.call("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        eventually(lambda: b"cluster_state:ok" in server.call("CLUSTER", "INFO"), "the cluster to be complete")
        yield f"redis+cluster://127.0.0.1:{server.port}"


def test_keys_of_a_node_that_knows_no_address_are_tracked(one_node_url: str) -> None:
    with Client(one_node_url) as client:
        client.execute("DEL", "tracked")
        tracker = KeyTracker(client)
        assert tracker.changed() is None
        assert dict(tracker.read_each(("EXISTS",), ["tracked"])) == {"tracked": 0}
        client.execute("SET", "tracked", "1")
        assert tracker.changed() == {"tracked"}
        tracker.close()


def test_a_worker_processes_many_streams_of_a_node_that_knows_no_address(one_node_url: str) -> None:
    def process(message: Message) -> None:
        done.append((message.stream, message.key))

    done: list[tuple[str, bytes | None]] = []
    with Client(one_node_url) as client:
        for number in range(STREAMS):
            client.execute("XADD", f"in{number}", "*", "key", "k")
        with working(client, make(process, pattern="in*", key="key", into=None)):
            eventually(lambda: len(done) == STREAMS, "each message to be processed")
    assert sorted(done) == sorted((f"in{number}", b"k") for number in range(STREAMS))


def test_a_router_reads_streams_of_a_node_that_knows_no_address(one_node_url: str) -> None:
    async def first() -> object:
        async with Router(one_node_url) as router:
            async for item in router.subscribe("routed", after="0-0"):
                return item
        return None

    with Client(one_node_url) as client:
        client.execute("DEL", "routed")
        client.execute("XADD", "routed", "1-1", "a", "b")
    assert getattr(asyncio.run(first()), "id", None) == "1-1"


def test_a_node_is_reached_at_an_address_of_ipv6(one_node_url: str) -> None:
    with Client(one_node_url) as client:
        try:
            client.execute("CONFIG", "SET", "bind", "127.0.0.1 ::1")
        except CommandFailed:
            pytest.skip("this machine has no IPv6")
    port = one_node_url.rpartition(":")[2]
    with Client(f"redis+cluster://[::1]:{port}") as client:
        client.pipeline([("SET", f"ipv6{n}", n) for n in range(3)])
        assert client.execute("GET", "ipv61") == b"1"
        assert [address for address, _ in client.execute_on_primaries("PING")] == [f"::1:{port}"]
