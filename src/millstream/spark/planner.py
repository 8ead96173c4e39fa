"""Decides, on the driver, where each batch ends and which task reads what.

All that it decides is in Spark's offsets and in Redis; what it remembers itself only saves time. A restarted query,
or a second planner, plans the same batch again.
"""

import logging
from collections.abc import Mapping, Sequence

from millstream.client import Client
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError
from millstream.ledger import Ledger
from millstream.model import ZERO_ID, EntryId
from millstream.spark.cursor import Walk, walk
from millstream.spark.facts import StreamFacts, after_loss, ask, judge, survey
from millstream.spark.loss import LossPolicy
from millstream.spark.offsets import BEGINNING, Offsets, Position
from millstream.spark.options import Edge, SourceOptions
from millstream.spark.ranges import Piece, Spread, cut, deal, guess_cuts
from millstream.spark.shares import divide

logger = logging.getLogger(__name__)

_SCAN_INTERVAL_MS = 1000.0
_SPLIT_SLACK = 1.2
_GUESSES_PER_TASK = 4


class Planner:
    """Plans batches of the streams that `options` subscribe to, spread over `cores` or more tasks.

    Every method may be repeated: call them through `Client.patiently`.
    """

    def __init__(self, client: Client, options: SourceOptions, *, cores: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._options = options
        limits = options.limits
        self._spread = Spread(min_partitions=limits.min_partitions, max_records=limits.per_partition, cores=cores)
        self._losses = LossPolicy(fail=options.fail_on_data_loss)
        self._clock = clock
        self._scanned: list[str] = []
        self._scan_due_ms = float("-inf")
        self._last_served = ""

    # --- where things stand ---

    def starts(self, usual: Edge) -> Offsets:
        """Where reading begins; `usual` is the edge of streams that the options say nothing about."""
        edges = self._options.starting
        names = self._subscribed()
        facts = survey(self._client, names)
        frontiers = self._frontiers([name for name in names if edges.of(name, usual) == "frontier"])
        return {name: _start(facts[name], edges.of(name, usual), frontiers.get(name)) for name in names}

    def ends(self) -> Offsets:
        """Where a batch read ends: at `endingOffsets`, else at the newest entry."""
        edges = self._options.ending
        ends = self.tails()
        for name, tail in ends.items():
            edge = edges.of(name, "latest")
            if isinstance(edge, EntryId) and edge < tail.id:
                ends[name] = Position(edge, None)
        return ends

    def tails(self) -> Offsets:
        """The newest entry of every subscribed stream."""
        facts = survey(self._client, self._subscribed())
        return {name: fact.tail for name, fact in facts.items() if fact is not None}

    # --- the end of a batch ---

    def advance(self, start: Offsets, *, limit: int | None, target: Offsets | None) -> tuple[Offsets, Offsets]:
        """Return the end of the batch that begins at `start`, and where all streams end now.

        A batch takes at most `limit` entries and, if `target` is given, nothing beyond it. Streams that are not in
        `start` begin with the earliest entry that they have. Raises DataLoss, if told to, for what is gone.
        """
        subscribed = set(self._subscribed())
        facts = survey(self._client, sorted(subscribed | start.keys()))
        ends = dict(start)
        open_: dict[str, tuple[Position, Position]] = {}
        for name, fact in facts.items():
            if name not in subscribed and (fact is not None or not self._options.pattern):
                continue  # it was subscribed to once: its place is kept
            at = start.get(name) or (fact.earliest() if fact is not None else BEGINNING)
            loss = judge(name, at, fact)
            if loss is not None:
                self._losses.report(loss)
            if loss is not None and loss.resets:
                ends[name] = BEGINNING
            elif fact is not None:
                tail = fact.tail if target is None else min(fact.tail, target.get(name, at), key=lambda to: to.id)
                if tail.id > at.id:
                    open_[name] = (after_loss(at, fact), tail)
        ends |= self._take(open_, facts, limit)
        return ends, {name: fact.tail for name, fact in facts.items() if fact is not None}

    def _take(
        self, open_: Mapping[str, tuple[Position, Position]], facts: Mapping[str, StreamFacts | None], limit: int | None
    ) -> Offsets:
        """Move as far towards the tails as `limit` allows."""
        backlogs = {name: _backlog(at, tail, facts[name]) for name, (at, tail) in open_.items()}
        if limit is None or sum(backlogs.values()) <= limit:
            return {name: tail for name, (_, tail) in open_.items()}
        shares = divide(backlogs, limit, self._last_served)
        self._last_served = max(shares) if len(shares) < len(backlogs) else ""
        taken = {name: open_[name][1] for name, share in shares.items() if share >= backlogs[name]}
        partly = {name: Walk(open_[name][0].id, share, 1) for name, share in shares.items() if name not in taken}
        found = walk(self._client, partly)
        now = survey(self._client, partly)
        for name, wish in partly.items():
            at, tail = open_[name]
            # No mark: nothing is left before the tail, the rest was deleted.
            mark = found.get(name, [])
            if not mark or mark[0] >= tail.id:
                taken[name] = tail
            else:
                taken[name] = Position(mark[0], _count_at(at, wish.step, facts[name], now[name]))
        return taken

    # --- the tasks of a batch ---

    def pieces(self, start: Offsets, end: Offsets) -> list[list[Piece]]:
        """Return what each task of the batch between `start` and `end` reads. Raises DataLoss, if told to."""
        floors = self._floors(start, end)
        ranges = {name: (floors[name], until) for name, until in end.items() if until.id > floors[name].id}
        facts = survey(self._client, ranges)
        pieces = []
        for name, (at, until) in ranges.items():
            fact = facts[name]
            loss = judge(name, at, fact)
            if loss is not None:
                self._losses.report(loss)
            if fact is not None and not (loss is not None and loss.resets):
                pieces += _pieces(name, after_loss(at, fact), until, fact)
        total = sum(piece.size for piece in pieces)
        if not total:
            return []
        return deal(self._split(pieces, self._spread.target(total)), self._spread.tasks(total), self._most(total))

    def _most(self, total: int) -> int:
        return self._options.limits.per_partition or total

    def _split(self, pieces: Sequence[Piece], target: int) -> list[Piece]:
        """Split what is greater than `target`: at exact places, or, where that is not needed, at guessed ones."""
        exact = self._options.limits.per_partition is not None
        most = target if exact else int(target * _SPLIT_SLACK)
        split = [piece for piece in pieces if piece.size <= most]
        steps: dict[Piece, int] = {}
        for piece in pieces:
            parts = -(-piece.size // target)
            if piece.size <= most:
                continue
            if piece.untouched and not exact:
                split += guess_cuts(piece, parts * _GUESSES_PER_TASK)
            else:
                steps[piece] = -(-piece.size // parts)
        marks = walk(self._client, {p.stream: Walk(p.after, step, (p.size - 1) // step) for p, step in steps.items()})
        for piece, step in steps.items():
            split += cut(piece, step, marks.get(piece.stream, ()))
        return split

    # --- the handler engine's frontier ---

    def _frontiers(self, streams: Sequence[str]) -> dict[str, EntryId]:
        if self._options.frontier is None or not streams:
            return {}
        app, handler = self._options.frontier
        return Ledger(self._client, app=app, handler=handler).frontiers(streams)

    def _floors(self, start: Offsets, end: Offsets) -> Offsets:
        """`start`, lowered to what Redis knows as committed where entries lie between."""
        floors = {name: start.get(name, Position(ZERO_ID, None)) for name in end}
        lower = {name: frontier for name, frontier in self._frontiers(list(end)).items() if frontier < floors[name].id}
        replies = ask(
            self._client,
            [("XRANGE", name, f"({at}", str(floors[name].id), "COUNT", 1) for name, at in lower.items()],
        )
        for (name, frontier), between in zip(lower.items(), replies, strict=True):
            if isinstance(between, list) and between:
                logger.warning(
                    "Redis has forgotten commits on stream %r: they end at %s, Spark's checkpoint at %s; the entries "
                    "between are processed again",
                    name, frontier, floors[name].id,
                )  # fmt: skip
                floors[name] = Position(frontier, None)
        return floors

    # --- which streams ---

    def _subscribed(self) -> list[str]:
        if self._options.pattern is None:
            return list(self._options.streams)
        if self._clock.monotonic_ms() >= self._scan_due_ms:
            self._scanned = self._client.scan_streams(self._options.pattern)
            self._scan_due_ms = self._clock.monotonic_ms() + _SCAN_INTERVAL_MS
            for name in self._scanned:
                if not name.isprintable() and any("\udc80" <= char <= "\udcff" for char in name):
                    raise ConfigError(f"the stream name {name!r} is not UTF-8 text: use a pattern that leaves it out")
        return self._scanned


def _start(facts: StreamFacts | None, edge: Edge, frontier: EntryId | None) -> Position:
    if isinstance(edge, EntryId):
        return _located(edge, facts)
    if frontier is not None:
        return _located(frontier, facts)
    if facts is None:
        return BEGINNING
    return facts.tail if edge == "latest" else facts.earliest()


def _located(entry_id: EntryId, facts: StreamFacts | None) -> Position:
    """The position at an id that somebody named; its count is known at the ends of the stream only."""
    if facts is not None and facts.last == entry_id:
        return facts.tail
    if facts is not None and entry_id < facts.first and not facts.has_gaps_after(entry_id):
        return Position(entry_id, facts.removed)
    return Position(entry_id, None)


def _backlog(at: Position, tail: Position, facts: StreamFacts | None) -> int:
    """Entries between two positions: exact, or at least not too few."""
    assert facts is not None
    if at.added is not None and tail.added is not None:
        return max(1, tail.added - at.added)
    return max(1, facts.length)


def _count_at(at: Position, taken: int, before: StreamFacts | None, now: StreamFacts | None) -> int | None:
    """How many entries had been added `taken` entries after `at`; None if entries were removed in between."""
    if at.added is None or before is None or now is None or now.has_gaps_after(at.id):
        return None
    whole = now.keeps(at.id) or now.removed == before.removed
    return at.added + taken if whole else None


def _pieces(name: str, at: Position, until: Position, facts: StreamFacts) -> list[Piece]:
    """What is to be read of one stream, in one piece; none if it is known that nothing is there."""
    if at.added is None or until.added is None or facts.has_gaps_after(at.id):
        return [Piece(name, at.id, until.id, _estimate(at, until, facts), None)]
    count = until.added - at.added
    if facts.removed:
        return [Piece(name, at.id, until.id, count, count)] if count > 0 else []
    # Nothing ever stood before the first entry: guessing places between entries works better from there.
    ms, seq = facts.first
    after = max(at.id, EntryId(ms, seq - 1) if seq else EntryId(ms - 1, 0))
    return [Piece(name, after, until.id, count, count, untouched=True)]


def _estimate(at: Position, until: Position, facts: StreamFacts) -> int:
    """About how many entries lie between, as if they had come at an even rate."""
    span = facts.last.ms - facts.first.ms + 1
    part = min(until.id, facts.last).ms - max(at.id, facts.first).ms + 1
    return max(1, min(facts.length, facts.length * part // span))
