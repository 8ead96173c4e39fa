"""Rate limiter: limits how many entries of a handler are read a second, by all its workers together."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from millstream.clock import Clock
from millstream.delivery.commit_store import reservation_size
from millstream.delivery.rate_override import RateOverride
from millstream.delivery.reliable_stream import ReliableStream

_NO_LIMIT = 1_000_000


class ReadQuota(msgspec.Struct, frozen=True):
    """Up to `counts` entries of each stream in it may be read now; another stream may be due in `until_ms`."""

    counts: dict[str, int]
    until_ms: float


class RateLimiter:
    """Limits what one worker reads of each stream; `rate` is that in code, in entries a second, None for no limit.

    The rate that an operator has set on a stream holds in its place. A reservation at an earlier rate is dropped.
    It reserves entries before it reads them, at most about a fifth of a second's worth (at least one), and keeps an
    unused reservation. So after an idle time each worker may start with that many. Used by one thread.
    `joined`: the streams that the worker has joined.
    """

    def __init__(self, rate: float | None, clock: Clock, joined: Mapping[str, ReliableStream]) -> None:
        self._rate = rate
        self._clock = clock
        self._joined = joined
        self._reserved: dict[str, int] = defaultdict(int)
        self._read: dict[str, int] = defaultdict(int)
        """Entries that were read at the rate that holds now."""
        self._due_ms: dict[str, float] = {}
        self._last_due_ms = float("-inf")
        self._overrides: dict[str, RateOverride] = {}

    def acquire(self, streams: Sequence[ReliableStream]) -> ReadQuota:
        """Return a quota for those of `streams` that may be read now. Raises RedisError."""
        if self._rate is None and not self._overrides and all(one.rate_override is None for one in streams):
            return ReadQuota(dict.fromkeys((one.stream for one in streams), _NO_LIMIT), float("inf"))
        if len(self._reserved) > len(self._joined):
            for name in [one for one in self._reserved if one not in self._joined]:
                self._forget(name)
        for stream in streams:
            self._follow(stream)
            while not self._reserved[stream.stream]:
                self._reserve(stream)
        waits_ms = {one.stream: self._due_ms[one.stream] - self._clock.monotonic_ms() for one in streams}
        return ReadQuota(
            {name: self._reserved[name] for name, wait_ms in waits_ms.items() if wait_ms <= 0},
            min((wait_ms for wait_ms in waits_ms.values() if wait_ms > 0), default=float("inf")),
        )

    @property
    def is_waiting(self) -> bool:
        """True while a stream that was passed to `acquire` may not be read yet."""
        return self._last_due_ms > self._clock.monotonic_ms()

    @property
    def is_active(self) -> bool:
        """True if a stream may have a rate."""
        return self._rate is not None or bool(self._overrides)

    def consume(self, stream: str, count: int) -> None:
        """Note that `count` entries of a stream were read."""
        if self.is_active:
            self._reserved[stream] -= count
            self._read[stream] += count

    def give_back(self, stream: str, count: int) -> None:
        """Note that `count` entries of a stream went back before they had begun: their next read counts them.

        Only those count that were read at the rate that holds now, and no more are kept than one reservation has.
        """
        if stream in self._due_ms and (rate := self._rate_of(stream)) is not None:
            room = max(0, reservation_size(rate) - self._reserved[stream])
            back = min(count, self._read[stream], room)
            self._reserved[stream] += back
            self._read[stream] -= back

    def _follow(self, stream: ReliableStream) -> None:
        """Drop what was reserved at another rate than the one that is known to hold now."""
        name, override = stream.stream, stream.rate_override
        if override == self._overrides.get(name):
            return
        self._forget(name)
        if override is not None:
            self._overrides[name] = override

    def _forget(self, name: str) -> None:
        for known in (self._overrides, self._reserved, self._read, self._due_ms):
            known.pop(name, None)
        self._last_due_ms = max(self._due_ms.values(), default=float("-inf"))

    def _rate_of(self, name: str) -> float | None:
        override = self._overrides.get(name)
        return self._rate if override is None else override.rate

    def _reserve(self, stream: ReliableStream) -> None:
        """Reserve the next entries of a stream; nothing if the rate has changed."""
        name = stream.stream
        override, rate = self._overrides.get(name), self._rate_of(name)
        if rate is None:
            self._reserved[name], self._due_ms[name] = _NO_LIMIT, float("-inf")
            return
        count = reservation_size(rate)
        wait_ms = stream.reserve_rate(rate, count, override)
        if wait_ms is None:
            self._follow(stream)
            return
        self._due_ms[name] = self._clock.monotonic_ms() + wait_ms
        self._last_due_ms = max(self._last_due_ms, self._due_ms[name])
        self._reserved[name] = count
