"""One client that follows streams: what comes is written as fast as the client takes it, and held up by nobody else."""

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

_MOST_AT_ONCE, _MOST_BYTES = 64, 65_536
_FAREWELL_S = 2.0
_FAILED = CloseReason(reason="failed", code=1011, text="a mistake of the server's: see its log", back_ms=10_000)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How connections are kept.

    * `heartbeat_s`: seconds without anything to send, until a heartbeat
    * `stall_s`: a client that takes nothing for so many seconds is cut off
    * `buffer`: messages that wait for a client at most, of each stream; `buffer_bytes`: how many bytes of them, a last
      message aside; `budget_bytes`: how many bytes wait for all clients together
    * `when_full`: "wait": no more is read for it until it has taken half of them; "disconnect": it is told to come back
      and resume; "drop-oldest": it is told how many it lost
    """

    heartbeat_s: float = 15.0
    stall_s: float = 20.0
    buffer: int = 1_000
    buffer_bytes: int = 1_048_576
    budget_bytes: int = 268_435_456
    when_full: WhenFull = "wait"


class Connection:
    """Follows `places`, a stream and where to begin each, for the client at `wire`."""

    def __init__(
        self, wire: Transport, router: Router, places: Sequence[tuple[str, str]], *, pace: Pace, metrics: Metrics
    ) -> None:
        self._wire = wire
        self._router = router
        self._places = places
        self._pace = pace
        self._metrics = metrics
        self._positions = [after for _, after in places]
        self._ended: asyncio.Future[CloseReason] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()
        self._wrote = False

    async def run(self) -> None:
        """Until the client leaves, or `end`."""
        pace = self._pace
        subscriptions = [
            self._router.subscribe(
                stream, after=after, buffer=pace.buffer, buffer_bytes=pace.buffer_bytes, when_full=pace.when_full,
                report_start=True,
            )
            for stream, after in self._places
        ]  # fmt: skip
        tasks = [asyncio.create_task(self._attend())]
        tasks += [asyncio.create_task(self._follow(one, place)) for place, one in enumerate(subscriptions)]
        for task in tasks:
            task.add_done_callback(self._over)
        try:
            ending = await self._ended
        finally:
            for subscription in subscriptions:
                subscription.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._metrics.count(m.SERVE_ENDED, reason=ending.reason)
        await self._part(ending)

    def end(self, ending: CloseReason) -> None:
        """End it, if nothing has ended it already."""
        if not self._ended.done():
            self._ended.set_result(ending)

    def abort(self) -> None:
        """Cut it off now."""
        self._wire.abort()
        self.end(STALLED)

    async def _attend(self) -> None:
        """Notice at once when the client leaves; beat while there is nothing to send."""
        while True:
            try:
                async with asyncio.timeout(self._pace.heartbeat_s):
                    if not await self._wire.heard():
                        self.end(STALLED if self._wire.timed_out else LEFT)
                        return
            except TimeoutError:
                if not self._wrote and not self._writing.locked():
                    await self._write((), 0)
                self._wrote = False

    async def _follow(self, subscription: Subscription, place: int) -> None:
        async for first in subscription:
            items, size = [first], _size_of(first)
            while subscription.buffered and len(items) < _MOST_AT_ONCE and size < _MOST_BYTES:
                if (item := subscription.get(0)) is None:
                    break
                items.append(item)
                size += _size_of(item)
            await self._write(items, place)
        self.end(STOPPING)

    async def _write(self, items: Sequence[Item], place: int) -> None:
        """Send items of the stream at `place`, or without any a heartbeat.

        One after the other: a position covers all streams, so it may not overtake a message that it covers.
        """
        try:
            async with self._writing, asyncio.timeout(self._pace.stall_s) as stall:
                if items:
                    await self._send(items, place, stall)
                else:
                    await self._wire.beat()
        except TimeoutError:
            self.end(STALLED)
            return
        self._wrote = True
        sent = sum(isinstance(item, Message) for item in items)
        if sent:
            self._metrics.count(m.SERVE_SENT, sent, kind=self._wire.kind)

    async def _send(self, items: Sequence[Item], place: int, stall: asyncio.Timeout) -> None:
        """Send items; each part of a large one that the client takes shows that it does not stall."""
        whole: list[bytes] = []
        for item in items:
            rendered = self._render(item, place)
            if isinstance(rendered, bytes):
                whole.append(rendered)
                continue
            if whole:
                await self._wire.send(whole)
                whole = []
            await self._wire.send_in_parts(self._each_resets(stall, rendered))
        if whole:
            await self._wire.send(whole)

    def _each_resets(self, stall: asyncio.Timeout, parts: Iterator[bytes]) -> Iterator[bytes]:
        loop = asyncio.get_running_loop()
        for part in parts:
            stall.reschedule(loop.time() + self._pace.stall_s)
            yield part

    def _render(self, item: Item, place: int) -> Rendered:
        if isinstance(item, Message):
            self._positions[place] = item.id
        elif isinstance(item, Start):
            self._positions[place] = item.after
        elif isinstance(item, Dropped):
            self._metrics.count(m.SERVE_DROPPED, item.count, kind=self._wire.kind)
        return self._wire.render(item, ",".join(self._positions))

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        ending = close_reason_of(error)
        if ending is None:
            logger.error("a connection failed: this is a fault of millstream", exc_info=error)
        self.end(ending or _FAILED)

    async def _part(self, ending: CloseReason) -> None:
        if ending is LEFT:
            return
        if ending is not STALLED:
            try:
                async with asyncio.timeout(_FAREWELL_S):
                    await self._wire.close(ending)
                return
            except (TimeoutError, OSError):
                pass
        self._wire.abort()
        while await self._wire.heard():  # until the server below has noticed too
            pass


def _size_of(item: Item) -> int:
    return sum(map(len, item.pairs)) if isinstance(item, Message) else 0
