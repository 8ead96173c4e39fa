"""Embedded gateway: live streams from routes of a web application, on the ASGI server that it runs on."""

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from millstream.errors import ConfigError
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.router import ReadPolicy, Router
from millstream.services.gateway.auth import MOST_STREAMS
from millstream.services.gateway.client_connection import FlowControl
from millstream.services.gateway.connection_manager import ConnectionLimits, ConnectionManager
from millstream.services.gateway.follow_request import parse_starts
from millstream.services.gateway.transports import EventTransport
from millstream.services.web.errors import Refused

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_FLOW, _LIMITS = FlowControl(), ConnectionLimits()
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EmbeddedGateway:
    """Follows streams for browsers within an application of Starlette or FastAPI, while the block runs.

        async with EmbeddedGateway("redis://127.0.0.1:6379/0") as gateway:
            ...

        @api.get("/orders/{order}/events")
        async def events(order: str, request: Request) -> Response:
            return gateway.events(request, f"orders:{order}")

    One router in the event loop of the application reads for all clients. The application decides which streams a
    request may follow. At SIGTERM or SIGINT, before the server stops, every client gets an `end` and may reconnect
    later: servers wait for open responses, and these would never end. So enter it where the server's handlers of these
    signals are installed, as in a lifespan.

    * `flow`: buffers, heartbeats, and when a client that reads nothing is given up
    * `limits`: the most connections, in all and of one principal
    * `stop_s`: how long a stop waits for clients to read their `end`, in seconds

    `router` may serve other subscriptions, too. Enter it once, after a fork. Raises ConfigError for a bad URL.
    """

    def __init__(
        self,
        url: str,
        *,
        flow: FlowControl = _FLOW,
        limits: ConnectionLimits = _LIMITS,
        stop_s: float = 5.0,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        self.router = Router(url, read=ReadPolicy(budget_bytes=flow.budget_bytes), metrics=metrics)
        self._connections = ConnectionManager(self.router, limits=limits, pace=flow, metrics=metrics)
        self._stop_s = stop_s
        self._closing: asyncio.Task[None] | None = None
        self._signals = _StopSignals(self._begin_close)

    async def __aenter__(self) -> Self:
        await self.router.__aenter__()
        self._signals.install()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End every connection, and close the router."""
        self._signals.remove()
        try:
            await self._begin_close()
        finally:
            await self.router.__aexit__(*error)

    def events(self, request: Request, *streams: str, after: str = "latest", principal: str = "") -> Response:
        """Return a response with the entries of `streams` as server-sent events, until the client leaves.

        It begins after the id that the browser sends when it reconnects, else after `?after=` of the URL, else at
        `after`: an id, "earliest" or "latest". `principal`: for whom it is, as `limits` counts it. Raises HTTPException
        for another method than GET and for an id that is none; sending it does for too many connections. Raises
        ConfigError for no streams, or more than 100.
        """
        if not 1 <= len(streams) <= MOST_STREAMS:
            raise ConfigError(f"one response follows 1 to {MOST_STREAMS} streams, not {len(streams)}")
        if request.method != "GET":
            raise HTTPException(405, "only GET", {"Allow": "GET"})
        try:
            starts = parse_starts(request.scope, streams, after)
        except Refused as refused:
            raise HTTPException(refused.status, str(refused)) from refused
        return _Events(self._connections, starts, principal.encode("utf-8", "surrogateescape"))

    def _begin_close(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._connections.close(self._stop_s))
        return self._closing


class _Events(Response):
    """The response that follows streams."""

    def __init__(self, connections: ConnectionManager, starts: tuple[tuple[str, str], ...], principal: bytes) -> None:
        super().__init__(media_type="text/event-stream")
        self._connections = connections
        self._starts = starts
        self._principal = principal

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Deliver the streams. Raises HTTPException if the limits do not allow it."""
        try:
            async with asyncio.timeout(None) as cut:
                state = {"connection": _ServedConnection(cut)}
                transport = EventTransport({**scope, "state": state}, receive, send)
                await self._connections.serve(transport, self._principal, self._starts)
        except Refused as refused:
            raise HTTPException(refused.status, str(refused)) from refused
        except TimeoutError:
            if not cut.expired():
                raise


class _ServedConnection:
    """A connection of a server that is not ours: it cannot be cut, so a response to a stalled client just ends."""

    timed_out = False

    def __init__(self, cut: asyncio.Timeout) -> None:
        self._cut = cut
        self._is_aborted = False

    def abort(self) -> None:
        """End the response. The server closes the connection once the client has read what was sent, or is gone."""
        if not self._is_aborted:
            self._is_aborted = True
            self._cut.reschedule(asyncio.get_running_loop().time())

    def exempt_reading(self) -> None:
        """Nothing: the server has no read timeout."""


class _StopSignals:
    """Calls `on_stop` in the event loop when a signal stops the server, beside the server's own handler."""

    def __init__(self, on_stop: Callable[[], object]) -> None:
        self._on_stop = on_stop
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def install(self) -> None:
        """Call the server's handlers, too, from now on. Does nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return  # no server that handles signals runs here
        self._loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._previous[number] = handler
                signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Put the server's handlers back."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, and another library still calls this handler
            self._loop.call_soon_threadsafe(self._on_stop)
        self._previous[number](number, frame)
