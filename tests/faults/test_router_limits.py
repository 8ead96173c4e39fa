"""A server that ends connections whose replies are too large for it, and connections that never live long."""

from collections.abc import Sequence
from typing import Any

import pytest

from millstream.errors import CommandFailed
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.router import ReadPolicy
from millstream.router.reactor import ThreadReactor
from millstream.router.reconnecting_connection import ConnectionEvents, ConnectionPolicy, ReconnectingConnection
from millstream.testing.proxy import Proxy, Side
from tests.support.clocks import ManualClock
from tests.support.routers import READERS, Subscribers, make_router, publish
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router, pytest.mark.faults]

NAMES = [f"s{n}" for n in range(300)]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return request.param


def dialled(client: Client) -> int:
    """How many connections the server has accepted."""
    return int(client.execute("INFO", "stats").split(b"total_connections_received:")[1].split()[0])


def test_an_entry_larger_than_redis_sends_ends_its_own_subscription_only(
    reader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"client-output-buffer-limit": "normal 1048576 0 0"}
    with EmbeddedServer(extra=limits) as server, Client(server.url) as client:
        client.execute("XADD", "big", "*", "n", "x" * 4_000_000)
        router = make_router(server.url, reader)
        with Subscribers(router, NAMES) as crowd:
            publish(client, NAMES, range(2))
            crowd.wait_for(2 * len(NAMES))
            big = router.subscribe("big")
            publish(client, NAMES, range(2))
            with pytest.raises(CommandFailed, match=r"big cannot be read.*client-output-buffer-limit"):
                big.get(1000 * FAIL_SAFE_S)
            assert "stream given up: big" in caplog.text
            publish(client, NAMES, range(2))
            crowd.check(client)
            before = dialled(client)
            with pytest.raises(CommandFailed):
                router.subscribe("big").get(1000 * FAIL_SAFE_S)
            assert dialled(client) == before, "what was given up a moment ago is not tried again at once"
        assert not crowd.gaps


def test_the_router_asks_for_less_where_redis_sends_less_than_it_asks_for(
    millstream_fresh_server: EmbeddedServer, reader: Any
) -> None:
    server = millstream_fresh_server
    with Client(server.url) as client:
        client.pipeline([("XADD", name, "*", "n", "x" * 500) for name in NAMES for _ in range(20)])
        client.execute("CONFIG", "SET", "client-output-buffer-limit", "normal 65536 0 0")
        with Subscribers(make_router(server.url, reader), NAMES) as crowd:
            crowd.wait_for(20 * len(NAMES))
            publish(client, NAMES, range(3))
            crowd.wait_for(23 * len(NAMES))
            client.execute("CONFIG", "SET", "client-output-buffer-limit", "normal 0 0 0")
            crowd.check(client)
        assert not crowd.gaps


class ShortLived(Proxy):
    """Every connection ends at its sixth read."""

    reads = 0

    def cut_side(self, words: Sequence[bytes]) -> Side | None:
        if words[0].upper() != b"XREAD":
            return None
        self.reads += 1
        return None if self.reads % 6 else "before"


def test_connections_that_end_after_a_few_reads_still_reach_every_stream(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    server = millstream_fresh_server
    policy = ReadPolicy(streams=10, sweep_ms=1e9)  # nothing but what follows a break makes the router read
    with ShortLived(server.port) as proxy, Client(server.url) as client:
        publish(client, NAMES, [0])
        with Subscribers(make_router(proxy.url, "tracking", read=policy), NAMES) as crowd:
            crowd.check(client)


class Noting(ThreadReactor):
    """A pump that waits for nothing, and notes how long a link would have waited before it dials again."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock, print)
        self.waits: list[float] = []

    def call_later(self, delay_ms: float, action: Any) -> None:
        if getattr(action, "__name__", "") == "_redial":
            self.waits.append(delay_ms)
            super().call_later(0, action)


def test_a_server_that_ends_each_connection_is_connected_to_ever_less_often(
    millstream_fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = millstream_fresh_server
    clock = ManualClock()
    reactor = Noting(clock)
    links: list[ReconnectingConnection] = []
    ups: list[float] = []

    def up() -> None:
        ups.append(clock.now_ms)
        if len(ups) == 9:
            clock.sleep_ms(60_000)  # this one lives for a minute, all others for no time at all
        links[0].request([("XREAD", "STREAMS", "s", "0")], print)

    with Proxy(server.port) as proxy, Client(proxy.url) as client:
        proxy.cut_before("XREAD", times=1_000_000)
        events, policy = ConnectionEvents(on_up=up, on_down=lambda _: None), ConnectionPolicy(greeting=[("PING",)])
        reactor.start()
        reactor.call(
            lambda: links.append(ReconnectingConnection(reactor, client.dial, "Redis", policy=policy, events=events))
        )
        try:
            eventually(lambda: len(reactor.waits) >= 10, "ten breaks")
        finally:
            reactor.call(lambda: links[0].close())  # noqa: PLW0108 - made in the pump's thread
            assert reactor.stop(1000 * FAIL_SAFE_S)
    assert reactor.waits[:10] == [0, 50, 100, 200, 400, 800, 1000, 1000, 0, 50]
    assert caplog.text.count("Redis unreachable for") == 2, "it is not logged each time"
