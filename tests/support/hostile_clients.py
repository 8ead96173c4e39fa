"""Fixtures for hostile clients: each HTTP service as a process with a readable log, and clients on bare sockets."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tests.support.masters import GROUP, STREAM, TOKEN
from tests.support.service_process import ServiceProcess
from tests.support.waiting import FAIL_SAFE_S, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "tickets"
NOWHERE = "http://127.0.0.1:1/api"
HANDSHAKE = (
    b"Host: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A service: its command, a page that needs no token, a path that takes a body, and its connection limit."""

    command: tuple[str, ...]
    page: str
    post: str
    connections: int


KINDS = {
    "serve": Kind(command=("serve", "--connections", "4"), page="/healthz", post="/tickets", connections=104),
    "master": Kind(
        command=(
            "master",
            "--ticket-stream",
            STREAM,
            "--concurrency-stream-group",
            GROUP,
            "--token",
            TOKEN,
            "--connections",
            "50",
        ),
        page="/api/health",
        post="/api/consumers/register",
        connections=50,
    ),
    "consumer": Kind(
        command=(
            "consumer",
            f"{EXAMPLE}/work.py:work",
            "--ticket-stream",
            STREAM,
            "--concurrency-stream-group",
            GROUP,
            "--name",
            "c1",
            "--master-register-api-url",
            f"{NOWHERE}/consumers/register",
            "--master-acknowledge-api-url",
            f"{NOWHERE}/messages/acknowledge",
            "--connections",
            "50",
        ),
        page="/api/health",
        post="/api/health",
        connections=50,
    ),
}


class Service(ServiceProcess):
    """A process of one of these kinds, with a log."""

    def __init__(self, name: str, redis_url: str, log: Path, *options: str) -> None:
        self.kind = KINDS[name]
        self.page_request = f"GET {self.kind.page} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        env = {"TICKETS_LOG": str(log.with_suffix(".work"))}
        super().__init__(self.kind.command, options, redis_url, env=env, log=log)

    def logged(self) -> list[str]:
        """The lines of its log, without those of a consumer that finds no master."""
        return [line for line in self.said().splitlines() if "is not registered yet" not in line]

    def post_head(self, size: int) -> bytes:
        """The head of a request with a body of so many bytes."""
        return f"POST {self.kind.post} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


class BareConnection:
    """A client on a bare socket. A context manager that closes it at the end."""

    def __init__(self, url: str, first: bytes = b"") -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((address.hostname or "", address.port or 0), FAIL_SAFE_S)
        self._left = b""
        self.send(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send; whether the socket accepts it."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def ask(self, request: bytes) -> int:
        """Send a request, and read the whole response; return its status."""
        self.send(request)
        return self.status()

    def status(self) -> int:
        """The status of the next response, which is read completely."""
        found = self.status_if_any()
        assert found is not None, f"the connection ended after {self._left!r}"
        return found

    def status_if_any(self) -> int | None:
        """The same; None if the connection ends before the response."""
        while b"\r\n\r\n" not in self._left:
            if not self._read():
                return None
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        first, *lines = head.decode().lower().split("\r\n")
        sizes = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")]
        while sizes and len(self._left) < sizes[0]:
            assert self._read()
        self._left = self._left[sizes[0] :] if sizes else self._left
        return int(first.split()[1])

    def is_open(self) -> bool:
        """Whether the server has not closed it, as far as one can see now. Reads pending data."""
        self.socket.setblocking(False)
        try:
            while self._read():
                pass
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(FAIL_SAFE_S)
        return False

    def wait_closed(self) -> None:
        """Wait until the server closes it."""
        eventually(lambda: not self.is_open(), "the end of a connection")

    def _read(self) -> bool:
        try:
            data = self.socket.recv(65_536)
        except ConnectionError:
            return False
        self._left += data
        return bool(data)


def page_of(service: Service) -> int:
    """The status of the page that needs no token, for a new client."""
    with BareConnection(service.url) as visitor:
        return visitor.ask(service.page_request)


def answered(service: Service, request: bytes) -> tuple[BareConnection, int]:
    """A connection whose first request came in time, and the status of the response: if this process was late, another."""

    def ask() -> tuple[BareConnection, int] | None:
        connection = BareConnection(service.url, request)
        status = connection.status_if_any()
        if status is None:
            connection.socket.close()
        return None if status is None else (connection, status)

    found = eventually(ask, "a request that comes in time")
    assert found
    return found


def page_in_time(service: Service) -> int:
    """`page_of` a service where a request has less time to arrive than this process may stand still."""
    visitor, status = answered(service, service.page_request)
    with visitor:
        return status


@contextmanager
def open_connections(service: Service, count: int, *first: bytes, asks: bool = False) -> Iterator[list[BareConnection]]:
    """So many connections. Each makes a request if `asks`, then sends `first`, and then nothing."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(BareConnection(service.url)))
            if asks:
                assert found[-1].ask(service.page_request) == 200
            for data in first:
                found[-1].send(data)
        yield found
