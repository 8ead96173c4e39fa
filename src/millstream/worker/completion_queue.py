"""Completion queue: carries the outcomes of runs from the runners to the committer."""

from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import Outcome

Ran = tuple[Sequence[Delivery], Outcome]
"""Entries that were run, and their outcome; several entries only if they share outputs."""

LINGER_S = 0.005
"""How long an outcome that is not urgent may wait for others to be committed with it, in seconds."""


class CompletionQueue:
    """Any number of threads put outcomes, one collects them; the outcomes of one thread stay in order.

    Waking the committer and calling Redis for each message would cost more than most handlers do. So an outcome that is
    not urgent waits for others, for `linger_s` seconds at most, and not at all if the queue was idle.
    """

    def __init__(self, batch: int, *, linger_s: float = LINGER_S) -> None:
        self._ran: deque[Ran] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._most = batch
        self._linger_s = linger_s
        self._is_idle = self._woken = self._ended = False

    def __len__(self) -> int:
        return len(self._ran)

    # A putting thread adds, then checks whether it must notify. The collector notes that it is idle or awake, then
    # checks for entries. So at least one of the two sees the other, without a lock.

    def put(self, run: Ran, *, urgent: bool = True) -> None:
        """Add the outcome of a run. `urgent`: something waits for its commit."""
        self._ran.append(run)
        if (urgent or self._is_idle or len(self._ran) >= self._most) and not self._woken:
            self._wake()

    def end(self) -> None:
        """Close the queue: nothing more will be put."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._wakes.put(None)

    def collect(self, timeout_s: float | None) -> tuple[list[Ran], bool]:
        """Wait for `timeout_s` at most; return up to `batch` outcomes, and whether the queue is closed and empty."""
        linger_s = self._linger_s if timeout_s is None else min(timeout_s, self._linger_s)
        if len(self._ran) < self._most and not self._waited(linger_s):
            self._is_idle = True
            if not self._ran:
                self._waited(timeout_s)
            self._is_idle = False
        ended = self._ended
        collected: list[Ran] = []
        while self._ran and len(collected) < self._most:
            collected.append(self._ran.popleft())
        return collected, ended and not self._ran

    def _waited(self, timeout_s: float | None) -> bool:
        """Wait for a notification; True if there was one before the timeout."""
        try:
            self._wakes.get(timeout=timeout_s)
        except Empty:
            return False
        self._woken = False
        return True
