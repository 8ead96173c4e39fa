"""ConnectionManager: limits the connections of one server, and ends them together."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics, init_series
from millstream.router import Router
from millstream.services.gateway.client_connection import Connection, FlowControl
from millstream.services.gateway.close_reasons import REFUSALS, STOPPING, EndReason
from millstream.services.gateway.gc_freeze import ConnectionCounts
from millstream.services.gateway.transports import Kind, Transport
from millstream.services.web.errors import Refused


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The most connections: in all, and with one token, its tickets included."""

    connections: int = 10_000
    per_token: int = 10_000


class ConnectionManager:
    """Admits connections, and ends them."""

    def __init__(self, router: Router, *, limits: ConnectionLimits, pace: FlowControl, metrics: Metrics) -> None:
        self._router = router
        self._limits = limits
        self._flow = pace
        self._metrics = metrics
        for kind in get_args(Kind):
            metrics.set(m.SERVE_CONNECTIONS, 0, kind=kind)
            init_series(metrics, m.SERVE_SENT, m.SERVE_DROPPED, kind=kind)
        for reason in get_args(EndReason):
            init_series(metrics, m.SERVE_ENDED, reason=reason)
        for status in REFUSALS:
            init_series(metrics, m.SERVE_REFUSED, status=str(status))
        self._open: set[Connection] = set()
        self._by_kind: Counter[str] = Counter()
        self._by_principal: Counter[bytes] = Counter()
        self._all_closed = asyncio.Event()
        self._closing = False
        self._ended = 0

    @property
    def counts(self) -> ConnectionCounts:
        """How many connections are open, and how many have ended."""
        return ConnectionCounts(len(self._open), self._ended)

    def check_limits(self, principal: bytes) -> None:
        """Raise Refused if this principal may not open one more connection."""
        if self._closing:
            raise Refused(503, "the server is stopping; retry soon")
        if len(self._open) >= self._limits.connections:
            raise Refused(503, f"all {len(self._open):,} connections of the server are in use; retry later")
        if self._by_principal[principal] >= self._limits.per_token:
            raise Refused(
                429,
                f"all {self._by_principal[principal]:,} connections of this token are in use; close one, or retry later",
            )

    async def serve(self, transport: Transport, principal: bytes, starts: Sequence[tuple[str, str]]) -> None:
        """Deliver the streams of `starts` through `transport` until either side ends.

        Raises Refused, before it begins.
        """
        self.check_limits(principal)
        connection = Connection(transport, self._router, starts, pace=self._flow, metrics=self._metrics)
        self._open.add(connection)
        self._count(transport.kind, principal, 1)
        try:
            await transport.open()
            await connection.run()
        finally:
            self._open.discard(connection)
            self._ended += 1
            self._count(transport.kind, principal, -1)
            if not self._open:
                self._all_closed.set()

    async def close(self, timeout_s: float) -> None:
        """End every connection with "stopping"; cut those whose client has not read that within `timeout_s` seconds."""
        self._closing = True
        for connection in tuple(self._open):
            connection.end(STOPPING)
        self._all_closed.clear()
        if self._open:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._all_closed.wait()
            except TimeoutError:
                for connection in tuple(self._open):
                    connection.abort()

    def _count(self, kind: str, principal: bytes, change: int) -> None:
        self._by_principal[principal] += change
        if not self._by_principal[principal]:
            del self._by_principal[principal]
        self._by_kind[kind] += change
        self._metrics.set(m.SERVE_CONNECTIONS, self._by_kind[kind], kind=kind)
