"""StartingOffsets: the start of a query in each stream, by a bound in the options, a group or a committed id."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.committed_offsets import CommittedOffsets
from millstream.spark.source.data_loss import LossPolicy, made_anew
from millstream.spark.source.offset_bounds import Edge, Timestamp, id_of
from millstream.spark.source.offsets import BEGINNING, Offsets, Position
from millstream.spark.source.options import SourceOptions
from millstream.spark.source.progress_group import group_positions, shown
from millstream.spark.source.stream_info import StreamInfo, detect_loss

logger = logging.getLogger(__name__)

_NAMED = 3

Facts = Mapping[str, StreamInfo | None]


class StartingOffsets:
    """Finds starting offsets by `options`. Raises ConfigError or DataLoss for streams where they are not possible."""

    def __init__(self, client: Client, options: SourceOptions, frontier: CommittedOffsets, losses: LossPolicy) -> None:
        self._client = client
        self._options = options
        self._frontier = frontier
        self._losses = losses

    def of(self, facts: Facts, usual: Edge) -> Offsets:
        """The start in each of the streams of `facts`; `usual` is the bound of those that the options do not name.

        Raises ConfigError for a stream with no entry at or after the starting time, unless it may begin at its end: by
        `startingOffsetsByTimestampStrategy`, or by default in a batch read.
        """
        edges = {name: self._options.starting.of(name, usual) for name in facts}
        self._refuse_late(edges, facts, usual)
        known = self.resumed([name for name, edge in edges.items() if edge == "frontier"], facts)
        known |= self._of_group([name for name, edge in edges.items() if edge == "group"], facts)
        return {name: known.get(name) or _start(facts[name], edge) for name, edge in edges.items()}

    def asked_for(self, name: str, at: Position) -> bool:
        """True if `at` is the id or time in the options, which no entry need have reached yet."""
        edge = self._options.starting.of(name, "latest")
        return at.added is None and at.id == id_of(edge)

    def _refuse_late(self, edges: Mapping[str, Edge], facts: Facts, usual: Edge) -> None:
        if (self._options.late_start or ("error" if usual == "latest" else "latest")) == "latest":
            return
        late = [name for name, edge in edges.items() if _is_late(facts[name], edge)]
        if late:
            raise ConfigError(
                f"no entry at or after the starting time in {some_of(late)}; to begin there with the next entry, "
                'set option("startingOffsetsByTimestampStrategy", "latest")'
            )

    # --- after the commits of a handler ---

    def resumed(self, names: Sequence[str], facts: Facts) -> Offsets:
        """The positions to go on at in streams with commits of the handler. Raises DataLoss, with `failOnDataLoss`."""
        frontiers = self._frontier.of(names)
        committed = shown(self._client, self._options.group, frontiers)
        return {
            name: self._after_commits(name, frontier, committed.get(name), facts[name])
            for name, frontier in frontiers.items()
        }

    def _after_commits(
        self, name: str, frontier: EntryId, committed: Position | None, facts: StreamInfo | None
    ) -> Position:
        """The position at `frontier`. The count of the progress group shows whether entries after it were removed."""
        if facts is not None and facts.last < frontier:
            raise made_anew(name, frontier)
        if facts is None or facts.last == frontier:
            return _located(frontier, facts)
        if facts.keeps(frontier):
            return committed if committed is not None and committed.id == frontier else Position(frontier, None)
        if committed is None or committed.added is None:
            self._losses.doubt(name, frontier)
        elif (loss := detect_loss(name, committed, facts)) is not None:
            # The query commits first and then moves the group, so after a kill it may be one batch behind.
            at_most = committed.id < frontier
            self._losses.report(replace(loss, start=Position(frontier, committed.added), at_most=at_most))
        return _located(frontier, facts)

    # --- at the position of a group ---

    def _of_group(self, names: Sequence[str], facts: Facts) -> Offsets:
        """The positions of the group of `startingOffsets=group`; the earliest entry of streams without that group."""
        group = self._options.starting_group
        standing = [name for name in names if facts[name] is not None]
        if group is None or not standing:
            return {}
        found = group_positions(self._client, group, standing)
        if not found and group != self._options.group:
            raise ConfigError(
                f"startingOffsets=group: no stream has the consumer group {group!r}; `millstream groups` lists them, "
                "or set another start"
            )
        pending = {name: about.pending for name, about in found.items() if about.pending}
        if pending:
            logger.warning(
                "reading begins after the last delivered ids of the group %r: its %d pending entries, in %d streams, "
                "stay with its consumers",
                group,
                sum(pending.values()),
                len(pending),
            )
        starts: Offsets = {}
        for name in standing:
            fact = facts[name]
            assert fact is not None
            at = found[name].at if name in found else fact.earliest()
            # A group may have been set to an id that no entry has reached.
            starts[name] = fact.tail if at.id >= fact.last else at if at.added is not None else _located(at.id, fact)
        return starts


def some_of(names: Sequence[str]) -> str:
    """The first three of `names` and the number of others, for a message."""
    return ", ".join(map(repr, names[:_NAMED])) + f" and {len(names) - _NAMED:,} more" * (len(names) > _NAMED)


def _is_late(facts: StreamInfo | None, edge: Edge) -> bool:
    return isinstance(edge, Timestamp) and facts is not None and facts.last.ms < edge.ms


def _start(facts: StreamInfo | None, edge: Edge) -> Position:
    if isinstance(edge, Timestamp):
        return facts.tail if facts is not None and _is_late(facts, edge) else _located(edge.before, facts)
    if isinstance(edge, EntryId):
        return _located(edge, facts)
    if facts is None:
        return BEGINNING
    return facts.tail if edge == "latest" else facts.earliest()


def _located(entry_id: EntryId, facts: StreamInfo | None) -> Position:
    """The position at a given id; its count is known at the ends of the stream only."""
    if facts is not None and facts.last == entry_id:
        return facts.tail
    if facts is not None and entry_id < facts.last and not (facts.keeps(entry_id) or facts.has_gaps_after(entry_id)):
        return Position(entry_id, facts.removed)
    return Position(entry_id, None)
