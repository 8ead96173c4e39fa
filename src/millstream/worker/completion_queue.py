"""Completion queue: carries the outcomes of runs from the runners to the committer."""

from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import Outcome

FinishedRun = tuple[Sequence[Delivery], Outcome]
"""Entries that were run, and their outcome; several entries only if they share outputs, or are a list of one key."""

LINGER_S = 0.005
"""How long an outcome that is not urgent may wait for others to be committed with it, in seconds."""


class CompletionQueue:
    """Any number of threads put outcomes, one collects them; the outcomes of one thread stay in order.

    Waking the committer and calling Redis for each message would cost more than most handlers do. So an outcome that is
    not urgent waits for others, for `linger_s` seconds at most, and not at all if the queue was idle.
    """

    def __init__(self, batch: int, *, linger_s: float = LINGER_S) -> None:
        self._finished: deque[FinishedRun] = deque()
        self._notifications: SimpleQueue[None] = SimpleQueue()
        self._batch = batch
        self._linger_s = linger_s
        self._is_idle = self._is_notified = self._is_closed = False

    def __len__(self) -> int:
        return len(self._finished)

    @property
    def has_batch(self) -> bool:
        """True if as many outcomes wait as `collect` returns at most."""
        return len(self._finished) >= self._batch

    # A putting thread adds, then checks whether it must notify. The collector notes that it is idle or awake, then
    # checks for entries. So at least one of the two sees the other, without a lock.

    def put(self, run: FinishedRun, *, urgent: bool = True) -> None:
        """Add the outcome of a run. `urgent`: something waits for its commit."""
        self._finished.append(run)
        if (urgent or self._is_idle or len(self._finished) >= self._batch) and not self._is_notified:
            self._notify()

    def close(self) -> None:
        """Close the queue: nothing more will be put."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        self._is_notified = True
        self._notifications.put(None)

    def collect(self, timeout_s: float | None) -> tuple[list[FinishedRun], bool]:
        """Wait for `timeout_s` at most; return up to `batch` outcomes, and whether the queue is closed and empty."""
        linger_s = self._linger_s if timeout_s is None else min(timeout_s, self._linger_s)
        if not self.has_batch and not self._await_notification(linger_s):
            self._is_idle = True
            if not self._finished:
                self._await_notification(timeout_s)
            self._is_idle = False
        ended = self._is_closed
        collected = [self._finished.popleft() for _ in range(min(len(self._finished), self._batch))]
        return collected, ended and not self._finished

    def _await_notification(self, timeout_s: float | None) -> bool:
        """Wait for a notification; True if there was one before the timeout."""
        try:
            self._notifications.get(timeout=timeout_s)
        except Empty:
            return False
        self._is_notified = False
        return True
