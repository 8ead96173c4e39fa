"""What was run, on its way from the runners to the settler."""

from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import Outcome

Ran = tuple[Sequence[Delivery], Outcome]
"""Entries that were run, and what became of them; several only if they have outputs in common."""

LINGER_S = 0.005
"""How long what is not urgent may wait for more to be settled with."""


class CompletionQueue:
    """Any number of threads put into it, one collects; what one thread puts in stays in order.

    To wake a thread and to ask Redis for each message would cost more than most handlers do. So what is not urgent waits
    for more, though not for longer than `linger_s` seconds, and not at all if nothing was put in for a while.
    """

    def __init__(self, most: int, *, linger_s: float = LINGER_S) -> None:
        self._ran: deque[Ran] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._most = most
        self._linger_s = linger_s
        self._is_idle = self._woken = self._ended = False

    def __len__(self) -> int:
        return len(self._ran)

    # Whoever puts something in looks afterwards whether it must wake, and the collector looks whether something is there
    # after it has said that it sleeps, or is awake: so one of the two sees the other, without a lock.

    def put(self, ran: Ran, *, urgent: bool = True) -> None:
        """Add what was run. `urgent`: something waits for its being settled."""
        self._ran.append(ran)
        if (urgent or self._is_idle or len(self._ran) >= self._most) and not self._woken:
            self._wake()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._wakes.put(None)

    def collect(self, timeout_s: float | None) -> tuple[list[Ran], bool]:
        """Wait for `timeout_s` at most; return what is there, no more than `most`, and whether that was the end of it."""
        linger_s = self._linger_s if timeout_s is None else min(timeout_s, self._linger_s)
        if len(self._ran) < self._most and not self._waited(linger_s):
            self._is_idle = True
            if not self._ran:
                self._waited(timeout_s)
            self._is_idle = False
        ended = self._ended
        found: list[Ran] = []
        while self._ran and len(found) < self._most:
            found.append(self._ran.popleft())
        return found, ended and not self._ran

    def _waited(self, timeout_s: float | None) -> bool:
        """True if it was woken before."""
        try:
            self._wakes.get(timeout=timeout_s)
        except Empty:
            return False
        self._woken = False
        return True
