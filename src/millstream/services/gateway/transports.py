"""Transports: items as server-sent events (WHATWG HTML, "Server-sent events"), or as frames of a WebSocket."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

from millstream.model import Message
from millstream.redis_client.escaping import PART_BYTES, json_fields, json_fields_in_parts
from millstream.router import Dropped, Gap, Item, Start
from millstream.services.gateway.close_reasons import CloseReason
from millstream.services.web.connections import Connection

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Kind = Literal["sse", "websocket"]
_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]
_RECONNECT_MS = 1_000
_MOST_REASON_BYTES = 123


Rendered = bytes | Iterator[bytes]
"""An item as it is sent: whole, or in parts where rendering it at once would delay other clients."""


class Transport(Protocol):
    """The server's side of one client's connection."""

    kind: Kind

    @property
    def timed_out(self) -> bool:
        """Whether the system ended the connection, as the client read nothing for too long."""

    async def open(self) -> None:
        """Start the response."""

    def render(self, item: Item, position: str) -> Rendered:
        """An item as it is sent; `position`: where to resume once the client has received it."""

    async def send(self, items: Iterable[bytes]) -> None:
        """Send items rendered whole. Waits while the client has not read those before."""

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        """Send one item rendered in parts. Other clients get their turn between two parts."""

    async def send_heartbeat(self) -> None:
        """Send a heartbeat, for proxies on the way."""

    async def close(self, close_reason: CloseReason) -> None:
        """Close with a reason."""

    async def receive(self) -> bool:
        """Wait for input of the client; whether it is still connected."""

    def abort(self) -> None:
        """Cut the connection, and discard unsent data."""


class _BaseTransport:
    """Common to both: uvicorn's connection, which alone can cut off a client that reads nothing."""

    def __init__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        self._receive = receive
        self._send = send
        self._connection: Connection = scope["state"]["connection"]
        self.abort = self._connection.abort

    @property
    def timed_out(self) -> bool:
        """Whether the system ended the connection."""
        return self._connection.timed_out


class EventTransport(_BaseTransport):
    """Server-sent events."""

    kind: Kind = "sse"

    async def open(self) -> None:
        """Respond 200, with a random reconnection time, so that clients do not all reconnect at once."""
        self._connection.exempt_reading()
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self.send([b"retry: %d\n\n" % _jittered_ms(_RECONNECT_MS)])

    def render(self, item: Item, position: str) -> Rendered:
        """An event. One with an id alone sets the position to resume at, which browsers keep and do not show."""
        if isinstance(item, Start):
            return b"id: %s\n\n" % position.encode()
        if isinstance(item, Message) and _is_large(item):
            head = b"id: %s\ndata: {%s," % (position.encode(), _members(_entry_ref(item)))
            return chain((head,), json_fields_in_parts(item.pairs), (b"}\n\n",))
        data = _dump(_fields(item))
        if isinstance(item, Message):
            return b"id: %s\ndata: %s\n\n" % (position.encode(), data)
        return b"event: %s\ndata: %s\n\n" % (_event(item).encode(), data)

    async def send(self, items: Iterable[bytes]) -> None:
        """Send events."""
        await self._send({"type": "http.response.body", "body": b"".join(items), "more_body": True})

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        """Send an event."""
        for part in parts:
            await asyncio.sleep(0)
            if part:
                await self.send([part])

    async def send_heartbeat(self) -> None:
        """Send a comment."""
        await self.send([b":\n\n"])

    async def close(self, close_reason: CloseReason) -> None:
        """Send an event with the reason, and when to reconnect."""
        data = _dump({"reason": close_reason.reason, "text": close_reason.text})
        last = b"event: end\nretry: %d\ndata: %s\n\n" % (_jittered_ms(close_reason.reconnect_ms), data)
        await self._send({"type": "http.response.body", "body": last})

    async def receive(self) -> bool:
        """Wait until the client has disconnected: it sends nothing else."""
        return bool((await self._receive())["type"] != "http.disconnect")


class SocketTransport(_BaseTransport):
    """A WebSocket. Its heartbeats are pings, which uvicorn sends."""

    kind: Kind = "websocket"

    def __init__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        super().__init__(scope, receive, send)
        self._send_in_parts: Callable[[Iterable[bytes]], Awaitable[None]] = scope["state"]["send_in_parts"]

    async def open(self) -> None:
        """Accept the handshake."""
        await self._receive()
        await self._send({"type": "websocket.accept"})

    def render(self, item: Item, position: str) -> Rendered:
        """A text frame."""
        if isinstance(item, Message) and _is_large(item):
            head = b"{%s," % _members({"event": _event(item), **_entry_ref(item)})
            return chain((head,), json_fields_in_parts(item.pairs), (b",%s}" % _members({"position": position}),))
        return _dump({"event": _event(item), **_fields(item), "position": position})

    async def send(self, items: Iterable[bytes]) -> None:
        """Send a frame for each item."""
        for item in items:
            await self._send({"type": "websocket.send", "text": item.decode()})

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        """Send one message as a frame per part."""
        await self._send_in_parts(parts)

    async def send_heartbeat(self) -> None:
        """Nothing: uvicorn sends pings."""

    async def close(self, close_reason: CloseReason) -> None:
        """Close with a code and a reason."""
        await self._send({"type": "websocket.close", "code": close_reason.code, "reason": reason_of(close_reason.text)})

    async def receive(self) -> bool:
        """Wait for any input; messages of clients are ignored."""
        return bool((await self._receive())["type"] != "websocket.disconnect")


def reason_of(text: str) -> str:
    """A text cut to the most that the reason of a close may hold: 123 bytes of UTF-8 (RFC 6455, 5.5)."""
    return text.encode("utf-8", "replace")[:_MOST_REASON_BYTES].decode("utf-8", "ignore")


def _event(item: Item) -> str:
    return type(item).__name__.lower()


def _fields(item: Item) -> dict[str, Any]:
    if isinstance(item, Message):
        return {**_entry_ref(item), **json_fields(item.pairs)}
    if isinstance(item, Gap):
        return {"stream": item.stream, "reason": item.reason, "missed": item.missed, "after": item.after}
    if isinstance(item, Dropped):
        return {"stream": item.stream, "count": item.count}
    return {"stream": item.stream}


def _entry_ref(message: Message) -> dict[str, str]:
    return {"stream": message.stream, "id": message.id}


def _is_large(message: Message) -> bool:
    return sum(map(len, message.pairs)) > PART_BYTES


def _members(value: dict[str, str]) -> bytes:
    return _dump(value)[1:-1]


def _dump(value: Any) -> bytes:
    # ASCII only: a name that is not UTF-8 is text with surrogates, and no line break can end an event.
    return json.dumps(value, separators=(",", ":")).encode()


def _jittered_ms(about_ms: int) -> int:
    return random.randint(about_ms, 3 * about_ms)
