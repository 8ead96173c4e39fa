"""The proxy that breaks connections, since tests of faults are worth what it is worth."""

import socket
import threading
from collections.abc import Iterator

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.groups]


@pytest.fixture
def proxy(millstream_server: EmbeddedServer, millstream_url: str) -> Iterator[Proxy]:
    with Proxy(millstream_server.port) as running:
        yield running


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    with Client(proxy.url, timeout_ms=round(FAIL_SAFE_S * 1000)) as opened:
        yield opened


def test_the_proxy_passes_any_bytes_on(client: Client) -> None:
    blob = b"*3\r\n$-1\r\n\x00\xff" * 200_000
    assert client.pipeline([("SET", "a", blob), ("GET", "a"), ("STRLEN", "a")]) == [b"OK", blob, len(blob)]
    assert client.pipeline([("INCR", "n")] * 5_000) == list(range(1, 5_001))


def test_a_command_that_is_cut_before_is_not_executed(proxy: Proxy, client: Client) -> None:
    proxy.cut_before("incr")
    with pytest.raises(Unavailable):
        client.execute("INCR", "n")
    assert proxy.cuts == {("before", "INCR"): 1}
    assert client.execute("GET", "n") is None
    assert client.execute("INCR", "n") == 1


def test_a_command_that_is_cut_after_is_executed_when_the_client_notices(
    proxy: Proxy, client: Client, millstream_server: EmbeddedServer
) -> None:
    for number in range(1, 30):
        proxy.cut_after("INCR")
        with pytest.raises(Unavailable):
            client.execute("INCR", "n")
        assert millstream_server.call("GET", "n") == str(number).encode()
    assert proxy.cuts == {("after", "INCR"): 29}


def test_only_the_named_commands_are_cut_and_as_often_as_asked(proxy: Proxy, client: Client) -> None:
    proxy.cut_after("SET", containing="two", times=2)
    assert client.execute("SET", "one", "1") == b"OK"
    for _ in range(2):
        with pytest.raises(Unavailable):
            client.execute("SET", "k", "it is two")
    assert client.execute("SET", "two", "2") == b"OK"


def test_the_rest_of_a_pipeline_is_not_executed(proxy: Proxy, client: Client) -> None:
    proxy.cut_after("APPEND")
    with pytest.raises(Unavailable):
        client.pipeline([("INCR", "a"), ("APPEND", "b", "x"), ("INCR", "c")])
    assert client.execute("MGET", "a", "b", "c") == [b"1", b"x", None]


def test_a_given_share_of_the_commands_is_cut(proxy: Proxy, client: Client) -> None:
    proxy.cut_at_random("incr", before=0.1, after=0.2, seed=3)
    failures = 0
    for _ in range(400):
        try:
            client.execute("INCR", "n")
        except Unavailable:
            failures += 1
    proxy.cut_at_random()
    executed = int(client.execute("GET", "n"))
    assert failures == proxy.cuts.total()
    assert executed == 400 - proxy.cuts["before", "INCR"]
    assert proxy.cuts["before", "INCR"] > 20
    assert proxy.cuts["after", "INCR"] > 40


def test_a_command_waits_while_the_proxy_is_frozen_and_passes_later(
    proxy: Proxy, client: Client, millstream_server: EmbeddedServer
) -> None:
    client.execute("PING")
    proxy.freeze()
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(client.execute("INCR", "n")))
    thread.start()
    thread.join(0.1)  # more than it would take
    assert (answers, millstream_server.call("GET", "n")) == ([], None)
    proxy.resume()
    thread.join()
    assert answers == [1]


def test_open_connections_can_be_cut_and_new_ones_opened(proxy: Proxy, client: Client) -> None:
    client.execute("PING")
    proxy.cut_all()
    with pytest.raises(Unavailable):
        client.execute("PING")
    assert client.execute("PING") == b"PONG"


def test_the_proxy_ends_with_all_its_threads_even_while_frozen(millstream_server: EmbeddedServer) -> None:
    before = set(threading.enumerate())
    with Proxy(millstream_server.port) as proxy:
        ends = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(3)]
        proxy.freeze()
        for end in ends:
            end.sendall(b"PING\r\n")

        def started() -> set[threading.Thread]:
            found = set(threading.enumerate()) - before
            return found if len(found) == 1 + 2 * len(ends) else set()

        threads = eventually(started, "all of its threads")
    assert not any(one.is_alive() for one in threads)
    for end in ends:
        end.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))


def test_a_server_that_is_away_is_away_through_the_proxy_too(millstream_fresh_server: EmbeddedServer) -> None:
    with Proxy(millstream_fresh_server.port) as proxy, Client(proxy.url) as client:
        client.execute("SET", "a", "1")
        millstream_fresh_server.kill()
        for _ in range(2):
            with pytest.raises(Unavailable):
                client.execute("GET", "a")
        millstream_fresh_server.start()
        assert client.execute("GET", "a") == b"1"
