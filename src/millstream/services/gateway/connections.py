"""All connections of one server: how many there may be, and that they end together."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.router import Router
from millstream.services.gateway.close_reasons import STOPPING
from millstream.services.gateway.connection import Connection, Pace
from millstream.services.gateway.gc_freeze import Traffic
from millstream.services.gateway.transports import Transport
from millstream.services.web.errors import Refused


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be: in all, and with one token, its tickets included."""

    connections: int = 10_000
    per_token: int = 10_000


class ConnectionManager:
    """Lets connections in, and ends them."""

    def __init__(self, router: Router, *, room: ConnectionLimits, pace: Pace, metrics: Metrics) -> None:
        self._router = router
        self._room = room
        self._pace = pace
        self._metrics = metrics
        self._open: set[Connection] = set()
        self._kinds: Counter[str] = Counter()
        self._holders: Counter[bytes] = Counter()
        self._emptied = asyncio.Event()
        self._closing = False
        self._ended = 0

    @property
    def traffic(self) -> Traffic:
        """How many connections there are, and were."""
        return Traffic(len(self._open), self._ended)

    def check(self, holder: bytes) -> None:
        """Raise Refused if there is no room for one more of this holder's."""
        if self._closing:
            raise Refused(503, "the server stops: come back soon")
        if len(self._open) >= self._room.connections:
            raise Refused(503, f"there are {len(self._open):,} connections already, as many as there may be")
        if self._holders[holder] >= self._room.per_token:
            raise Refused(
                429, f"there are {self._holders[holder]:,} connections with this token, as many as there may be"
            )

    async def serve(self, wire: Transport, holder: bytes, places: Sequence[tuple[str, str]]) -> None:
        """Have the client at `wire` follow `places`, until one of the two has enough. Raises Refused, before it begins."""
        self.check(holder)
        connection = Connection(wire, self._router, places, pace=self._pace, metrics=self._metrics)
        self._open.add(connection)
        self._count(wire.kind, holder, 1)
        try:
            await wire.open()
            await connection.run()
        finally:
            self._open.discard(connection)
            self._ended += 1
            self._count(wire.kind, holder, -1)
            if not self._open:
                self._emptied.set()

    async def close(self, timeout_s: float) -> None:
        """Tell everybody to come back later; cut off who has not taken that within `timeout_s` seconds."""
        self._closing = True
        for connection in tuple(self._open):
            connection.end(STOPPING)
        self._emptied.clear()
        if self._open:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._emptied.wait()
            except TimeoutError:
                for connection in tuple(self._open):
                    connection.abort()

    def _count(self, kind: str, holder: bytes, change: int) -> None:
        self._holders[holder] += change
        if not self._holders[holder]:
            del self._holders[holder]
        self._kinds[kind] += change
        self._metrics.set(m.SERVE_CONNECTIONS, self._kinds[kind], kind=kind)
