"""The router while connections break, Redis dies, forgets what it tracked, fails over and moves slots: per stream, everything
once and in order."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.router import Gap, ReadPolicy, Router
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import cluster
from tests.support.replicas import kill_primary, steady_trio
from tests.support.routers import OFTEN, READERS, Subscribers, ids_in, make_router, publish, take_items
from tests.support.slots import finish_move, move_slot
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
STREAMS = 100_000 if SOAK else 400
ROUNDS = 100 if SOAK else 4
NAMES = [f"s{n}" for n in range(STREAMS)]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return request.param


NEVER = ReadPolicy(sweep_ms=1e9)


def swept(reader: str) -> dict[str, Any]:
    """A blocking read does not notice that a stream is another one, with lower ids: that is left to the sweep."""
    return {"read": OFTEN} if reader == "pool" else {}


@contextmanager
def publishing(url: str, names: list[str]) -> Iterator[None]:
    """Publish all the time, whatever happens, in a thread."""
    stopped = threading.Event()

    def run() -> None:
        with Client(url, timeout_ms=2_000) as client:
            at = 0
            while not stopped.wait(0.002):
                part = [names[(at + n) % len(names)] for n in range(20)]
                at += 20
                try:
                    publish(client, part, [at])
                except Unavailable:
                    stopped.wait(0.02)  # what was executed is looked up in the end

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def troubles(crowd: Subscribers, trouble: Callable[[], None], rounds: int = ROUNDS) -> None:
    """Make trouble again and again, each time after some messages have come."""
    for _ in range(rounds):
        trouble()
        before = crowd.total
        eventually(lambda: crowd.total > before + 100, "messages after the trouble")  # noqa: B023


def test_broken_connections_lose_and_double_nothing(millstream_fresh_server: EmbeddedServer, reader: Any) -> None:
    server = millstream_fresh_server
    with Proxy(server.port) as proxy, Client(server.url) as client:
        with Subscribers(make_router(proxy.url, reader), NAMES) as crowd:
            with publishing(server.url, NAMES):
                troubles(crowd, proxy.cut_all)
                for command in ("XREAD", "XINFO"):
                    proxy.cut_before(command, times=3)
                    proxy.cut_after(command, times=3)
                troubles(crowd, proxy.cut_all, 2)
            crowd.check(client)
        assert not crowd.gaps


def test_a_killed_server_that_comes_back_loses_and_doubles_nothing(
    millstream_fresh_server: EmbeddedServer, reader: Any
) -> None:
    server = millstream_fresh_server

    def kill() -> None:
        server.kill()
        server.start()

    with Subscribers(make_router(server.url, reader), NAMES) as crowd:
        with publishing(server.url, NAMES):
            troubles(crowd, kill, 20 if SOAK else 2)
        with Client(server.url) as client:
            crowd.check(client)
        assert not crowd.gaps


def test_a_silent_connection_is_replaced(millstream_fresh_server: EmbeddedServer, reader: Any) -> None:
    server = millstream_fresh_server
    with Proxy(server.port) as proxy, Client(server.url) as client:
        router = make_router(proxy.url, reader, timeout_ms=500, read=OFTEN if reader == "pool" else NEVER)
        with Subscribers(router, NAMES[:50]) as crowd:
            publish(client, crowd.got, [0])
            crowd.wait_for(50)
            proxy.freeze()
            publish(client, crowd.got, [1])
            eventually(
                lambda: reader == "pool" or not router._nodes._readers[None].connection.up, "the silence to be noticed"
            )
            proxy.resume()
            crowd.check(client)


def test_a_small_tracking_table_loses_no_message(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedServer(extra={"tracking-table-max-keys": "20"}) as server, Client(server.url) as client:
        with Subscribers(make_router(server.url, "tracking"), NAMES) as crowd:
            with publishing(server.url, NAMES):
                crowd.wait_for(10 * ROUNDS * 100)
            crowd.check(client)
            eventually(lambda: "tracking-table-max-keys" in caplog.text, "a word about what Redis evicts")
        assert caplog.text.count("tracking-table-max-keys") == 1
        assert not crowd.gaps


def test_streams_are_read_again_after_all_were_lost_at_once(
    millstream_fresh_server: EmbeddedServer, reader: Any
) -> None:
    server = millstream_fresh_server
    with Client(server.url) as client, Subscribers(make_router(server.url, reader, **swept(reader)), NAMES) as crowd:
        publish(client, NAMES, [0, 1])
        crowd.wait_for(2 * STREAMS)
        client.execute("FLUSHALL")
        publish(client, NAMES, [2])
        crowd.wait_for(3 * STREAMS)
        assert {name for name in NAMES if crowd.got[name][2:] != ids_in(client, name)} == set()
        assert {gap.reason for gap in crowd.gaps} == {"recreated"}
        assert len(crowd.gaps) == STREAMS


def test_a_server_that_lost_its_last_entries_repeats_nothing(
    millstream_fresh_server: EmbeddedServer, reader: Any
) -> None:
    """What a failover to a replica that lags, or a power cut, does to a stream."""
    server = millstream_fresh_server
    with Proxy(server.port) as proxy, Client(server.url) as client, make_router(proxy.url, reader) as router:
        subscription = router.subscribe("s")
        publish(client, ["s"], range(10))
        before = ids_in(client, "s")
        take_items(subscription, 10)
        proxy.freeze()
        client.execute("DEL", "s")
        for one in before[:7]:
            client.execute("XADD", "s", one, "n", "0")
        proxy.cut_all()
        proxy.resume()
        [gap] = take_items(subscription, 1)
        assert isinstance(gap, Gap)
        assert (gap.reason, gap.after) == ("rewound", before[-1])
        publish(client, ["s"], [0])
        assert [item.id for item in take_items(subscription, 1)] == ids_in(client, "s")[-1:]  # type: ignore[union-attr]


def test_subscribers_follow_a_failover_to_a_replica(reader: Any) -> None:
    with (
        steady_trio() as trio,
        Client(trio.url) as client,
        Subscribers(make_router(trio.url, reader, timeout_ms=2_000), NAMES[:100]) as crowd,
    ):
        publish(client, crowd.got, range(3))
        crowd.wait_for(300)
        eventually(lambda: client.execute("WAIT", 1, 1_000) == 1, "the replica to have it all")
        kill_primary(trio)
        client.retry_while_unavailable(
            lambda: publish(client, crowd.got, [3]), what="the test", limit_ms=1000 * FAIL_SAFE_S
        )
        crowd.check(client)
        assert not crowd.gaps


def test_subscribers_follow_slots_that_move(reader: Any) -> None:
    names = [f"{{{tag}}}:{n}" for tag in ("a", "b", "c", "d") for n in range(10)]
    with cluster() as made, Client(made.url) as client, Subscribers(make_router(made.url, reader), names) as crowd:
        publish(client, names, range(3))
        crowd.wait_for(120)
        slot = int(client.execute("CLUSTER", "KEYSLOT", "{a}:0"))
        source = next(node for node in made.nodes if node.call("CLUSTER", "COUNTKEYSINSLOT", slot))
        target = next(node for node in made.nodes if node is not source)
        with publishing(made.url, names):
            crowd.wait_for(400)
            move_slot(source, target, slot, finish=False)
            for n in range(3):
                [key] = client.pipeline([("XADD", "{a}:0", "*", "n", n)])
                eventually(lambda: crowd.got["{a}:0"][-1:] >= [key.decode()], "it from where it is")  # noqa: B023
            finish_move(source, target, slot)
            crowd.wait_for(crowd.total + 400)
            for tag in ("b", "c"):
                other = int(client.execute("CLUSTER", "KEYSLOT", f"{{{tag}}}:0"))
                source = next(node for node in made.nodes if node.call("CLUSTER", "COUNTKEYSINSLOT", other))
                target = next(node for node in made.nodes if node is not source)
                move_slot(source, target, other, finish=True)
            crowd.wait_for(crowd.total + 400)
        crowd.check(client)
        assert not crowd.gaps


def test_the_pool_replaces_key_tracking_where_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedServer() as server, Client(server.url) as client:
        client.execute("ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-client|tracking")
        url = server.url.replace("://", "://plain:secret@")
        with Router(url, read=ReadPolicy(sweep_ms=500)) as router:
            subscription = router.subscribe("s")
            publish(client, ["s"], [0])
            take_items(subscription, 1)
            assert router.reader == "pool"
        assert "CLIENT TRACKING refused" in caplog.text
        with Router(url, reader="tracking") as strict, pytest.raises(Exception, match="tracking"):
            strict.subscribe("s").get(1000 * FAIL_SAFE_S)
