"""Reads pieces of streams in a Spark task: raw XRANGE replies, fetched one round trip ahead of the rows being made.

What is asked for at once is bounded in entries and, by the sizes seen so far, in bytes. What comes is bounded as well: larger
entries may follow small ones.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from millstream.errors import Unavailable
from millstream.redis_client.client import Client, Command, Reply, raise_if_error
from millstream.redis_client.resp import ReplySize
from millstream.spark.source.data_loss import lose
from millstream.spark.source.gc_pause import gc_paused
from millstream.spark.source.offset_ranges import OffsetRange
from millstream.spark.source.replica_reads import ReplicaReads, Replicas
from millstream.spark.source.row_decoder import Run
from millstream.spark.source.stream_info import StreamInfo, fetch, fetch_calls

T = TypeVar("T")

_GROWTH = 8
_MOST_TRIP_ENTRIES = 2_000
_TRIP_BYTES, _MOST_TRIP_BYTES = 4 << 20, 16 << 20
"""What a trip is meant to bring, and what it may bring at most, but for a single entry."""
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16 << 20
_GUESS_MARGIN = 200


@dataclass(slots=True)
class _Reader:
    """How far one piece has been read."""

    piece: OffsetRange
    after: bytes
    until: bytes
    read: int = 0

    @classmethod
    def of(cls, piece: OffsetRange) -> "_Reader":
        return cls(piece, b"(%d-%d" % piece.after, b"%d-%d" % piece.until)

    @property
    def left(self) -> int:
        """About how many entries are still to come, and not too few: each shortfall costs a round trip."""
        return max(self.piece.size - self.read, 1 if self.piece.rows is not None else _GUESS_MARGIN)

    def may_hold_more_before(self, other: "_Reader") -> bool:
        """True if it may take more than one trip, and `other` has the entries of its stream that come after."""
        return self.piece.stream == other.piece.stream and self.piece.rows is None


class Fetched(NamedTuple):
    """What one round trip brought; `size` in bytes, as they came."""

    runs: list[Run]
    rows: int
    size: int


class PartitionReader:
    """Reads all entries of `pieces`: in stream order within one piece.

    `limit_ms` bounds the wait for a Redis that is away; None waits for ever. Entries that should be there and are
    not raise DataLoss, or are counted in the log unless `fail_on_data_loss`. Entries are asked of `replicas`, if any are
    given, and all else of the primaries.
    """

    def __init__(
        self, client: Client, pieces: Sequence[OffsetRange], *, limit_ms: float | None, fail_on_data_loss: bool,
        replicas: Replicas | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self._ask = partial(fetch_calls, client) if replicas is None else ReplicaReads(replicas).ask
        self._limit_ms = limit_ms
        self._fail_on_data_loss = fail_on_data_loss
        self._waiting = deque(_Reader.of(piece) for piece in pieces)
        self._trip_entries = 1  # nothing is known of the entries' size yet
        self._entry_bytes = 1

    def batches(self, make: Callable[[list[Run]], T]) -> Iterator[T]:
        """Yield what `make` makes of each 10,000 rows or so, or 16 MB: a record batch."""
        runs: list[Run] = []
        rows = size = 0
        with gc_paused(), ThreadPoolExecutor(1, "millstream-read") as ahead:
            trip = ahead.submit(self._trip)
            while (fetched := trip.result()) is not None:
                trip = ahead.submit(self._trip)
                runs += fetched.runs
                rows += fetched.rows
                size += fetched.size
                if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
                    yield make(runs)
                    runs, rows, size = [], 0, 0
            if rows:
                yield make(runs)

    def _trip(self) -> Fetched | None:
        """Fetch some more entries in one round trip; None when there are none left."""
        if not self._waiting:
            return None
        asked, replies, size = self._fetch(self._next, lambda one: [self._command(*one)])
        for _ in asked:
            self._waiting.popleft()
        runs = [
            run
            for (reader, count), reply in zip(asked, replies, strict=True)
            if (run := self._take(reader, count, reply))[1]
        ]
        return self._weighed(runs, size)

    def _next(self) -> list[tuple[_Reader, int]]:
        """The first of those that wait, and how many entries of each are to be asked for."""
        asked: list[tuple[_Reader, int]] = []
        budget = self._trip_entries
        for reader in self._waiting:
            if budget <= 0 or (asked and asked[-1][0].may_hold_more_before(reader)):
                break
            asked.append((reader, min(reader.left, self._trip_entries)))
            budget -= asked[-1][1]
        return asked

    @staticmethod
    def _command(reader: _Reader, count: int) -> Command:
        return ("XRANGE", reader.piece.stream, reader.after, reader.until, "COUNT", count)

    def _fetch(
        self, choose: Callable[[], list[T]], commands_of: Callable[[T], list[Command]]
    ) -> tuple[list[T], list[Reply], int]:
        """What `choose` has chosen, the replies, and their size: of fewer entries, if they turn out to be too large.

        No size is known before it has come. What comes is counted, and where it is more than was bargained for, the
        connection is given up and less is asked for; at last one entry, however large. So it is where a connection breaks for
        another reason: Redis ends one whose replies outgrow its own limit (client-output-buffer-limit).
        """

        def attempt() -> tuple[list[T], list[Reply], int]:
            while True:
                meter = ReplySize(_MOST_TRIP_BYTES if self._trip_entries > 1 else float("inf"))
                chosen = choose()
                try:
                    replies = self._ask([command for one in chosen for command in commands_of(one)], meter)
                except Unavailable:
                    self._trip_entries = max(1, self._trip_entries // _GROWTH)
                    if not meter.exceeded:
                        raise
                else:
                    return chosen, replies, meter.taken

        return self._patiently(attempt)

    def _patiently(self, ask_for: Callable[[], T]) -> T:
        return self._client.patiently(ask_for, what="reading streams", limit_ms=self._limit_ms)

    def _take(self, reader: _Reader, count: int, reply: Reply) -> Run:
        entries = raise_if_error(reply)
        if entries:
            reader.read += len(entries)
            reader.after = b"(" + entries[-1][0]
        if len(entries) == count and entries[-1][0] != reader.until:
            self._waiting.appendleft(reader)
        else:
            self._check(reader)
        return reader.piece.stream, entries

    def _weighed(self, runs: list[Run], size: int) -> Fetched:
        """Learn from a trip how many entries the next one may ask for."""
        rows = sum(len(some) for _, some in runs)
        if rows:
            self._entry_bytes = size // rows + 1
        most = min(_MOST_TRIP_ENTRIES, self._trip_entries * _GROWTH, _TRIP_BYTES // self._entry_bytes)
        self._trip_entries = max(most, 1)
        return Fetched(runs, rows, size)

    def _check(self, reader: _Reader) -> None:
        """Report what was removed while it was being read; what was gone before is the planner's business."""
        piece = reader.piece
        if piece.rows is not None:
            missing = f"{piece.rows - reader.read:,}" if reader.read < piece.rows else ""
        else:
            missing = "an unknown number of" if piece.untouched else ""
        if not missing:
            return
        found = self._patiently(lambda: fetch(self._client, [piece.stream]))
        facts = found[piece.stream]
        if facts is not None and (facts.keeps(piece.after) or _is_whole(piece, facts)):
            return  # nothing was trimmed; single entries that are deleted (XDEL) are no loss
        text = (
            f"stream {piece.stream!r} lost {missing} entries between {piece.after} and {piece.until} while they were "
            "being read: they were trimmed or deleted"
        )
        lose(text, fail=self._fail_on_data_loss)


def _is_whole(piece: OffsetRange, facts: StreamInfo) -> bool:
    """True if a stream that had never lost an entry still has not; one that was made anew begins later."""
    return piece.untouched and not facts.removed and facts.first.ms <= piece.after.ms + 1
