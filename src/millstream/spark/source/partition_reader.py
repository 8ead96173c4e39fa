"""PartitionReader: reads offset ranges in a Spark task, as raw XRANGE replies, one round trip ahead of the row decoder.

A round trip requests a bounded number of entries and, by the sizes seen so far, of bytes. The reply is bounded as well:
larger entries may follow small ones.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from millstream.errors import Unavailable
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.gc_pause import gc_paused
from millstream.redis_client.resp import Command, PackedCommands, Reply, ReplySize
from millstream.spark.source.data_loss import report_loss
from millstream.spark.source.entry_runs import Run, StreamEntries
from millstream.spark.source.entry_segment import last_id
from millstream.spark.source.offset_ranges import OffsetRange
from millstream.spark.source.planned_ranges import PlannedRanges, SmallRanges
from millstream.spark.source.replica_reads import ReplicaReads, Replicas
from millstream.spark.source.reply_segments import ReceiveBuffer, ReplySegments
from millstream.spark.source.small_replies import SmallReplies
from millstream.spark.source.stream_info import StreamInfo, fetch, fetch_calls

T = TypeVar("T")

_GROWTH_FACTOR = 8
_MAX_TRIP_ENTRIES = 2_000
_TRIP_BYTES, _MAX_TRIP_BYTES = 4 << 20, 16 << 20
"""The target size of a round trip's reply, and its maximum, which only a single entry may exceed."""
_BATCH_ROWS = 10_000
_BATCH_BYTES = 16 << 20
_GUESS_MARGIN, _MARGIN_SHARE = 200, 8
_MIN_SEGMENT_ENTRIES, _MIN_REPLY_ENTRIES, _MAX_SEGMENT_ENTRY_BYTES = 500, 40, 2_000
"""A round trip with fewer entries, of which a reply has fewer, or with larger ones, is parsed by hiredis, which is as
fast there."""


