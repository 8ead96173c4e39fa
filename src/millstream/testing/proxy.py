"""Proxy: a TCP proxy in front of a Redis server that breaks connections at chosen commands.

    with Proxy(server.port) as proxy, Client(proxy.url) as client:
        proxy.cut_after("XADD")         # Redis executes it, but the reply is lost
        client.execute("XADD", ...)     # raises Unavailable

Chaos proxies such as Toxiproxy break connections by time and bytes; this one does so by commands.
"""

import random
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

Side = Literal["before", "after"]

_CHUNK = 65_536
_END_S = 10.0


@dataclass(slots=True)
class _Cut:
    """A planned cut: of the next `times` commands of this name that have an argument with `containing` in it."""

    name: bytes
    containing: bytes
    side: Side
    times: int

    def meets(self, words: Sequence[bytes]) -> bool:
        return self.times > 0 and words[0].upper() == self.name and any(self.containing in word for word in words)


class Proxy:
    """Forwards connections on a free port of 127.0.0.1 to the Redis server on `port`. Use it as a context manager.

    Clients connect to `url`. `cuts` counts the cuts, by ("before" or "after", command name). Parses RESP requests of
    any client and forwards replies unparsed. Not for TLS.
    """

    def __init__(self, port: int) -> None:
        self.cuts: Counter[tuple[Side, str]] = Counter()
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._plan: list[_Cut] = []
        self._shares: dict[Side, float] = {"before": 0.0, "after": 0.0}
        self._chance = random.Random(0)
        self._drawn_name = b""
        self._flowing = threading.Event()
        self._flowing.set()
        self._closed = False
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._acceptor.start()

    # --- Called by tests ---

    def cut_before(self, name: str, *, containing: str | bytes = b"", times: int = 1) -> None:
        """Close the connection instead of forwarding the next `times` commands `name`: they are never executed.

        `containing`: only commands with an argument that contains this, such as the `sha` of a script.
        """
        self._add("before", name, containing, times)

    def cut_after(self, name: str, *, containing: str | bytes = b"", times: int = 1) -> None:
        """Close the connection after the next `times` commands `name` are executed, before their replies are forwarded.

        Replies to earlier commands of the same pipeline may be lost too. The rest of the pipeline is not executed.
        """
        self._add("after", name, containing, times)

    def cut_at_random(self, name: str = "", *, before: float = 0.0, after: float = 0.0, seed: int = 0) -> None:
        """From now on, cut this share (0 to 1) of the commands `name`, or of all, before or after their execution."""
        with self._lock:
            self._drawn_name = name.upper().encode()
            self._shares = {"before": before, "after": after}
            self._chance = random.Random(seed)

    def cut_all(self) -> None:
        """Close every open connection; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.shut()

    def freeze(self) -> None:
        """Stop forwarding in both directions until `resume`; connections stay open, as in a network partition."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, starting with the buffered data."""
        self._flowing.set()

    def close(self) -> None:
        """Close every connection and stop listening."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(_END_S)
        self.cut_all()
        self._flowing.set()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Called by connections ---

    def fate(self, words: Sequence[bytes]) -> Side | None:
        """Return whether the connection is cut before or after this command, or not at all. Counts the cut."""
        with self._lock:
            side = self._planned(words) or self._drawn(words)
            if side:
                self.cuts[side, words[0].decode("ascii", "replace").upper()] += 1
            return side

    def wait_until_flowing(self) -> None:
        """Wait while the proxy is frozen."""
        self._flowing.wait()

    def forget(self, link: "_Link") -> None:
        """Remove a closed connection."""
        with self._lock:
            self._links.discard(link)

    # --- Internals ---

    def _add(self, side: Side, name: str, containing: str | bytes, times: int) -> None:
        wanted = containing.encode() if isinstance(containing, str) else containing
        with self._lock:
            self._plan.append(_Cut(name.upper().encode(), wanted, side, times))

    def _planned(self, words: Sequence[bytes]) -> Side | None:
        for cut in self._plan:
            if cut.meets(words):
                cut.times -= 1
                return cut.side
        return None

    def _drawn(self, words: Sequence[bytes]) -> Side | None:
        if self._drawn_name not in (b"", words[0].upper()):
            return None
        drawn = self._chance.random()
        if drawn < self._shares["before"]:
            return "before"
        return "after" if drawn < self._shares["before"] + self._shares["after"] else None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, _END_S)
            except OSError:
                client.close()  # Redis is unavailable, so the proxy is too
                continue
            server.settimeout(None)
            with self._lock:
                self._links.add(_Link(self, client, server))


class _Link:
    """One client's connection, with a thread for requests and one for replies."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy = proxy
        self._client = client
        self._server = server
        self._muted = threading.Event()
        self._replies = threading.Thread(target=self._pass_replies, name="proxy-replies", daemon=True)
        self._requests = threading.Thread(target=self._pass_requests, name="proxy-requests", daemon=True)
        self._replies.start()
        self._requests.start()

    def shut(self) -> None:
        """Shut down both sockets."""
        for end in (self._client, self._server):
            with suppress(OSError):  # it may be closed already
                end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until both threads have ended."""
        self._requests.join(_END_S)

    def _pass_requests(self) -> None:
        try:
            self._forward()
        except OSError:
            pass  # the other direction, or the test, closed it
        finally:
            self.shut()
            self._replies.join()
            self._client.close()
            self._server.close()
            self._proxy.forget(self)

    def _forward(self) -> None:
        buffer = bytearray()
        while data := self._client.recv(_CHUNK):
            self._proxy.wait_until_flowing()
            buffer += data
            parsed = 0  # so many bytes are complete commands to forward
            while (found := _command(buffer, parsed)) is not None:
                words, end = found
                side = self._proxy.fate(words)
                if side:
                    self._cut(side, bytes(buffer[:parsed]), bytes(buffer[parsed:end]))
                    return
                parsed = end
            self._server.sendall(buffer[:parsed])
            del buffer[:parsed]

    def _cut(self, side: Side, earlier: bytes, command: bytes) -> None:
        if side == "before":
            self._server.sendall(earlier)
            return
        self._muted.set()
        self._server.sendall(earlier + command)
        # Redis executes what it has read before it notices the end of the input and closes.
        self._server.shutdown(socket.SHUT_WR)
        self._replies.join(_END_S)

    def _pass_replies(self) -> None:
        try:
            while data := self._server.recv(_CHUNK):
                self._proxy.wait_until_flowing()
                if not self._muted.is_set():
                    self._client.sendall(data)
        except OSError:
            pass  # the other direction, or the test, closed it
        if not self._muted.is_set():
            self.shut()


def _command(buffer: bytearray, start: int) -> tuple[list[bytes], int] | None:
    """Return the words of the request at `start`, and its end; None if it is incomplete (Redis protocol, RESP)."""
    end = buffer.find(b"\r\n", start)
    if end < 0:
        return None
    if buffer[start : start + 1] != b"*":
        return bytes(buffer[start:end]).split() or [b""], end + 2
    words = []
    at = end + 2
    for _ in range(int(buffer[start + 1 : end])):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(buffer[at + 1 : end])
        at = end + 2 + size + 2
        if len(buffer) < at:
            return None
        words.append(bytes(buffer[end + 2 : at - 2]))
    return words or [b""], at
