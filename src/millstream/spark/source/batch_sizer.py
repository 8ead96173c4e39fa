"""BatchSizer: chooses how many entries a batch may have, so that it takes about as long as wanted."""

from millstream.clock import Clock

_FIRST, _FEWEST = 1_000, 100
_MAX_CHANGE = 4


class BatchSizer:
    """Chooses the size of each batch by how long the last one took, for targetBatchDuration.

    The first batch is small, so that results come soon, and each is at most four times as large as the one before. Up to
    `target_ms` of the first batch count as the start of the query, in which Spark starts Python and compiles the plan. The
    time of a batch is that between its plan and the next call of `max_entries`: a query that waits for its trigger in
    between counts that wait, too. Used by one thread.

    `target_ms`: how long a batch should take, in milliseconds
    """

    def __init__(self, target_ms: float, *, clock: Clock) -> None:
        self._target_ms = target_ms
        self._clock = clock
        self._size = _FIRST
        self._start_ms = target_ms
        self._planned: tuple[int, float] | None = None

    def max_entries(self, maximum: int) -> int:
        """Return the most entries of the next batch, at most `maximum`. Ends the time of the last one."""
        if self._planned is not None:
            self._resize(*self._planned)
            self._planned = None
        self._size = min(self._size, maximum)
        return self._size

    def on_planned(self, count: int | None) -> None:
        """Record that a batch of `count` entries begins now; None = an unknown number, which changes no size."""
        self._planned = (count, self._clock.monotonic_ms()) if count else None

    def _resize(self, count: int, began_ms: float) -> None:
        took_ms = max(1.0, self._clock.monotonic_ms() - began_ms - self._start_ms)
        self._start_ms = 0.0
        wanted = round(count * self._target_ms / took_ms)
        is_full = count >= self._size // 2
        if is_full or took_ms > self._target_ms:  # a small batch shows only whether it took too long
            wanted = max(wanted, self._size // _MAX_CHANGE, _FEWEST)
            self._size = min(wanted, self._size * _MAX_CHANGE)