@dataclass(slots=True)
class _UnreadRange:
    """One offset range, and the id up to which it has been read."""

    offset_range: OffsetRange
    start: bytes
    end: bytes
    read_count: int = 0

    @property
    def remaining(self) -> int:
        """Estimate of the entries left, rather too high: each shortfall costs a round trip."""
        margin = 1 if self.offset_range.rows is not None else max(_GUESS_MARGIN, self.read_count // _MARGIN_SHARE)
        return max(self.offset_range.size - self.read_count, margin)

    def must_finish_before(self, other: "_UnreadRange") -> bool:
        """True if this range may need another round trip, and `other` is a later range of the same stream."""
        return self.offset_range.rows is None and self.offset_range.stream == other.offset_range.stream


_Requests = list[tuple[_UnreadRange, int]]
"""Ranges, and the COUNT of each."""


class Fetched(NamedTuple):
    """The reply of one round trip; `size` in bytes on the wire."""

    runs: list[Run]
    rows: int
    size: int


class PartitionReader:
    """Reads all entries of `ranges`, in stream order within one range. Takes each range when it is to be read.

    `limit_ms` bounds the wait for an unavailable Redis; None waits for ever. Raises DataLoss for entries that were lost
    after planning, or logs their number unless `fail_on_data_loss`. Reads entries from `replicas`, if given, and
    everything else from primaries. `as_segments`: whether `make` profits from entries that are `RawEntries`.
    """

    def __init__(
        self,
        client: Client,
        ranges: Iterable[OffsetRange],
        *,
        limit_ms: float | None,
        fail_on_data_loss: bool,
        replicas: Replicas | None = None,
        as_segments: bool = True,
    ) -> None:
        self._client = client
        self._fetch_entries = partial(fetch_calls, client) if replicas is None else ReplicaReads(replicas).fetch
        self._limit_ms = limit_ms
        self._fail_on_data_loss = fail_on_data_loss
        self._ranges = iter(ranges)
        # On a cluster the replies come server by server.
        self._planned_ranges = ranges if isinstance(ranges, PlannedRanges) and not client.is_cluster else None
        self._unread_ranges: deque[_UnreadRange] = deque()
        self._trip_entries = 1  # the size of entries is not known yet
        self._entry_bytes = 1
        self._reads_segments = as_segments and replicas is None
        self._buffer = ReceiveBuffer()

    def batches(self, make: Callable[[list[Run]], T]) -> Iterator[T]:
        """Yield a record batch, built by `make`, for about every 10,000 rows or 16 MB."""
        runs: list[Run] = []
        rows = size = 0
        with gc_paused(), ThreadPoolExecutor(1, "millstream-read") as prefetch:
            trip = prefetch.submit(self._round_trip)
            while (fetched := trip.result()) is not None:
                trip = prefetch.submit(self._round_trip)
                runs += fetched.runs
                rows += fetched.rows
                size += fetched.size
                if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
                    yield make(runs)
                    runs, rows, size = [], 0, 0
            if rows:
                yield make(runs)

    def _round_trip(self) -> Fetched | None:
        """Fetch the next entries in one round trip; None at the end."""
        requests, replies, meter = self._fetch(self._next_requests, _commands_of)
        if not requests:
            return None
        if isinstance(requests, SmallRanges):
            return self._accept_small(requests, replies, meter)
        for _ in requests:
            self._unread_ranges.popleft()
        return self._accept_all(requests, replies, meter.total_bytes)

    def _next_requests(self) -> _Requests | SmallRanges:
        """Choose many small ranges, which may be read as one run, or else others one by one."""
        may_join = self._reads_segments and self._entry_bytes <= _MAX_SEGMENT_ENTRY_BYTES and not self._unread_ranges
        if self._planned_ranges is not None and may_join:
            small = self._planned_ranges.small(least=_MIN_SEGMENT_ENTRIES, most=self._trip_entries)
            if small is not None:
                return small
        return self._next_ranges()

    def _accept_small(self, ranges: SmallRanges, replies: list[Reply], meter: ReplySize) -> Fetched:
        """Accept the replies as one run if all ranges are whole, else range by range."""
        assert self._planned_ranges is not None
        if isinstance(meter, SmallReplies) and not meter.has_misfit:
            if ranges.are_whole_in(meter):
                self._planned_ranges.skip(len(ranges))
                return self._resize([(ranges.streams, meter.entries)], meter.total_bytes)
            replies = list(meter.split())
        ranges_read = islice(self._planned_ranges, len(ranges))
        requests = [
            (_unread(one), count) for one, count in zip(ranges_read, ranges.streams.counts.tolist(), strict=True)
        ]
        return self._accept_all(requests, replies, meter.total_bytes)

    def _next_ranges(self) -> _Requests:
        """Choose the ranges of the next round trip, and the COUNT of each."""
        requests: _Requests = []
        budget = self._trip_entries
        readers = self._in_order()
        while budget > 0 and (reader := next(readers, None)) is not None:
            if requests and requests[-1][0].must_finish_before(reader):
                break
            requests.append((reader, min(reader.remaining, self._trip_entries)))
            budget -= requests[-1][1]
        return requests

    def _in_order(self) -> Iterator[_UnreadRange]:
        """The ranges that are not read to their end. One that is taken is among `_unread_ranges` from then on."""
        yield from self._unread_ranges
        for one in self._ranges:
            reader = _unread(one)
            self._unread_ranges.append(reader)
            yield reader

    def _fetch(
        self, choose: Callable[[], T], commands_of: Callable[[T], Sequence[Command]]
    ) -> tuple[T, list[Reply], ReplySize]:
        """Fetch what `choose` returns; return it with the replies and what has read them. Retries with fewer entries if
        the reply is too large.

        The size is not known before the reply arrives. If a reply exceeds the maximum, the reader closes the connection
        and requests fewer entries, finally a single one of any size. It does the same if the connection breaks for
        another reason: Redis closes one whose replies exceed client-output-buffer-limit.
        """

        def attempt() -> tuple[T, list[Reply], ReplySize]:
            while True:
                chosen = choose()
                commands = commands_of(chosen)
                meter = self._meter(commands)
                try:
                    replies = self._fetch_entries(commands, meter)
                except Unavailable:
                    self._trip_entries = max(1, self._trip_entries // _GROWTH_FACTOR)
                    if not meter.exceeded:
                        raise
                else:
                    if isinstance(meter, ReplySegments) and meter.has_misfit:
                        self._reads_segments = False
                    return chosen, replies, meter

        return self._with_retry(attempt)

    def _meter(self, commands: Sequence[Command]) -> ReplySize:
        """Return what reads the replies to `commands`, up to the maximum size of a round trip."""
        most = _MAX_TRIP_BYTES if self._trip_entries > 1 else float("inf")
        if isinstance(commands, PackedCommands):
            return SmallReplies(most, self._buffer, self._entry_bytes * self._trip_entries)
        are_many = self._trip_entries >= max(_MIN_SEGMENT_ENTRIES, _MIN_REPLY_ENTRIES * len(commands))
        if self._reads_segments and are_many and self._entry_bytes <= _MAX_SEGMENT_ENTRY_BYTES:
            return ReplySegments(most, self._buffer)
        return ReplySize(most)

    def _with_retry(self, ask_for: Callable[[], T]) -> T:
        return self._client.retry_while_unavailable(ask_for, what="reading streams", limit_ms=self._limit_ms)

    def _accept_all(self, requests: _Requests, replies: list[Reply], size: int) -> Fetched:
        runs = [self._accept(reader, count, reply) for (reader, count), reply in zip(requests, replies, strict=True)]
        return self._resize([run for run in runs if run[1]], size)

    def _accept(self, reader: _UnreadRange, count: int, reply: Reply) -> StreamEntries:
        entries = raise_if_error(reply)
        found = len(entries)
        reader.read_count += found
        if found == count and (last := last_id(entries)) != reader.end:
            reader.start = b"(" + last
            self._unread_ranges.appendleft(reader)
        elif reader.read_count != reader.offset_range.rows:
            self._check_complete(reader)
        return reader.offset_range.stream, entries

    def _resize(self, runs: list[Run], size: int) -> Fetched:
        """Set the number of entries of the next round trip by the sizes in this one."""
        rows = sum(len(some) for _, some in runs)
        if rows:
            self._entry_bytes = size // rows + 1
        limit = min(_MAX_TRIP_ENTRIES, self._trip_entries * _GROWTH_FACTOR, _TRIP_BYTES // self._entry_bytes)
        self._trip_entries = max(limit, 1)
        return Fetched(runs, rows, size)

    def _check_complete(self, reader: _UnreadRange) -> None:
        """Report entries that were removed while the task read them; the planner reports those removed earlier."""
        offset_range = reader.offset_range
        if offset_range.rows is not None:
            missing = f"{offset_range.rows - reader.read_count:,}" if reader.read_count < offset_range.rows else ""
        else:
            missing = "an unknown number of" if offset_range.untouched else ""
        if not missing:
            return
        infos = self._with_retry(lambda: fetch(self._client, [offset_range.stream]))
        info = infos[offset_range.stream]
        if info is not None and (info.is_whole_after(offset_range.after) or _is_whole(offset_range, info)):
            return  # no entry was trimmed; single entries deleted by XDEL are no loss
        text = (
            f"stream {offset_range.stream!r} lost {missing} entries between {offset_range.after} and "
            f"{offset_range.until} while they were being read: they were trimmed or deleted"
        )
        report_loss(text, fail=self._fail_on_data_loss)


def _unread(one: OffsetRange) -> _UnreadRange:
    return _UnreadRange(one, b"(%d-%d" % one.after, b"%d-%d" % one.until)


def _commands_of(requests: _Requests | SmallRanges) -> Sequence[Command]:
    if isinstance(requests, SmallRanges):
        return requests.commands
    return [
        ("XRANGE", reader.offset_range.stream, reader.start, reader.end, "COUNT", count) for reader, count in requests
    ]


def _is_whole(offset_range: OffsetRange, info: StreamInfo) -> bool:
    """True if a stream that had never lost an entry still has not; a recreated one begins later."""
    return offset_range.untouched and not info.entries_removed and info.first_id.ms <= offset_range.after.ms + 1
