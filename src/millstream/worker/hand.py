"""What a worker has in hand: taken from the group, not settled yet."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from millstream.lifecycle import Outcome
from millstream.reliable import Delivery
from millstream.worker.policy import WorkerPolicy

_PATIENCE_MS = 1_000.0

Ran = tuple[Sequence[Delivery], Outcome]
"""Entries that were run, and what became of them; several only if they have outputs in common."""


class Hand:
    """Entries between being read and being settled. Shared by the threads of one reading loop.

    `buffer` are those that wait to be run, in order; `outbox` those that were run; `nudge` is called when some are put
    into the buffer. How many are taken ahead follows
    the handler: more when it runs out of them, fewer when they wait for longer than a second, so that a slow worker does
    not hoard what others could do (as TCP finds its window).
    """

    def __init__(self, policy: WorkerPolicy, at_once: int) -> None:
        self.buffer: SimpleQueue[Delivery | None] = SimpleQueue()
        self.outbox: SimpleQueue[Ran | None] = SimpleQueue()
        self.freed = threading.Event()
        self.nudge: Callable[[], None] = lambda: None
        self._held: dict[tuple[str, bytes], Delivery] = {}
        self._most = policy.prefetch
        self._least = min(2 * at_once, policy.prefetch)
        self._limit = self._least
        self._backlog = False

    def __contains__(self, delivery: Delivery) -> bool:
        return self._held.get(delivery.place) is delivery

    def __len__(self) -> int:
        return len(self._held)

    @property
    def deliveries(self) -> list[Delivery]:
        """All of them, oldest first."""
        return list(self._held.values())

    def ids(self, stream: str) -> set[bytes]:
        """The ids of one stream's."""
        return {entry_id for name, entry_id in list(self._held) if name == stream}

    def room(self) -> int:
        """How many more may be taken now; 0 as well if so few that reading them is not worth it yet."""
        starved = self.buffer.empty()
        if starved and self._backlog:
            self._limit = min(2 * self._limit, self._most)
        room = self._limit - len(self._held)
        return room if starved or 2 * room >= self._limit else 0

    def waited(self, wait_ms: float) -> None:
        """Note how long an entry has waited in the buffer."""
        if wait_ms > _PATIENCE_MS:
            self._limit = max(self._limit // 2, self._least)

    def found(self, count: int, asked: int) -> None:
        """Note that a read gave `count` of at most `asked` entries."""
        self._backlog = count >= asked

    def take(self, deliveries: Iterable[Delivery], now_ms: float) -> None:
        """Put entries into the buffer, where they wait from now on."""
        for delivery in deliveries:
            delivery.since_ms = now_ms
            self._held[delivery.place] = delivery
            self.buffer.put(delivery)
        self.nudge()

    def keep(self, delivery: Delivery) -> None:
        """Hold an entry that does not go through the buffer."""
        self._held[delivery.place] = delivery

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Let go of entries that are settled, or lost to another worker."""
        for delivery in deliveries:
            self._held.pop(delivery.place, None)
        self.freed.set()

    def empty_buffer(self) -> None:
        """Let nothing that waits be run any more. It stays in hand."""
        with contextlib.suppress(Empty):
            while True:
                self.buffer.get_nowait()
