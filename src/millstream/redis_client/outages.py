"""Outages: the outages of Redis that callers of one client wait for, each in the log once, however many threads wait."""

import logging
import threading

import msgspec

from millstream.clock import Clock
from millstream.errors import UNREACHABLE_HINT, Unavailable

logger = logging.getLogger(__name__)

_LOG_EVERY_MS = 5_000.0


class _Outage(msgspec.Struct):
    """What one name waits for: since when, in how many threads, and how long it will have waited at its next line."""

    began_ms: float
    waiting: int = 0
    next_log_ms: float = 0.0
    is_answered: bool = False
    """Whether any of its threads has had its answer."""


class Outages:
    """Logs the start of the outage of each name, its duration every five seconds, and its end.

    An outage ends when the last thread that waits under its name goes on: a thread may have its answer from one node of a
    cluster while another thread still waits for a second node. If the last thread gives up, no end is logged: Redis is
    still unavailable, as far as it knows. Threads may share an `Outages`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}

    def __contains__(self, what: str) -> bool:
        return what in self._outages

    def begin(self, what: str, began_ms: float) -> None:
        """Note that one more thread waits, since then."""
        with self._lock:
            self._outages.setdefault(what, _Outage(began_ms)).waiting += 1

    def log(self, what: str, error: Unavailable) -> None:
        """Log that `what` waits, if that is due."""
        with self._lock:
            outage = self._outages[what]
            waited_ms = self._clock.monotonic_ms() - outage.began_ms
            is_first, is_due = not outage.next_log_ms, waited_ms >= outage.next_log_ms
            if is_due:
                outage.next_log_ms = waited_ms + _LOG_EVERY_MS
        if is_due:
            hint = UNREACHABLE_HINT if error.unreachable and is_first else ""
            logger.warning("Redis is unavailable: %s%s; %s waits, %.0f s so far", error, hint, what, waited_ms / 1000)

    def end(self, what: str, *, is_answered: bool, gives_up: bool) -> None:
        """Note that one of the threads goes on: with its answer, or as it gives up or has failed in another way."""
        with self._lock:
            outage = self._outages[what]
            outage.waiting -= 1
            outage.is_answered |= is_answered
            if outage.waiting:
                return
            del self._outages[what]
        if outage.is_answered and not gives_up:
            waited_ms = self._clock.monotonic_ms() - outage.began_ms
            logger.warning("%s resumes: Redis is available again after %.1f s", what, waited_ms / 1000)
