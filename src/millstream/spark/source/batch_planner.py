"""BatchPlanner: plans, on the driver, the end offsets of each batch and the offset ranges that each task reads.

Its decisions are in Spark's offsets and in Redis; its own memory only saves time. A restarted query, or a second
planner, plans the same batch again.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.batch_limits import NO_LIMITS, Advance, BatchLimits, NoAdvance
from millstream.spark.source.committed_offsets import CommittedOffsets
from millstream.spark.source.data_loss import Loss, LossPolicy, after_loss, detect_loss, recreated_stream_error
from millstream.spark.source.early_seek import Distance, EarlySeek
from millstream.spark.source.fair_shares import FairFill, Rotation
from millstream.spark.source.offset_bounds import Bound, id_of
from millstream.spark.source.offset_ranges import OffsetRange, TaskSizing, assign, split_at, split_evenly
from millstream.spark.source.offset_seek import Seek, position_after, seek
from millstream.spark.source.offsets import BEGINNING, Offsets, Position, Positions
from millstream.spark.source.options import SourceOptions
from millstream.spark.source.read_range import ReadRange
from millstream.spark.source.starting_offsets import StartingOffsets, summarize_names
from millstream.spark.source.stream_info import StreamInfo
from millstream.spark.source.stream_info_cache import StreamInfoCache
from millstream.spark.source.subscription import subscription
from millstream.spark.source.trigger_delay import TriggerDelay
from millstream.spark.source.unchanged_streams import UnchangedStreams

logger = logging.getLogger(__name__)

_SPLIT_SLACK = 1.2
_GUESSES_PER_TASK = 4
_STREAMS_AT_A_TIME = 5_000


class BatchPlanner:
    """Plans batches of the streams that `options` subscribe to, spread over about `cores` tasks.

    Every method may be repeated: call them through `Client.retry_while_unavailable`.
    """

    def __init__(self, client: Client, options: SourceOptions, *, cores: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._options = options
        limits = options.limits
        self._task_sizing = TaskSizing(
            min_partitions=limits.min_partitions, max_records=limits.max_per_partition, cores=cores
        )
        self._loss_policy = LossPolicy(fail=options.fail_on_data_loss)
        self._subscription = subscription(client, options, clock=clock)
        self._committed = CommittedOffsets(client, options.handler, clock=clock)
        self._starting = StartingOffsets(client, options, self._committed, self._loss_policy)
        self._trigger_delay = TriggerDelay(limits.min_per_trigger, limits.max_delay_ms, clock=clock)
        self._info_cache = StreamInfoCache(client, clock=clock)
        self._unchanged_streams = UnchangedStreams()
        self._rotation = Rotation()
        self._early_seek = EarlySeek(client)
        self._warned: set[str] = set()

    def close(self) -> None:
        """End what the planner does in the background."""
        self._early_seek.end()

    # --- offsets of a query ---

    def starting_offsets(self, default: Bound) -> Offsets:
        """The starting offsets of a query; `default` is the bound of streams that the options do not name."""
        return Offsets(self._starting.resolve(self._fetch_infos(self._subscription.names()), default))

    def latest_offsets(self) -> Positions:
        """The newest entry of every subscribed stream."""
        return _tails(self._fetch_infos(self._subscription.names()))

    def cached_latest_offsets(self) -> tuple[int, Callable[[], Positions]]:
        """The newest entry of every stream as of the last refresh, and a version that changes when they do."""
        return self._info_cache.version, lambda: _tails(self._info_cache.all_known)

    def _refresh(self) -> None:
        """Find out which streams have changed, so that no cached stream info is older than this call."""
        self._unchanged_streams.add_changed(self._info_cache.refresh())

    def _fetch_infos(self, names: Collection[str]) -> dict[str, StreamInfo | None]:
        self._refresh()
        infos = self._info_cache.get(names)
        return {name: infos[name] for name in names}

    # --- the end of a batch ---

    def plan_next(self, start: Offsets, limits: BatchLimits = NO_LIMITS) -> Advance[Offsets] | NoAdvance:
        """Plan the end of the batch that begins at `start`.

        An empty batch is planned while a small one is delayed and other streams are new. Streams that are not in
        `start` get the offset before their earliest entry, and are read from the next batch on: entries that are gone
        by then are lost. Raises DataLoss for lost entries, with `failOnDataLoss`.

        The cost grows with the number of changed streams only, if `start` has the version of the offsets that the last
        call received, or returned, and `limits.target` is the same.
        """
        self._refresh()
        scan = self._scan(start, limits)
        waiting = sum(backlog.size for backlog in scan.backlogs.values())
        delay_ms = self._trigger_delay.remaining_ms(waiting) if limits.may_delay else 0.0
        batch_ends, entries = ({}, 0) if delay_ms else self._end_positions(scan, limits.max_entries)
        self._refuse_recreated({name: scan.backlogs[name] for name in batch_ends})
        if batch_ends:
            self._trigger_delay.on_batch()
        reopened = self._committed.positions_to_reprocess(start.positions)
        changes = {**reopened, **scan.changes, **batch_ends}
        end = Offsets({**start.positions, **changes}) if changes else start
        self._unchanged_streams.mark_idle((name for name in scan.idle if name not in reopened), start, end)
        # What is processed again, as Redis has lost its commits, is in no count.
        return Advance(end, None if reopened else entries) if changes else NoAdvance(delay_ms)

    def _scan(self, start: Offsets, limits: BatchLimits) -> "Scan":
        """Check the streams that may have changed, round robin, until a batch is full."""
        streams = self._subscription.streams()
        positions, subscribed = start.positions, streams.names
        scan = Scan({}, {}, [])
        fill = FairFill(limits.max_entries, self._options.limits.min_per_trigger or 0)
        names = self._rotation.order(self._unchanged_streams.to_check(start, streams))
        for begin in range(0, len(names), _STREAMS_AT_A_TIME):
            page = names[begin : begin + _STREAMS_AT_A_TIME]
            infos = self._info_cache.get(page)
            if self._options.streams:
                self._warn_of_absent(name for name in page if name in subscribed and infos[name] is None)
            # A batch without entries records the starting offsets of new streams.
            scan.changes.update(
                self._new_streams([name for name in page if name not in positions and name in subscribed], infos)
            )
            paused = self._committed.paused(
                [name for name in page if name in positions and _has_more(infos[name], positions[name])]
            )
            for name in page:
                if name not in positions or name in paused:
                    continue  # every call checks a paused stream again
                result = self._check_stream(
                    name, positions[name], infos[name], subscribed=name in subscribed, target=limits.target
                )
                if result is None:
                    scan.idle.append(name)
                elif isinstance(result, Backlog):
                    scan.backlogs[name] = result
                    fill.add(result.size)
                    if fill.is_full:
                        return scan._replace(is_all=False)
                else:
                    scan.changes[name] = result  # recorded by a batch without entries; the next batch reads from there
        return scan

    def _warn_of_absent(self, names: Iterable[str]) -> None:
        """Log once that listed streams do not exist: their names may be misspelt."""
        if new := [name for name in names if name not in self._warned]:
            self._warned |= set(new)
            logger.warning("subscribed streams do not exist: %s; reading them as soon as they do", summarize_names(new))

    def _check_stream(
        self, name: str, at: Position, info: StreamInfo | None, *, subscribed: bool, target: Positions | None
    ) -> "Position | Backlog | None":
        """Return another offset to go on at, the backlog to read, or None if there is nothing to do."""
        if info is not None and at == info.tail:
            return None  # the usual case among many streams: all entries are read, none is lost
        if not subscribed and (info is not None or self._subscription.pattern is None):
            return None  # no longer subscribed: the query keeps its offset
        loss = detect_loss(name, at, info)
        if loss is not None and loss.resets:
            # The options may name an id that no entry has yet.
            return None if self._starting.is_requested_start(name, at) else self._restart_position(loss, info)
        if info is None:
            return None
        if loss is not None:
            self._loss_policy.report(loss)
        until = info.tail
        if target is not None and (end := target.get(name, at)).id < until.id:
            until = end
        if until.id <= at.id:
            return None
        if at.entries_added is None and at.id != ZERO_ID and not info.is_whole_after(at.id):
            self._loss_policy.warn_of_possible_loss(name, at.id)
        return Backlog(after_loss(at, info), until, info)

    def _new_streams(self, names: Sequence[str], infos: Mapping[str, StreamInfo | None]) -> Positions:
        found = {name: info.earliest_position() for name in names if (info := infos[name]) is not None}
        return {**found, **self._starting.committed_positions(list(found), infos)}

    def _refuse_recreated(self, backlogs: Mapping[str, "Backlog"]) -> None:
        """Raise DataLoss for a recreated stream whose first id is at or below the handler's committed id."""
        from_beginning = [name for name, backlog in backlogs.items() if backlog.start.id == ZERO_ID]
        for name, committed_id in self._committed.committed_ids(from_beginning).items():
            if backlogs[name].info.first_id <= committed_id:
                raise recreated_stream_error(name, committed_id)

    def _restart_position(self, loss: Loss, info: StreamInfo | None) -> Position:
        """The offset to go on at in a stream that was recreated, or that Redis has lost writes of."""
        committed_id = self._committed.committed_ids([loss.stream]).get(loss.stream)
        if (
            committed_id is not None
            and committed_id < loss.start.id
            and info is not None
            and info.last_id >= committed_id
        ):
            logger.warning(
                "Redis has lost its last writes: %s; going on after %s, the last commit that is left",
                loss,
                committed_id,
            )
            return Position(committed_id, None)
        self._loss_policy.report(loss)
        if committed_id is not None and info is not None and info.first_id <= committed_id:
            raise recreated_stream_error(loss.stream, committed_id)
        return BEGINNING

    def _end_positions(self, scan: "Scan", limit: int | None) -> tuple[Positions, int | None]:
        """Return the ends of the streams with a backlog: their tails, or what fits into `limit`.

        The second value is the number of entries before these ends; None if it is unknown.
        """
        backlogs = scan.backlogs
        sizes = {name: backlog.size for name, backlog in backlogs.items()}
        shares = sizes if limit is None else self._rotation.divide(sizes, limit, are_all=scan.is_all)
        ends = {name: backlogs[name].end for name, share in shares.items() if share >= sizes[name]}
        is_counted = all(backlogs[name].exact_size is not None for name in ends)
        partial = {name: share for name, share in shares.items() if name not in ends}
        for name, position in self._seek_ends(backlogs, partial).items():
            ends[name] = position or backlogs[name].end
            is_counted = is_counted and position is not None
        self._early_seek.prepare(
            {name: Distance(ends[name], share, backlogs[name].info) for name, share in partial.items()}
        )
        return ends, sum(min(share, sizes[name]) for name, share in shares.items()) if is_counted else None

    def _seek_ends(self, backlogs: Mapping[str, "Backlog"], shares: Mapping[str, int]) -> dict[str, Position | None]:
        """Return the position after the share of each stream; None where entries before the end were deleted."""
        self._early_seek.end()
        reached = {name: self._early_seek.furthest(name, backlogs[name].start, share) for name, share in shares.items()}
        rest = {name: shares[name] - count for name, (_, count) in reached.items()}
        seeks = {name: Seek(at.id, rest[name], 1) for name, (at, _) in reached.items() if rest[name]}
        positions: dict[str, Position | None] = {name: at for name, (at, _) in reached.items()}
        for name, (ids, info) in seek(self._client, seeks).items():
            start = reached[name].position
            positions[name] = position_after(start, rest[name], ids[0], backlogs[name].info, info) if ids else None
        return {name: at if at and at.id < backlogs[name].end.id else None for name, at in positions.items()}

    # --- the tasks of a batch ---

    def plan_batch_read(self, read_range: ReadRange) -> list[list[OffsetRange]]:
        """Plan the tasks of a batch read: from `startingOffsets` to `endingOffsets`, narrowed by `read_range`."""
        names = self._subscription.names()
        infos = self._fetch_infos([name for name in names if read_range.accepts(name)])
        ends = {name: self._ending_position(name, info) for name, info in infos.items() if info is not None}
        _warn_of_missing(names, [name for name in infos if name not in ends])
        return self.plan_tasks(*read_range.narrow(self._starting.resolve(infos, "earliest"), ends))

    def _ending_position(self, name: str, info: StreamInfo) -> Position:
        last = id_of(self._options.ending.for_stream(name, "latest"))
        return Position(last, None) if last is not None and last < info.tail.id else info.tail

    def plan_tasks(self, start: Positions, end: Positions) -> list[list[OffsetRange]]:
        """Plan the tasks of the batch from `start` to `end`, and begin to seek the end of the next one.

        With `failOnDataLoss` raises DataLoss for lost entries.
        """
        self._early_seek.begin()
        moved = {name: at for name, at in start.items() if name in end and at != end[name]}
        starts = self._committed.rewind(moved)
        bounds = {name: (at, end[name]) for name, at in starts.items() if end[name].id > at.id}
        infos = self._fetch_infos(bounds)
        ranges: list[OffsetRange] = []
        for name, (at, until) in bounds.items():
            info = infos[name]
            first = self._start_after_loss(name, at, info)
            if info is not None and first is not None:
                ranges += _ranges(name, first, until, info)
        total = sum(one.size for one in ranges)
        if not total:
            return []
        return assign(
            self._split(ranges, self._task_sizing.task_size(total)),
            self._task_sizing.task_count(total),
            self._max_task_size(total),
        )

    def _start_after_loss(self, name: str, at: Position, info: StreamInfo | None) -> Position | None:
        """The start of a planned range, after entries that were lost; None if the stream is gone."""
        loss = detect_loss(name, at, info)
        if loss is None:
            return at
        if loss.resets:
            at = self._restart_position(loss, info)
            return at if at != BEGINNING else None
        self._loss_policy.report(loss)
        return after_loss(at, info) if info is not None else None

    def _max_task_size(self, total: int) -> int:
        return self._options.limits.max_per_partition or total

    def _split(self, ranges: Sequence[OffsetRange], target: int) -> list[OffsetRange]:
        """Split ranges of more than `target` entries: at exact ids, or, where that is not needed, at guessed ones."""
        exact = self._options.limits.max_per_partition is not None
        max_size = target if exact else int(target * _SPLIT_SLACK)
        split = [whole for whole in ranges if whole.size <= max_size]
        steps: dict[OffsetRange, int] = {}
        for whole in ranges:
            parts = -(-whole.size // target)
            if whole.size <= max_size:
                continue
            if whole.untouched and not exact:
                split += split_evenly(whole, parts * _GUESSES_PER_TASK)
            else:
                steps[whole] = -(-whole.size // parts)
        results = seek(
            self._client,
            {whole.stream: Seek(whole.after, step, (whole.size - 1) // step) for whole, step in steps.items()},
        )
        for whole, step in steps.items():
            split += split_at(whole, step, results[whole.stream].ids)
        return split


class Scan(NamedTuple):
    """Streams with a backlog, other offsets that streams go on at, and streams with nothing to do.

    `is_all`: no other stream has a backlog.
    """

    backlogs: "dict[str, Backlog]"
    changes: dict[str, Position]
    idle: list[str]
    is_all: bool = True


class Backlog(NamedTuple):
    """A stream with entries to read: its offset, the offset to read to at most, and the stream info behind both."""

    start: Position
    end: Position
    info: StreamInfo

    @property
    def exact_size(self) -> int | None:
        """Number of entries to read; None if it is unknown."""
        at, tail = self.start.entries_added, self.end.entries_added
        return None if at is None or tail is None else max(1, tail - at)

    @property
    def size(self) -> int:
        """Number of entries to read: exact, or an upper bound."""
        count = self.exact_size
        return max(1, self.info.length) if count is None else count


def _has_more(info: StreamInfo | None, at: Position) -> bool:
    return info is not None and info.tail.id > at.id


def _tails(infos: Mapping[str, StreamInfo | None]) -> Positions:
    return {name: info.tail for name, info in infos.items() if info is not None}


def _ranges(name: str, at: Position, until: Position, info: StreamInfo) -> list[OffsetRange]:
    """The range to read of one stream; none if the counters prove that it is empty."""
    if at.entries_added is None or until.entries_added is None or info.has_gaps_after(at.id):
        return [OffsetRange(name, at.id, until.id, _estimate(at, until, info), None)]
    count = until.entries_added - at.entries_added
    if info.entries_removed:
        return [OffsetRange(name, at.id, until.id, count, count)] if count > 0 else []
    # No entry ever came before the first one: guessed cuts are more even if they begin there. `EntryId.previous` of the
    # first id of a millisecond has the greatest sequence number, among which the cuts would be lost.
    ms, seq = info.first_id
    after = max(at.id, EntryId(ms, seq - 1) if seq else EntryId(ms - 1, 0))
    return [OffsetRange(name, after, until.id, count, count, untouched=True)]


def _estimate(at: Position, until: Position, info: StreamInfo) -> int:
    """Estimate the number of entries between two offsets, as if they had come at an even rate."""
    span = info.last_id.ms - info.first_id.ms + 1
    part = min(until.id, info.last_id).ms - max(at.id, info.first_id).ms + 1
    return max(1, min(info.length, info.length * part // span))


def _warn_of_missing(names: Collection[str], missing: Sequence[str]) -> None:
    """Warn of streams that do not exist, which a batch read treats as empty: their names may be misspelt."""
    if missing:
        logger.warning("subscribed streams do not exist: %s; reading them as empty", summarize_names(missing))
    elif not names:
        logger.warning("no subscribed stream exists; there is nothing to read")
