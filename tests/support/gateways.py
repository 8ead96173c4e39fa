"""Gateway fixtures: `millstream serve` as a process, and clients that read events as a browser does."""

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote, urlsplit

from websockets.sync.client import ClientConnection, connect

from millstream.redis_client.client import Client
from tests.support.service_process import ServiceProcess, http_client
from tests.support.waiting import FAIL_SAFE_S, eventually


class Server(ServiceProcess):
    """A gateway as a process."""

    def __init__(self, url: str, *options: str) -> None:
        super().__init__(("serve", "--metrics-address", "0"), options, url)

    def __enter__(self) -> Self:
        super().__enter__()
        self.http = http_client(self.url)
        self._health = http_client(self.started["metrics"].removesuffix("/metrics"))
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._health.close()
        super().__exit__()

    def follow(self, stream: str, *, query: str = "", **headers: str) -> "Events":
        """Follow a stream by server-sent events."""
        return Events(self.url, f"/streams/{quote(stream, safe='')}?{query}", headers)

    def follow_all(self, streams: Iterable[str], *, query: str = "", **headers: str) -> "Events":
        """Follow several streams in one connection."""
        names = "&".join(f"stream={quote(name, safe='')}" for name in streams)
        return Events(self.url, f"/streams?{names}&{query}", headers)

    def socket(self, stream: str, query: str = "", **options: Any) -> ClientConnection:
        """Follow a stream by WebSocket."""
        address = self.url.replace("http://", "ws://")
        settings: dict[str, Any] = {"proxy": None, "open_timeout": FAIL_SAFE_S, "close_timeout": 1, **options}
        opened: ClientConnection = connect(f"{address}/ws/{quote(stream, safe='')}?{query}", **settings)
        return opened

    def figure(self, name: str, **labels: str) -> float:
        """A metric of the server; 0 if it is missing."""
        wanted = "".join(f'{key}="{value}"' for key, value in labels.items())
        found = self._figures(f"{name}{{{wanted}}} " if wanted else f"{name} ")
        return found[0] if found else 0

    def wait_figure(self, value: float, name: str, **labels: str) -> None:
        """Wait until a metric has this value; the server counts an action after it."""
        eventually(lambda: self.figure(name, **labels) == value, f"{name} {labels} to be {value:g}")

    @property
    def connections(self) -> int:
        """Open client connections, by the metric of the server."""
        return round(sum(self._figures("millstream_serve_connections{")))

    def _figures(self, beginning: str) -> list[float]:
        lines = self._health.get("/metrics").text.splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(beginning)]


@dataclass
class Event:
    """One event, as an EventSource would see it: `id` is the last id received, with it or before."""

    id: str = ""
    kind: str = "message"
    data: Any = None


@dataclass
class Seen:
    """What was received beside events: comments, and the last reconnection time, in milliseconds."""

    comments: int = 0
    retry_ms: int | None = None
    last_id: str = ""
    events: list[Event] = field(default_factory=list)


class Events:
    """A client of server-sent events on a bare socket, which can stop reading. A context manager."""

    def __init__(self, url: str, path: str, headers: dict[str, str], *, receive_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(FAIL_SAFE_S)
        self.socket.connect((parts.hostname or "", parts.port or 0))
        self._file = self.socket.makefile("rb")
        lines = [f"GET {path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        try:
            self.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            first = self._file.readline()
            if not first:
                raise ConnectionError("the connection ended before a response")
        except BaseException:
            self.close()
            raise
        self.status = int(first.split()[1])
        self.headers = dict(self._header_lines())
        self.seen = Seen()
        self._lines = b""
        self.ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._file.close()
        self.socket.close()

    def next(self, count: int = 1) -> list[Event]:
        """The next events."""
        while len(self.seen.events) < count:
            assert self._read(), f"the connection ended after {self.seen.events}"
        found, self.seen.events = self.seen.events[:count], self.seen.events[count:]
        return found

    def ids(self, count: int) -> list[str]:
        """The ids of the next events."""
        return [event.id for event in self.next(count)]

    def wait(self, *, comments: int = 0, places: int = 1) -> Seen:
        """Read until so many streams have a position, or until so many comments were received."""
        while (
            self.seen.comments < comments
            if comments
            else not self.seen.last_id or len(self.seen.last_id.replace("$", "").replace(",", " ").split()) < places
        ):
            assert self._read()
        return self.seen

    def wait_head(self) -> None:
        """Read until the reconnection time, which comes first."""
        while self.seen.retry_ms is None:
            assert self._read()

    def rest(self) -> list[Event]:
        """All events until the end of the response, or of the connection."""
        while self._read():
            pass
        found, self.seen.events = self.seen.events, []
        return found

    def _read(self) -> bool:
        """Read a chunk; whether there was one."""
        try:
            size = int(self._file.readline() or b"0", 16)
            chunk = self._file.read(size)
            self._file.readline()
        except (ConnectionError, ValueError):
            return False
        self._lines += chunk
        *blocks, self._lines = self._lines.split(b"\n\n")
        for block in blocks:
            self._block(block.decode())
        self.ended = not size
        return bool(size)

    def _block(self, text: str) -> None:
        event = Event()
        for line in text.split("\n"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not name:
                self.seen.comments += 1
            elif name == "id":
                self.seen.last_id = value
            elif name == "retry":
                self.seen.retry_ms = int(value)
            elif name == "event":
                event.kind = value
            elif name == "data":
                event.data = json.loads(value)
        if event.data is not None:
            event.id = self.seen.last_id
            self.seen.events.append(event)

    def _header_lines(self) -> Iterable[tuple[str, str]]:
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            yield name.lower(), value.strip()


def publish(client: Client, stream: str, numbers: Iterable[int], size: int = 0) -> list[str]:
    """Add an entry with each number; return the ids."""
    commands = [("XADD", stream, "*", "n", number, *(("pad", "x" * size) if size else ())) for number in numbers]
    return [one.decode() for one in client.pipeline(commands)]


def numbers(events: Sequence[Event]) -> list[int]:
    """The published numbers of messages."""
    return [int(event.data["fields"]["n"]) for event in events]
