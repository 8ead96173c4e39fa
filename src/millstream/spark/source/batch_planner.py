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
from millstream.spark.source.committed_offsets import CommittedOffsets
from millstream.spark.source.data_loss import LossPolicy, made_anew
from millstream.spark.source.fair_shares import FairFill, divide, in_turn
from millstream.spark.source.filters import ReadFilter
from millstream.spark.source.offset_bounds import Edge, id_of
from millstream.spark.source.offset_ranges import OffsetRange, Spread, assign, cut, guess_cuts
from millstream.spark.source.offset_seek import Seek, seek
from millstream.spark.source.offsets import BEGINNING, Offsets, Position
from millstream.spark.source.options import SourceOptions
from millstream.spark.source.starting_offsets import StartingOffsets, some_of
from millstream.spark.source.stream_info import Loss, StreamInfo, after_loss, detect_loss
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

    Every method may be repeated: call them through `Client.patiently`.
    """

    def __init__(self, client: Client, options: SourceOptions, *, cores: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._options = options
        limits = options.limits
        self._spread = Spread(min_partitions=limits.min_partitions, max_records=limits.per_partition, cores=cores)
        self._losses = LossPolicy(fail=options.fail_on_data_loss)
        self._subscription = subscription(client, options, clock=clock)
        self._frontier = CommittedOffsets(client, options.frontier, clock=clock)
        self._starts = StartingOffsets(client, options, self._frontier, self._losses)
        self._holding = TriggerDelay(limits.least_per_trigger, limits.most_delay_ms, clock=clock)
        self._known = StreamInfoCache(client, clock=clock)
        self._restless = UnchangedStreams()
        self._last_served = ""
        self._told: set[str] = set()

    # --- offsets of a query ---

    def starts(self, usual: Edge) -> Offsets:
        """The starting offsets of a query; `usual` is the bound of streams that the options do not name."""
        return self._starts.of(self._survey(self._subscription.names()), usual)

    def tails(self) -> Offsets:
        """The newest entry of every subscribed stream."""
        return _tails(self._survey(self._subscription.names()))

    def newest(self) -> tuple[int, Callable[[], Offsets]]:
        """The newest entry of every stream as of the last refresh, and a version that changes when they do."""
        return self._known.version, lambda: _tails(self._known.latest)

    def _look(self) -> None:
        """Find out which streams have changed, so that no cached stream info is older than this call."""
        self._restless.note(self._known.look())

    def _survey(self, names: Collection[str]) -> dict[str, StreamInfo | None]:
        self._look()
        facts = self._known.of(names)
        return {name: facts[name] for name in names}

    # --- the end of a batch ---

    def advance(self, start: Offsets, *, limit: int | None, target: Offsets | None, hold: bool = False) -> "Advance":
        """Plan the end of the batch that begins at `start`: `start` itself, the same object, if nothing is new.

        A batch has at most `limit` entries, none of them beyond `target`, if that is given. With `hold` an empty batch
        is planned while fewer entries than `minOffsetsPerTrigger` are available, until `maxTriggerDelay` has passed.
        Streams that are not in `start` get the offset before their earliest entry, and are read from the next batch
        on: entries that are gone by then are lost. Raises DataLoss for lost entries, with `failOnDataLoss`.

        The cost grows with the number of changed streams only, if `start` is the object that the last call was given,
        or returned, and `target` is the same.
        """
        self._look()
        found = self._find(start, limit, target)
        waiting = found.waiting
        held_ms = self._holding.left_ms(sum(stream.backlog for stream in waiting.values())) if hold else 0.0
        taken = {} if held_ms else self._take(found, limit)
        self._refuse_made_anew({name: waiting[name] for name in taken})
        if taken:
            self._holding.began()
        reopened = self._frontier.reopened(start)
        changes = reopened | found.changes | taken
        ends = start | changes if changes else start
        self._restless.settle((name for name in found.at_rest if name not in reopened), start, ends)
        return Advance(ends, held_ms)

    def _find(self, start: Offsets, limit: int | None, target: Offsets | None) -> "Scan":
        """Check the streams that may have changed, round robin, until a batch of `limit` is full."""
        subscribed = self._subscription.names()
        found = Scan({}, {}, [])
        filling = FairFill(limit, self._options.limits.least_per_trigger or 0)
        names = in_turn(self._restless.among(start, subscribed), self._last_served)
        for begin in range(0, len(names), _STREAMS_AT_A_TIME):
            some = names[begin : begin + _STREAMS_AT_A_TIME]
            facts = self._known.of(some)
            if self._options.streams:
                self._tell_absent(name for name in some if name in subscribed and facts[name] is None)
            # A batch without entries records the starting offsets of new streams.
            found.changes.update(self._discovered([n for n in some if n not in start and n in subscribed], facts))
            paused = self._frontier.paused(
                [name for name in some if name in start and _has_more(facts[name], start[name])]
            )
            for name in some:
                if name not in start or name in paused:
                    continue  # a paused stream stays unsettled, so that each call checks it again
                result = self._judge(name, start[name], facts[name], subscribed=name in subscribed, target=target)
                if result is None:
                    found.at_rest.append(name)
                elif isinstance(result, Backlog):
                    found.waiting[name] = result
                    filling.add(result.backlog)
                    if filling.is_full:
                        return found._replace(is_all=False)
                else:
                    found.changes[name] = result  # recorded by a batch without entries; the next batch reads from there
        return found

    def _tell_absent(self, names: Iterable[str]) -> None:
        """Log once that listed streams do not exist: their names may be misspelt."""
        if new := [name for name in names if name not in self._told]:
            self._told |= set(new)
            logger.warning("subscribed streams do not exist: %s; reading them as soon as they do", some_of(new))

    def _judge(
        self, name: str, at: Position, fact: StreamInfo | None, *, subscribed: bool, target: Offsets | None
    ) -> "Position | Backlog | None":
        """Return another offset to go on at, the backlog to read, or None if there is nothing to do."""
        if fact is not None and at == fact.tail:
            return None  # the usual case among many streams: all entries are read, none is lost
        if not subscribed and (fact is not None or self._subscription.pattern is None):
            return None  # no longer subscribed: the query keeps its offset
        loss = detect_loss(name, at, fact)
        if loss is not None and loss.resets:
            # The options may name an id that no entry has yet.
            return None if self._starts.asked_for(name, at) else self._reset(loss, fact)
        if fact is None:
            return None
        if loss is not None:
            self._losses.report(loss)
        tail = fact.tail
        if target is not None and (end := target.get(name, at)).id < tail.id:
            tail = end
        if tail.id <= at.id:
            return None
        if at.added is None and at.id != ZERO_ID and not fact.keeps(at.id):
            self._losses.doubt(name, at.id)
        return Backlog(after_loss(at, fact), tail, fact)

    def _discovered(self, names: Sequence[str], facts: Mapping[str, StreamInfo | None]) -> Offsets:
        found = {name: fact.earliest() for name in names if (fact := facts[name]) is not None}
        return found | self._starts.resumed(list(found), facts)

    def _refuse_made_anew(self, taken: Mapping[str, "Backlog"]) -> None:
        """Raise DataLoss for a recreated stream whose first id is at or below the handler's committed id."""
        fresh = [name for name, stream in taken.items() if stream.at.id == ZERO_ID]
        for name, frontier in self._frontier.of(fresh).items():
            if taken[name].facts.first <= frontier:
                raise made_anew(name, frontier)

    def _reset(self, loss: Loss, facts: StreamInfo | None) -> Position:
        """The offset to go on at in a stream that was recreated, or that Redis has lost writes of."""
        frontier = self._frontier.of([loss.stream]).get(loss.stream)
        if frontier is not None and frontier < loss.start.id and facts is not None and facts.last >= frontier:
            logger.warning(
                "Redis has lost its last writes: %s; going on after %s, the last commit that is left", loss, frontier
            )
            return Position(frontier, None)
        self._losses.report(loss)
        if frontier is not None and facts is not None and facts.first <= frontier:
            raise made_anew(loss.stream, frontier)
        return BEGINNING

    def _take(self, found: "Scan", limit: int | None) -> Offsets:
        """Return the end offsets of the streams with a backlog: their tails, or what fits into `limit`."""
        waiting = found.waiting
        if limit is None:
            return {name: stream.tail for name, stream in waiting.items()}
        backlogs = {name: stream.backlog for name, stream in waiting.items()}
        shares = divide(backlogs, limit, self._last_served)
        self._last_served = "" if found.is_all and len(shares) == len(backlogs) else list(shares)[-1]
        taken = {name: waiting[name].tail for name, share in shares.items() if share >= backlogs[name]}
        partly = {name: share for name, share in shares.items() if name not in taken}
        walked = seek(self._client, {name: Seek(waiting[name].at.id, share, 1) for name, share in partly.items()})
        for name, (marks, facts) in walked.items():
            stream = waiting[name]
            if marks and marks[0] < stream.tail.id:
                taken[name] = Position(marks[0], stream.count_after(partly[name], facts))
            else:
                taken[name] = stream.tail  # the entries before it were deleted
        return taken

    # --- the tasks of a batch ---

    def everything(self, selection: ReadFilter) -> list[list[OffsetRange]]:
        """Plan the tasks of a batch read: from `startingOffsets` to `endingOffsets`, narrowed by `selection`."""
        names = self._subscription.names()
        facts = self._survey([name for name in names if selection.takes(name)])
        ends = {name: self._end(name, fact) for name, fact in facts.items() if fact is not None}
        _tell_missing(names, [name for name in facts if name not in ends])
        return self.pieces(*selection.narrow(self._starts.of(facts, "earliest"), ends))

    def _end(self, name: str, facts: StreamInfo) -> Position:
        last = id_of(self._options.ending.of(name, "latest"))
        return Position(last, None) if last is not None and last < facts.tail.id else facts.tail

    def pieces(self, start: Offsets, end: Offsets) -> list[list[OffsetRange]]:
        """Plan the tasks of the batch from `start` to `end`. With `failOnDataLoss` raises DataLoss for lost entries."""
        moved = {name: at for name, at in start.items() if name in end and at != end[name]}
        floors = self._frontier.lower(moved)
        ranges = {name: (at, end[name]) for name, at in floors.items() if end[name].id > at.id}
        facts = self._survey(ranges)
        pieces: list[OffsetRange] = []
        for name, (at, until) in ranges.items():
            fact = facts[name]
            floor = self._floor(name, at, fact)
            if fact is not None and floor is not None:
                pieces += _ranges(name, floor, until, fact)
        total = sum(piece.size for piece in pieces)
        if not total:
            return []
        return assign(self._split(pieces, self._spread.target(total)), self._spread.tasks(total), self._most(total))

    def _floor(self, name: str, at: Position, fact: StreamInfo | None) -> Position | None:
        """The start of a planned range, after entries that were lost; None if the stream is gone."""
        loss = detect_loss(name, at, fact)
        if loss is None:
            return at
        if loss.resets:
            at = self._reset(loss, fact)
            return at if at != BEGINNING else None
        self._losses.report(loss)
        return after_loss(at, fact) if fact is not None else None

    def _most(self, total: int) -> int:
        return self._options.limits.per_partition or total

    def _split(self, pieces: Sequence[OffsetRange], target: int) -> list[OffsetRange]:
        """Split ranges of more than `target` entries: at exact ids, or, where that is not needed, at guessed ones."""
        exact = self._options.limits.per_partition is not None
        most = target if exact else int(target * _SPLIT_SLACK)
        split = [piece for piece in pieces if piece.size <= most]
        steps: dict[OffsetRange, int] = {}
        for piece in pieces:
            parts = -(-piece.size // target)
            if piece.size <= most:
                continue
            if piece.untouched and not exact:
                split += guess_cuts(piece, parts * _GUESSES_PER_TASK)
            else:
                steps[piece] = -(-piece.size // parts)
        walked = seek(self._client, {p.stream: Seek(p.after, step, (p.size - 1) // step) for p, step in steps.items()})
        for piece, step in steps.items():
            split += cut(piece, step, walked[piece.stream].marks)
        return split


class Advance(NamedTuple):
    """The end offsets of a batch, and the longest time that it is still delayed, in milliseconds; 0 if it is not."""

    ends: Offsets
    held_ms: float = 0.0


class Scan(NamedTuple):
    """Streams with a backlog, other offsets that streams go on at, and streams with nothing to do.

    `is_all`: no other stream has a backlog.
    """

    waiting: "dict[str, Backlog]"
    changes: Offsets
    at_rest: list[str]
    is_all: bool = True


class Backlog(NamedTuple):
    """A stream with entries to read: its offset, the offset to read to at most, and the stream info behind both."""

    at: Position
    tail: Position
    facts: StreamInfo

    @property
    def backlog(self) -> int:
        """Number of entries to read: exact, or an upper bound."""
        at, tail, facts = self
        if at.added is not None and tail.added is not None:
            return max(1, tail.added - at.added)
        return max(1, facts.length)

    def count_after(self, taken: int, now: StreamInfo | None) -> int | None:
        """Number of entries ever added up to the `taken`-th after `at`; None if entries were removed in between."""
        if self.at.added is None or now is None or now.has_gaps_after(self.at.id):
            return None
        whole = now.keeps(self.at.id) or now.removed == self.facts.removed
        return self.at.added + taken if whole else None


def _has_more(facts: StreamInfo | None, at: Position) -> bool:
    return facts is not None and facts.tail.id > at.id


def _tails(facts: Mapping[str, StreamInfo | None]) -> Offsets:
    return {name: fact.tail for name, fact in facts.items() if fact is not None}


def _ranges(name: str, at: Position, until: Position, facts: StreamInfo) -> list[OffsetRange]:
    """The range to read of one stream; none if the counters prove that it is empty."""
    if at.added is None or until.added is None or facts.has_gaps_after(at.id):
        return [OffsetRange(name, at.id, until.id, _estimate(at, until, facts), None)]
    count = until.added - at.added
    if facts.removed:
        return [OffsetRange(name, at.id, until.id, count, count)] if count > 0 else []
    # No entry ever came before the first one: guessed cuts are more even if they begin there.
    ms, seq = facts.first
    after = max(at.id, EntryId(ms, seq - 1) if seq else EntryId(ms - 1, 0))
    return [OffsetRange(name, after, until.id, count, count, untouched=True)]


def _estimate(at: Position, until: Position, facts: StreamInfo) -> int:
    """Estimate the number of entries between two offsets, as if they had come at an even rate."""
    span = facts.last.ms - facts.first.ms + 1
    part = min(until.id, facts.last).ms - max(at.id, facts.first).ms + 1
    return max(1, min(facts.length, facts.length * part // span))


def _tell_missing(names: Collection[str], missing: Sequence[str]) -> None:
    """Warn of streams that do not exist, which a batch read takes for empty: their names may be misspelt."""
    if missing:
        logger.warning("subscribed streams do not exist: %s; reading them as empty", some_of(missing))
    elif not names:
        logger.warning("no subscribed stream exists; there is nothing to read")
