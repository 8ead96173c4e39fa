"""SocketProtocol: WebSockets whose clients only listen. A separate module, as it needs one more library."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from millstream.services.web.connections import Connection
from millstream.services.web.http_server import ServerConfig

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_NOT_UTF8 = 1007
_UNREADABLE = msgspec.json.encode(
    {"error": "a WebSocket handshake has at most 128 headers, none longer than 8,190 bytes, and no body"}
)


class SocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket that answers every handshake, and reports whether the server awaits something from its client."""

    config: ServerConfig

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over a connection whose handshake has arrived."""
        self.app_state = {**self.app_state, "send_in_parts": self.send_in_parts}
        self.connection: Connection = self.app_state["connection"]
        self._is_broken = False
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        self.config.connections.remove(self.connection, exc)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on. The whole handshake arrives first: if the library has not parsed it then, it never will."""
        super().data_received(data)
        if not self.handshake_initiated and not self.close_sent:
            self.handshake_complete = self.close_sent = True
            head = (
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json"
            )
            self.transport.write(b"%s\r\ncontent-length: %d\r\n\r\n%s" % (head, len(_UNREADABLE), _UNREADABLE))
            self.transport.close()
        elif self.handshake_initiated and not self.close_sent:
            self.config.connections.clear_wait(self.connection)

    def send_receive_event_to_app(self) -> None:
        """Discard messages; a text that is not UTF-8 ends the connection (RFC 6455, 8.1)."""
        data, self.frames = b"".join(self.frames), []
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                data.decode()
            except UnicodeDecodeError:
                self.conn.send_close(_NOT_UTF8)
                self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """End the connection, as the client breaks the protocol. The app may be about to send."""
        self._is_broken = True
        super().handle_parser_exception()

    async def send(self, message: "ASGISendEvent") -> None:
        """Send for the app. After a refusal or a close the server waits for the client to close the connection."""
        await self.writable.wait()
        if self._is_broken:  # uvicorn would take it for a mistake of the app, which has not closed the connection
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # refused with a response: otherwise uvicorn logs a missing one
        if self.close_sent:
            self.config.connections.await_client(self.connection)

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        """Send a text as a frame per part, each once the client has read most of those before.

        An empty part sends nothing, and lets other clients have their turn.
        """
        continued = False
        for part in parts:
            await asyncio.sleep(0)
            if part:
                await self._send_part(part, continued=continued, last=False)
                continued = True
        await self._send_part(b"", continued=continued, last=True)

    async def _send_part(self, part: bytes, *, continued: bool, last: bool) -> None:
        await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        try:
            (self.conn.send_continuation if continued else self.conn.send_text)(part, fin=last)
        except InvalidState as error:
            raise ClientDisconnected from error
        self.transport.write(b"".join(self.conn.data_to_send()))
