"""StreamNames: the names of all streams, scanned once for all prefixes and all viewers of the list."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.services.console.live_reads import LIVE_MS

MOST_NAMES = 300_000
_MOST_CHARS = 30_000_000
_MOST_SCAN_MS = 10_000.0
_PAGE_EVERY_MS = 100.0
_USABLE_MS = 60_000.0
_WAIT_MS = 1_000.0
_BRIEF_WAIT_MS = 50.0
_TIMEOUT_MS = 10_000


@dataclass(frozen=True, kw_only=True)
class NamesFound:
    """Names that begin with a prefix, sorted, as of `age_ms` milliseconds ago. `is_partial`: the scan goes on."""

    names: Sequence[str]
    age_ms: float
    is_partial: bool


class StreamNames:
    """The names of all streams of one Redis but those of millstream itself. May be used by any thread.

    One scan finds the names for all prefixes. Its names count as new for `keep_ms` milliseconds, or longer: so long that
    scans take at most ten commands a second on average. The first request after that starts the next scan, in a thread
    with a client of its own, and gets the older names if the scan takes longer than some milliseconds and they are not
    too old: a minute, or twice the time for which they count as new. Without such names a request waits `wait_ms`
    milliseconds for the scan, and gets the names found so far.
    """

    def __init__(
        self,
        url: str,
        *,
        keep_ms: float = LIVE_MS,
        wait_ms: float = _WAIT_MS,
        most: int = MOST_NAMES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._url = url
        self._keep_ms = keep_ms
        self._wait_ms = wait_ms
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._known: _Scan | None = None
        self._running: _Scan | None = None

    def find(self, prefix: str) -> NamesFound | None:
        """The names that begin with `prefix`; None if there are too many streams, or keys, to keep all names.

        Raises RedisError if a scan has failed.
        """
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            known, running = self._known, self._running
            if known is not None and now_ms - known.began_ms >= max(_USABLE_MS, 2 * known.keep_ms):
                known = None
            if running is None and (known is None or now_ms - known.began_ms >= known.keep_ms):
                running = _Scan(self._most, self._keep_ms, self._clock)
                threading.Thread(target=self._scan, args=(running,), name="millstream-names", daemon=True).start()
                self._running = running  # not before: a thread that cannot start would leave it here for ever
        if running is None:
            assert known is not None
            scan = known
        else:
            has_ended = running.ended.wait((self._wait_ms if known is None else _BRIEF_WAIT_MS) / 1_000)
            scan = running if has_ended or known is None else known
        if scan.error is not None:
            raise scan.error
        return scan.find(prefix)

    def _scan(self, scan: "_Scan") -> None:
        try:
            with Client(self._url, timeout_ms=_TIMEOUT_MS) as client:
                scan.run(client)
        except RedisError as error:
            scan.error = error
        finally:
            with self._lock:
                self._running = None
                if scan.error is None:
                    self._known = scan
            scan.ended.set()


class _Scan:
    """One scan of the names, and what it has found.

    * `began_ms`: of the monotonic clock; `keep_ms`: for how long after that its names count as new
    * `error`: what has ended it
    """

    def __init__(self, most: int, keep_ms: float, clock: Clock) -> None:
        self.began_ms = clock.monotonic_ms()
        self.keep_ms = keep_ms
        self.ended = threading.Event()
        self.error: RedisError | None = None
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._is_sorted = False
        self._is_too_much = False

    def run(self, client: Client) -> None:
        """Read all names. Raises RedisError."""
        chars = 0
        for number, page in enumerate(client.scan_pages("*"), 1):
            chars += sum(map(len, page))
            self.keep_ms = max(self.keep_ms, number * _PAGE_EVERY_MS)
            with self._lock:
                self._names += page
            is_late = self._clock.monotonic_ms() - self.began_ms > _MOST_SCAN_MS
            if is_late or len(self._names) > self._most or chars > _MOST_CHARS:
                with self._lock:
                    self._names, self._is_too_much = [], True
                return
        names = [name for name, _ in groupby(sorted(self._names))]
        with self._lock:
            self._names, self._is_sorted = names, True

    def find(self, prefix: str) -> NamesFound | None:
        """The names that begin with `prefix`, as far as they are read; None if there are too many."""
        with self._lock:
            if self._is_too_much:
                return None
            names, is_partial = self._names, not self._is_sorted
            if is_partial:
                names = sorted({one for one in names if one.startswith(prefix)})
        first = bisect_left(names, prefix)
        last = bisect_right(names, prefix, first, key=lambda one: one[: len(prefix)])
        age_ms = self._clock.monotonic_ms() - self.began_ms
        return NamesFound(names=names[first:last], age_ms=age_ms, is_partial=is_partial)
