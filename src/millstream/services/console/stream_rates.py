"""StreamRates: how many entries a second each stream gets, by two reads of the console."""

import threading
from collections.abc import Mapping
from typing import NamedTuple

from millstream.clock import SYSTEM_CLOCK, Clock

_LEAST_MS, _MOST_MS = 2_000.0, 300_000.0
_MOST_STREAMS = 20_000


class _Read(NamedTuple):
    at_ms: float
    added: int
    rate: float | None


class StreamRates:
    """The rates of streams, by the reads of all viewers. May be used by any thread.

    A rate is that between two reads from 2 seconds to 5 minutes apart. A read that comes sooner keeps the rate of the one
    before. It keeps the reads of the 20,000 streams that were read last.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Read] = {}

    def update(self, added: Mapping[str, int]) -> dict[str, float | None]:
        """Entries a second of each of these streams; None if this is the first read. `added`: entries ever added, as just read."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            for name, count in added.items():
                last = self._known.pop(name, None)
                self._known[name] = _next_read(last, count, now_ms)  # behind those that were read before
            rates = {name: self._known[name].rate for name in added}
            while len(self._known) > _MOST_STREAMS:
                del self._known[next(iter(self._known))]
        return rates


def _next_read(last: _Read | None, added: int, now_ms: float) -> _Read:
    if last is None or added < last.added or now_ms - last.at_ms > _MOST_MS:  # less than before: another stream
        return _Read(now_ms, added, None)
    if now_ms - last.at_ms < _LEAST_MS:
        return last
    return _Read(now_ms, added, (added - last.added) * 1000 / (now_ms - last.at_ms))
