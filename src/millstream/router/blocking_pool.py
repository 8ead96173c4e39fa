"""Pool: finds changes by a pool of connections, each blocked in an XREAD over a batch of streams.

A blocked read reports only *that* a stream has changed; the stream reader reads the entries. So tracking and the pool
keep the same promises.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from millstream.errors import Unavailable
from millstream.redis_client.resp import Arg, Command, slot_of
from millstream.router.policy import PoolPolicy
from millstream.router.reconnecting_connection import ConnectionEvents, ConnectionPolicy, ReconnectingConnection
from millstream.router.subscriber_buffer import Cursor


class BlockingPool:
    """Waits for the next change of each armed cursor, once.

    `connect`: opens a connection; `changed`: called with a cursor to be read.
    """

    def __init__(
        self,
        connect: Callable[[ConnectionPolicy, ConnectionEvents, str], ReconnectingConnection],
        changed: Callable[[Cursor], None],
        policy: PoolPolicy,
        *,
        greeting: Sequence[Command],
        by_slot: bool,
    ) -> None:
        self._connect = connect
        self._on_changed = changed
        self._policy = policy
        self._connection_policy = ConnectionPolicy(greeting=greeting, timeout_ms=15_000.0 + (policy.block_ms or 0))
        self._by_slot = by_slot
        self._queued: deque[Cursor] = deque()
        self._workers: list[_Worker] = []
        self._blocked = 0

    @property
    def workers(self) -> int:
        """Connections now."""
        return len(self._workers)

    def watch(self, cursor: Cursor) -> None:
        """Report the next change of the cursor after its `last`. Once."""
        if not cursor.watched and cursor.buffers and not cursor.paused:
            cursor.watched = True
            self._queued.append(cursor)

    def flush(self) -> None:
        """Send reads to the idle workers, and grow or shrink the pool to the demand."""
        policy = self._policy
        if not self._queued and len(self._workers) <= policy.workers:
            return
        needed = -(-(len(self._queued) + self._blocked) // policy.streams)
        while needed and len(self._workers) < min(max(needed, policy.workers), policy.max_workers):
            self._workers.append(_Worker(self, len(self._workers)))
        for worker in tuple(self._workers):
            if len(self._workers) > max(policy.workers, 2 * needed) and not worker.batch:
                self._workers.remove(worker)
                worker.connection.close()
            elif self._queued and worker.connection.up and not worker.batch:
                self._send(worker)

    def close(self) -> None:
        """Close every connection, and disarm every cursor."""
        for cursor in [*self._queued, *(cursor for worker in self._workers for cursor in worker.batch)]:
            cursor.watched = False
        for worker in self._workers:
            worker.connection.close()
        self._workers.clear()
        self._queued.clear()
        self._blocked = 0

    def connect_worker(self, events: ConnectionEvents, name: str) -> ReconnectingConnection:
        """A connection for a worker."""
        return self._connect(self._connection_policy, events, name)

    def on_reply(self, worker: "_Worker", reply: Any) -> None:
        """A read has ended: `reply` names the streams that have changed; after an error all of them count as changed.

        That includes a broken connection: the reply may have been too large, and would be again.
        """
        batch, worker.batch = worker.batch, []
        self._blocked -= len(batch)
        changed = dict(reply or ()) if not isinstance(reply, Exception) else None
        for cursor in batch:
            cursor.watched = False
            if changed is None or cursor.key in changed:
                self._on_changed(cursor)
            else:
                self.watch(cursor)

    def _send(self, worker: "_Worker") -> None:
        batch: dict[bytes, Cursor] = {}
        requeued = []
        while self._queued and len(batch) < self._policy.streams:
            cursor = self._queued.popleft()
            if not cursor.buffers or cursor.paused:
                cursor.watched = False
            elif cursor.key in batch:
                requeued.append(cursor)
            elif self._by_slot and batch and slot_of(cursor.key) != slot_of(next(iter(batch))):
                requeued.append(cursor)
                break
            else:
                batch[cursor.key] = cursor
        self._queued.extendleft(reversed(requeued))
        if not batch:
            return
        worker.batch = list(batch.values())
        self._blocked += len(batch)
        block: tuple[Arg, ...] = () if self._policy.block_ms is None else ("BLOCK", self._policy.block_ms)
        ids = [cursor.last for cursor in worker.batch]
        command = ("XREAD", "COUNT", 1, *block, "STREAMS", *batch, *ids)
        worker.connection.request([command], lambda replies: self.on_reply(worker, replies[0]))


class _Worker:
    """One connection, and the batch of cursors it is blocked on."""

    def __init__(self, pool: BlockingPool, number: int) -> None:
        self.batch: list[Cursor] = []
        broken = Unavailable("the connection broke")
        events = ConnectionEvents(on_up=lambda: None, on_down=lambda _: pool.on_reply(self, broken))
        self.connection = pool.connect_worker(events, f"worker {number}")
