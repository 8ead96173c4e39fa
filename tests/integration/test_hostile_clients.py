"""What a client without a token can do to `serve`, `master` and `consumer` with bare sockets: nothing to others."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.gateways import Events, numbers, publish
from tests.support.hostile_clients import (
    HANDSHAKE,
    KINDS,
    BareConnection,
    Service,
    answered,
    open_connections,
    page_in_time,
    page_of,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.router, pytest.mark.master, pytest.mark.xdist_group("hostile clients")]

Start = Callable[..., Service]
HOUR = ("--request-timeout", "3600")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module", params=list(KINDS))
def hasty(request: pytest.FixtureRequest, millstream_server: EmbeddedServer, log: Path) -> Iterator[Service]:
    """Each service, where a request has half a second to arrive."""
    options = ("--request-timeout", "0.5")
    with Service(request.param, millstream_server.url, log / f"hasty-{request.param}", *options) as started:
        yield started


@pytest.fixture(params=list(KINDS))
def patient(request: pytest.FixtureRequest, millstream_url: str, tmp_path: Path) -> Iterator[Service]:
    """Each service, where a request has an hour to arrive: what is closed is not closed for being late."""
    with Service(request.param, millstream_url, tmp_path / "log", *HOUR) as started:
        yield started


@pytest.fixture(scope="module", params=list(KINDS))
def steady(request: pytest.FixtureRequest, millstream_server: EmbeddedServer, log: Path) -> Iterator[Service]:
    """The same, which no test stops."""
    with Service(request.param, millstream_server.url, log / f"steady-{request.param}", *HOUR) as started:
        yield started


@pytest.fixture(scope="module")
def gateway(millstream_server: EmbeddedServer, log: Path) -> Iterator[Service]:
    """One that waits as long, and that no test stops."""
    with Service("serve", millstream_server.url, log / "gateway", *HOUR) as started:
        yield started


# --- What never comes ---


def test_a_connection_without_a_request_is_closed(hasty: Service) -> None:
    with (
        BareConnection(hasty.url) as silent,
        BareConnection(hasty.url, b"GET / HT") as half,
        BareConnection(hasty.url) as dripping,
    ):
        for connection in (silent, half):
            connection.wait_closed()
        eventually(lambda: not dripping.send(b"G") or not dripping.is_open(), "the end of one that goes on for ever")
    assert page_in_time(hasty) == 200


def test_a_connection_without_a_next_request_is_closed(hasty: Service) -> None:
    with ExitStack() as stack:
        found = [answered(hasty, hasty.page_request) for _ in range(3)]
        silent, half, dripping = (stack.enter_context(connection) for connection, _ in found)
        assert [status for _, status in found] == [200] * 3
        half.send(b"GET / HTTP/1.1\r\nX")
        eventually(lambda: not dripping.send(b"G") or not dripping.is_open(), "the end of one that goes on for ever")
        half.wait_closed()
        silent.wait_closed()


def test_a_body_that_does_not_arrive_is_refused_and_its_connection_closed(hasty: Service) -> None:
    refused, status = answered(hasty, hasty.post_head(100) + b"{")
    with refused:
        assert status == 408
        refused.wait_closed()


# --- Too many ---


def test_idle_connections_cannot_exclude_other_clients(patient: Service) -> None:
    limit, began_s = patient.kind.connections, time.monotonic()
    cases: dict[str, tuple[bytes, ...]] = {
        "nothing": (),
        "half a head": (b"GET / HT",),
        "half a body": (patient.post_head(100), b"{"),
        "an answer and half a head": (b"GET / HT",),
    }
    for first, said in cases.items():
        with open_connections(patient, limit + 20, *said, asks=first == "an answer and half a head") as opened:
            assert [page_of(patient) for _ in range(5)] == [200] * 5, first
            eventually(lambda: sum(one.is_open() for one in opened) <= limit, f"the end of those beyond: {first}")
            assert not opened[0].is_open(), f"{first}: the one that has waited longest goes first"
            assert opened[-1].is_open(), first
    assert [line for line in patient.logged() if "connections are in use" not in line] == []
    assert len(patient.logged()) <= 1 + (time.monotonic() - began_s) / 60, "it says so once a minute"


def test_a_client_that_follows_a_stream_stays_connected_beside_any_number_of_idle_connections(
    gateway: Service, client: Client
) -> None:
    upgrade = b"GET /ws/s HTTP/1.1\r\n" + HANDSHAKE + b"\r\n"
    with Events(gateway.url, "/streams/s", {}) as events, BareConnection(gateway.url) as socket:
        events.wait()
        assert socket.ask(upgrade) == 101
        with open_connections(gateway, 3 * gateway.kind.connections) as opened:
            assert page_of(gateway) == 200
            opened[0].wait_closed()
            publish(client, "s", [1])
            assert numbers(events.next()) == [1]
            assert socket.is_open()


def test_a_slow_follower_is_neither_closed_as_late_nor_counted_as_idle(
    client: Client, millstream_url: str, tmp_path: Path
) -> None:
    options = ("--request-timeout", "0.2", "--stall", "3600")
    with ExitStack() as stack:
        service = stack.enter_context(Service("serve", millstream_url, tmp_path / "log", *options))
        slow = stack.enter_context(followed(service, "/streams/s?after=0"))
        publish(client, "s", range(100), 20_000)
        assert numbers(slow.next()) == [0]
        for _ in range(3):  # what came later, and sent nothing, is late three times meanwhile
            with BareConnection(service.url) as silent:
                silent.wait_closed()
        with open_connections(service, 2 * service.kind.connections):
            assert page_in_time(service) == 200
            assert numbers(slow.next(99)) == list(range(1, 100))


def followed(service: Service, path: str) -> Events:
    """A client that receives little at once, and whose request came in time."""

    def follow() -> Events | None:
        with suppress(ConnectionError):
            return Events(service.url, path, {}, receive_bytes=4_096)
        return None

    found = eventually(follow, "a request that comes in time")
    assert found
    return found


# --- What cannot be read ---


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (b"/ws/o", b"X: " + 8_200 * b"0" + b"\r\n"),
        (b"/ws/o", 130 * b"X: 0\r\n"),
        (b"/ws/" + 8_300 * b"o", b""),
        (b"/ws/o", b"Content-Length: 5\r\n"),
        (b"/ws/o", b"X: " + 17_000 * b"0" + b"\r\n"),
    ],
    ids=["long header", "many headers", "long URL", "with a body", "longer than any request"],
)
def test_every_handshake_of_a_websocket_is_answered(gateway: Service, path: bytes, headers: bytes) -> None:
    with BareConnection(gateway.url, b"GET " + path + b" HTTP/1.1\r\n" + HANDSHAKE + headers + b"\r\n") as connection:
        assert connection.status() == 431
        connection.wait_closed()


def test_a_request_head_that_is_too_long_is_refused(steady: Service) -> None:
    with BareConnection(steady.url) as connection:
        assert connection.ask(steady.page_request[:-2] + b"X: " + 17_000 * b"0" + b"\r\n\r\n") == 431
        connection.wait_closed()


def test_a_request_with_an_ambiguous_length_is_refused(steady: Service) -> None:
    head = steady.post_head(4)[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
    with BareConnection(steady.url) as connection:
        assert connection.ask(head + b"0\r\n\r\n" + steady.page_request) == 400
        connection.wait_closed()


def test_malformed_requests_write_nothing_into_the_log(steady: Service) -> None:
    before = steady.logged()
    for nonsense in (b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost : a\r\n\r\n"):
        with BareConnection(steady.url) as connection:
            assert connection.ask(nonsense) == 400
            connection.wait_closed()
    with BareConnection(steady.url) as connection:
        connection.ask(b"GET /ws/s HTTP/1.1\r\nOrigin: https://evil.example\r\n" + HANDSHAKE + b"\r\n")
        if steady.kind is KINDS["serve"]:  # the others have no WebSockets
            connection.wait_closed()
    with BareConnection(steady.url, steady.post_head(100) + b"{"):
        pass  # it has left in the middle
    assert page_of(steady) == 200
    assert steady.logged() == before


def test_a_text_that_is_not_utf8_ends_a_websocket_and_logs_nothing(gateway: Service) -> None:
    before = gateway.logged()
    with BareConnection(gateway.url) as connection:
        assert connection.ask(b"GET /ws/s HTTP/1.1\r\n" + HANDSHAKE + b"\r\n") == 101
        connection.send(b"\x81\x82\x00\x00\x00\x00\xff\xfe")
        connection.wait_closed()
    assert gateway.logged() == before


# --- Stops ---


def test_a_stop_waits_for_no_unfinished_request(patient: Service) -> None:
    long_handshake = b"GET /ws/o HTTP/1.1\r\n" + HANDSHAKE + b"X: " + 8_200 * b"0" + b"\r\n\r\n"
    said: tuple[tuple[bytes, ...], ...] = (
        (),
        (b"GET / HT",),
        (patient.page_request, b"GET / HT"),
        (patient.post_head(100), b"{"),
        (long_handshake,),
        (b"GET /ws/o HTTP/1.1\r\n" + HANDSHAKE,),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",),
    )
    with ExitStack() as stack:
        for first in said:
            stack.enter_context(open_connections(patient, 3, *first))
        assert page_of(patient) == 200
        assert patient.stop() == 0
        assert patient.logged() == []
