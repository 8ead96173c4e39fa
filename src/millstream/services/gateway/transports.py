"""How items reach a client: as server-sent events (WHATWG HTML, "Server-sent events"), or as frames of a WebSocket."""

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
    (b"x-accel-buffering", b"no"),  # nginx would collect events before it passes any on
]
_BACK_MS = 1_000
_MOST_REASON = 123


Rendered = bytes | Iterator[bytes]
"""An item as it is sent: whole, or in parts, where making it at once would hold up other clients."""


class Transport(Protocol):
    """One client's end of a connection."""

    kind: Kind

    @property
    def timed_out(self) -> bool:
        """Whether the system has ended the connection, as the client took nothing for too long."""

    async def open(self) -> None:
        """Begin to answer."""

    def render(self, item: Item, position: str) -> Rendered:
        """An item as it is sent; `position`: where to resume once the client has it."""

    async def send(self, items: Iterable[bytes]) -> None:
        """Send what was rendered whole. Waits while the client does not take what was sent before."""

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        """Send one item that was rendered in parts. Others get their turn between two of them."""

    async def beat(self) -> None:
        """Show that the connection is alive, to whatever is in between."""

    async def close(self, ending: CloseReason) -> None:
        """Say farewell."""

    async def heard(self) -> bool:
        """Wait for anything from the client; whether it is still there."""

    def abort(self) -> None:
        """Cut the connection, whatever the client has not taken yet."""


class _BaseTransport:
    """What both have: the connection of the server below, which alone can cut one whose client takes nothing."""

    def __init__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        self._receive = receive
        self._send = send
        self._connection: Connection = scope["state"]["connection"]
        self.abort = self._connection.abort

    @property
    def timed_out(self) -> bool:
        """Whether the system has ended the connection."""
        return self._connection.timed_out


class EventTransport(_BaseTransport):
    """Server-sent events."""

    kind: Kind = "sse"

    async def open(self) -> None:
        """Answer 200, and say when to come back after a broken connection: not all at once."""
        self._connection.keep()
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self.send([b"retry: %d\n\n" % _some_time_ms(_BACK_MS)])

    def render(self, item: Item, position: str) -> Rendered:
        """An event. The place to resume at, alone, is one that browsers keep and do not show."""
        if isinstance(item, Start):
            return b"id: %s\n\n" % position.encode()
        if isinstance(item, Message) and _is_large(item):
            head = b"id: %s\ndata: {%s," % (position.encode(), _members(_place(item)))
            return chain((head,), json_fields_in_parts(item.pairs), (b"}\n\n",))
        data = _dump(_said(item))
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

    async def beat(self) -> None:
        """Send a comment."""
        await self.send([b":\n\n"])

    async def close(self, ending: CloseReason) -> None:
        """Send an event that says why, and when to come back."""
        data = _dump({"reason": ending.reason, "text": ending.text})
        last = b"event: end\nretry: %d\ndata: %s\n\n" % (_some_time_ms(ending.back_ms), data)
        await self._send({"type": "http.response.body", "body": last})

    async def heard(self) -> bool:
        """Wait until the client has left: it has nothing to say."""
        return bool((await self._receive())["type"] != "http.disconnect")


class SocketTransport(_BaseTransport):
    """A WebSocket. Its heartbeats are pings, which the server below sends."""

    kind: Kind = "websocket"

    def __init__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        super().__init__(scope, receive, send)
        self._send_in_parts: Callable[[Iterable[bytes]], Awaitable[None]] = scope["state"]["send_in_parts"]

    async def open(self) -> None:
        """Accept."""
        await self._receive()
        await self._send({"type": "websocket.accept"})

    def render(self, item: Item, position: str) -> Rendered:
        """A text frame."""
        if isinstance(item, Message) and _is_large(item):
            head = b"{%s," % _members({"event": _event(item), **_place(item)})
            return chain((head,), json_fields_in_parts(item.pairs), (b",%s}" % _members({"position": position}),))
        return _dump({"event": _event(item), **_said(item), "position": position})

    async def send(self, items: Iterable[bytes]) -> None:
        """Send a frame for each item."""
        for item in items:
            await self._send({"type": "websocket.send", "text": item.decode()})

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        """Send a message of a frame for each part."""
        await self._send_in_parts(parts)

    async def beat(self) -> None:
        """Nothing: see above."""

    async def close(self, ending: CloseReason) -> None:
        """Close with a code and a reason."""
        await self._send({"type": "websocket.close", "code": ending.code, "reason": reason_of(ending.text)})

    async def heard(self) -> bool:
        """Wait for anything; what clients say means nothing here."""
        return bool((await self._receive())["type"] != "websocket.disconnect")


def reason_of(text: str) -> str:
    """As much of a text as the reason of a close may hold: 123 bytes of UTF-8 (RFC 6455, 5.5)."""
    return text.encode("utf-8", "replace")[:_MOST_REASON].decode("utf-8", "ignore")


def _event(item: Item) -> str:
    return type(item).__name__.lower()


def _said(item: Item) -> dict[str, Any]:
    if isinstance(item, Message):
        return {**_place(item), **json_fields(item.pairs)}
    if isinstance(item, Gap):
        return {"stream": item.stream, "reason": item.reason, "missed": item.missed, "after": item.after}
    if isinstance(item, Dropped):
        return {"stream": item.stream, "count": item.count}
    return {"stream": item.stream}


def _place(message: Message) -> dict[str, str]:
    return {"stream": message.stream, "id": message.id}


def _is_large(message: Message) -> bool:
    return sum(map(len, message.pairs)) > PART_BYTES


def _members(value: dict[str, str]) -> bytes:
    return _dump(value)[1:-1]


def _dump(value: Any) -> bytes:
    # ASCII only: a name that is not UTF-8 stands in text as surrogates, and no line break can end an event.
    return json.dumps(value, separators=(",", ":")).encode()


def _some_time_ms(about_ms: int) -> int:
    return random.randint(about_ms, 3 * about_ms)
