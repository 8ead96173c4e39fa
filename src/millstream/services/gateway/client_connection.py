"""Connection: delivers streams to one client, as fast as that client reads, without delaying others."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.model import Message
from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.router import Dropped, Item, Router, Start, Subscription, WhenFull
from millstream.services.gateway.close_reasons import LEFT, STALLED, STOPPING, CloseReason, close_reason_of
from millstream.services.gateway.transports import Rendered, Transport

logger = logging.getLogger(__name__)

_MOST_ITEMS, _MOST_BYTES = 64, 65_536
_CLOSE_TIMEOUT_S = 2.0
_FAILED = CloseReason(reason="failed", code=1011, text="internal error of the server; see its log", reconnect_ms=10_000)


@dataclass(frozen=True, kw_only=True)
class FlowControl:
    """Flow control of connections.

    * `heartbeat_s`: seconds without data until a heartbeat is sent
    * `stall_s`: seconds without a read after which a client is disconnected
    * `buffer`: the most messages buffered for a client, per stream; `buffer_bytes`: the most bytes of them, the last
      message not counted; `budget_bytes`: the most bytes buffered for all clients together
    * `when_full`: "wait": nothing more is read for the client until half of its buffer is free; "disconnect": the
      client is disconnected, and may reconnect and resume; "drop-oldest": the oldest messages are dropped, and the
      client gets their number
    """

    heartbeat_s: float = 15.0
    stall_s: float = 20.0
    buffer: int = 1_000
    buffer_bytes: int = 1_048_576
    budget_bytes: int = 268_435_456
    when_full: WhenFull = "wait"


class Connection:
    """Delivers the streams of `starts`, pairs of a stream and the id to start after, through `transport`."""

    def __init__(
        self,
        transport: Transport,
        router: Router,
        starts: Sequence[tuple[str, str]],
        *,
        pace: FlowControl,
        metrics: Metrics,
    ) -> None:
        self._transport = transport
        self._router = router
        self._starts = starts
        self._flow = pace
        self._metrics = metrics
        self._positions = [after for _, after in starts]
        self._close_reason: asyncio.Future[CloseReason] = asyncio.get_running_loop().create_future()
        self._write_lock = asyncio.Lock()
        self._wrote = False

    async def run(self) -> None:
        """Run until the client disconnects, or until `end`."""
        pace = self._flow
        subscriptions = [
            self._router.subscribe(
                stream,
                after=after,
                buffer=pace.buffer,
                buffer_bytes=pace.buffer_bytes,
                when_full=pace.when_full,
                report_start=True,
            )
            for stream, after in self._starts
        ]
        tasks = [asyncio.create_task(self._watch_client())]
        tasks += [asyncio.create_task(self._follow(one, index)) for index, one in enumerate(subscriptions)]
        for task in tasks:
            task.add_done_callback(self._on_task_done)
        try:
            close_reason = await self._close_reason
        finally:
            for subscription in subscriptions:
                subscription.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._metrics.count(m.SERVE_ENDED, reason=close_reason.reason)
        await self._close(close_reason)

    def end(self, close_reason: CloseReason) -> None:
        """End the connection, unless it is ending already."""
        if not self._close_reason.done():
            self._close_reason.set_result(close_reason)

    def abort(self) -> None:
        """Cut the connection now."""
        self._transport.abort()
        self.end(STALLED)

    async def _watch_client(self) -> None:
        """Detect at once when the client disconnects; send heartbeats while there is no data."""
        while True:
            try:
                async with asyncio.timeout(self._flow.heartbeat_s):
                    if not await self._transport.receive():
                        self.end(STALLED if self._transport.timed_out else LEFT)
                        return
            except TimeoutError:
                if not self._wrote and not self._write_lock.locked():
                    await self._write((), 0)
                self._wrote = False

    async def _follow(self, subscription: Subscription, index: int) -> None:
        async for first in subscription:
            items, size = [first], _size_of(first)
            while subscription.buffered and len(items) < _MOST_ITEMS and size < _MOST_BYTES:
                if (item := subscription.get(0)) is None:
                    break
                items.append(item)
                size += _size_of(item)
            await self._write(items, index)
        self.end(STOPPING)

    async def _write(self, items: Sequence[Item], index: int) -> None:
        """Send items of the stream at `index`, or without items a heartbeat.

        One write at a time: a position covers all streams, so it must not overtake a message that it covers.
        """
        try:
            async with self._write_lock, asyncio.timeout(self._flow.stall_s) as stall:
                if items:
                    await self._send(items, index, stall)
                else:
                    await self._transport.send_heartbeat()
        except TimeoutError:
            self.end(STALLED)
            return
        self._wrote = True
        sent = sum(isinstance(item, Message) for item in items)
        if sent:
            self._metrics.count(m.SERVE_SENT, sent, kind=self._transport.kind)

    async def _send(self, items: Sequence[Item], index: int, stall: asyncio.Timeout) -> None:
        """Send items; each part of a large item that the client reads resets its stall timeout."""
        whole: list[bytes] = []
        for item in items:
            rendered = self._render(item, index)
            if isinstance(rendered, bytes):
                whole.append(rendered)
                continue
            if whole:
                await self._transport.send(whole)
                whole = []
            await self._transport.send_in_parts(self._reset_stall(stall, rendered))
        if whole:
            await self._transport.send(whole)

    def _reset_stall(self, stall: asyncio.Timeout, parts: Iterator[bytes]) -> Iterator[bytes]:
        loop = asyncio.get_running_loop()
        for part in parts:
            stall.reschedule(loop.time() + self._flow.stall_s)
            yield part

    def _render(self, item: Item, index: int) -> Rendered:
        if isinstance(item, Message):
            self._positions[index] = item.id
        elif isinstance(item, Start):
            self._positions[index] = item.after
        elif isinstance(item, Dropped):
            self._metrics.count(m.SERVE_DROPPED, item.count, kind=self._transport.kind)
        return self._transport.render(item, ",".join(self._positions))

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        close_reason = close_reason_of(error)
        if close_reason is None:
            logger.error("a connection failed on an unexpected error (a bug in millstream)", exc_info=error)
        self.end(close_reason or _FAILED)

    async def _close(self, close_reason: CloseReason) -> None:
        if close_reason is LEFT:
            return
        if close_reason is not STALLED:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._transport.close(close_reason)
                return
            except (TimeoutError, OSError):
                pass
        self._transport.abort()
        while await self._transport.receive():  # until uvicorn has noticed too
            pass


def _size_of(item: Item) -> int:
    return sum(map(len, item.pairs)) if isinstance(item, Message) else 0
