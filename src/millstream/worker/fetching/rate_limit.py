"""Rate limiter: limits how many entries of a handler are read a second, by all its workers together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.clock import Clock
from millstream.delivery.commit_store import reservation_size
from millstream.delivery.reliable_stream import ReliableStream

_NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Permit:
    """Permit to read up to `count` entries of each of `streams` now; another stream may be due in `until_ms`."""

    streams: list[str]
    count: int
    until_ms: float


class RateLimiter:
    """Limits what one worker reads of each stream; `rate` is in entries a second, None for no limit.

    It reserves entries before it reads them, at most about a fifth of a second's worth (at least one), and keeps an
    unused reservation. So after an idle time each worker may start with that many. Used by one thread.
    """

    def __init__(self, rate: float | None, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._reserved: dict[str, int] = defaultdict(int)
        self._due_ms: dict[str, float] = {}
        self._last_due_ms = float("-inf")

    def acquire(self, streams: Sequence[ReliableStream]) -> Permit:
        """Return a permit for those of `streams` that may be read now. Raises RedisError."""
        if self._rate is None:
            return Permit([one.stream for one in streams], _NO_LIMIT, float("inf"))
        for stream in streams:
            if not self._reserved[stream.stream]:
                count = reservation_size(self._rate)
                wait_ms = stream.reserve_rate(self._rate, count)
                self._due_ms[stream.stream] = self._clock.monotonic_ms() + wait_ms
                self._last_due_ms = max(self._last_due_ms, self._due_ms[stream.stream])
                self._reserved[stream.stream] = count
        waits_ms = {one.stream: self._due_ms[one.stream] - self._clock.monotonic_ms() for one in streams}
        ready = [name for name, wait_ms in waits_ms.items() if wait_ms <= 0]
        return Permit(
            ready,
            min((self._reserved[name] for name in ready), default=0),
            min((wait_ms for wait_ms in waits_ms.values() if wait_ms > 0), default=float("inf")),
        )

    @property
    def is_waiting(self) -> bool:
        """True while a stream that was passed to `acquire` may not be read yet."""
        return self._last_due_ms > self._clock.monotonic_ms()

    def consume(self, stream: str, count: int) -> None:
        """Note that `count` entries of a stream were read."""
        if self._rate is not None:
            self._reserved[stream] -= count
