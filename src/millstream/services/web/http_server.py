"""Server: uvicorn, extended to register for each connection whether the server awaits something from its client.

uvicorn itself limits neither the time until a request arrives nor WebSockets, and cannot choose which connection to
close ([docs/decisions/0024-connection-limits.md]).
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from millstream.observability.metrics import Metrics
from millstream.services.web.connections import Connections, Limits
from millstream.services.web.request_limits import RequestLimits

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_AWAITED_STATES = (h11.IDLE, h11.SEND_BODY, h11.ERROR)
_NO_HTTP_BODY = msgspec.json.encode({"error": "not HTTP/1.1, or URL and headers are far too long"})
_NO_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    % len(_NO_HTTP_BODY)
)
_ACCEPTED_AT_ONCE, _BACKLOG = 32, 2_048


@dataclass(frozen=True, kw_only=True)
class WebSockets:
    """Options of WebSockets.

    * `protocol`: the protocol class; passed in, as it needs one more library
    * `frame_bytes`: the largest message of a client
    * `ping_s`, `pong_s`: seconds between pings, and until a pong must arrive
    """

    protocol: type[asyncio.Protocol]
    frame_bytes: int
    ping_s: float
    pong_s: float


class ServerConfig(uvicorn.Config):
    """uvicorn's settings, and the `Connections` that its protocols report to."""

    def __init__(
        self,
        app: "ASGIApp",
        connections: Connections,
        sockets: WebSockets | None,
        stop_s: float,
        headers: Mapping[str, str],
    ) -> None:
        options: dict[str, Any] = {"ws": "none"}
        if sockets is not None:
            options = {
                "ws": sockets.protocol,
                "ws_max_size": sockets.frame_bytes,
                "ws_per_message_deflate": False,
                "ws_ping_interval": sockets.ping_s,
                "ws_ping_timeout": sockets.pong_s,
            }
        super().__init__(
            RequestLimits(app, connections),
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            headers=list(headers.items()),
            proxy_headers=False,
            lifespan="on",
            backlog=_ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=connections.limits.head_bytes,
            timeout_keep_alive=cast("int", connections.limits.request_s / 2),
            timeout_graceful_shutdown=cast("int", stop_s + 1),
            **options,
        )
        self.connections = connections


class HttpProtocol(H11Protocol):
    """An HTTP connection that reports whether the server awaits something from its client."""

    config: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection: the server awaits a request."""
        super().connection_made(transport)
        self._refused = False
        self._connections = self.config.connections
        self.connection = self._connections.open(transport)
        self.app_state = {**self.app_state, "connection": self.connection}

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        self._connections.remove(self.connection, exc)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if not self._refused:
            super().data_received(data)
            self._update_wait()

    def on_response_complete(self) -> None:
        """The server awaits the next request, unless the client has sent it already."""
        self._connections.await_client(self.connection)
        super().on_response_complete()
        self._update_wait()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, and wait for the client to close.

        Closing first would discard the response while the client still sends.
        """
        self._refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = b"".join(b"%s: %s\r\n" % one for one in self.config.encoded_headers)
        self.transport.write(b"%s%s\r\n%s" % (_NO_HTTP, headers, _NO_HTTP_BODY))
        self.transport.write_eof()
        self._connections.await_client(self.connection)

    def shutdown(self) -> None:
        """Close as soon as possible."""
        if self._refused:
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client does not read the sent data."""
        self._connections.await_client(self.connection, "reading")
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read some."""
        super().resume_writing()
        self._connections.on_read(self.connection)

    def _update_wait(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # it is a WebSocket now
        if self.conn.their_state not in _AWAITED_STATES:
            self._connections.clear_wait(self.connection)
        elif self.conn.their_state is h11.SEND_BODY:
            self._connections.await_body(self.connection)


class Server(uvicorn.Server):
    """Serves `app` at sockets until a signal comes.

    * `on_shutdown`: ends connections that would never end by themselves, before the rest gets `stop_s` seconds
    * `sockets`: options of WebSockets; None: no WebSockets
    * `headers`: of every response, also of those that `app` does not see
    """

    def __init__(
        self,
        app: "ASGIApp",
        limits: Limits,
        *,
        metrics: Metrics,
        stop_s: float,
        sockets: WebSockets | None = None,
        on_shutdown: Callable[[], Awaitable[None]] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._connections = Connections(limits, metrics=metrics)
        super().__init__(ServerConfig(app, self._connections, sockets, stop_s, headers))
        self._on_shutdown = on_shutdown
        self._stop_s = stop_s
        # uvicorn warns of each refused or malformed request, so any client could fill the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    def stop_at_signals(self) -> None:
        """Stop at SIGTERM and Ctrl-C from now on, also at those that come before `serve`. For the main thread.

        After its last request uvicorn raises the signal again that ended it: it is handled here, and ends nothing more.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "should_exit", True))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a long backlog, but accept a few connections at a time.

        A burst of new clients then delays no other client.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self._sweep_task = asyncio.create_task(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting; end connections that never end by themselves, close idle ones; then wait for the rest."""
        for server in self.servers:
            server.close()
        if self._on_shutdown is not None:
            await self._on_shutdown()
        self._connections.close_waiting()
        abort_timer = asyncio.get_running_loop().call_later(self._stop_s, self._connections.abort_all)
        await super().shutdown(sockets)
        abort_timer.cancel()
        self._sweep_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweep_task

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._connections.sweep_s)
            self._connections.sweep()
