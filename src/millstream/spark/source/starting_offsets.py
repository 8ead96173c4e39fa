"""StartingOffsets: the start of a query in each stream, by a bound in the options, a group or a committed id."""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.committed_offsets import CommittedOffsets
from millstream.spark.source.data_loss import LossPolicy, detect_loss, recreated_stream_error
from millstream.spark.source.offset_bounds import Bound, Timestamp, id_of
from millstream.spark.source.offsets import BEGINNING, Position, Positions
from millstream.spark.source.options import SourceOptions
from millstream.spark.source.progress_group import group_positions, progress_offsets
from millstream.spark.source.stream_info import StreamInfo

logger = logging.getLogger(__name__)

_NAMED = 3

StreamInfos = Mapping[str, StreamInfo | None]


class StartingOffsets:
    """Finds starting offsets by `options`. Raises ConfigError or DataLoss for streams where they are not possible."""

    def __init__(self, client: Client, options: SourceOptions, committed: CommittedOffsets, losses: LossPolicy) -> None:
        self._client = client
        self._options = options
        self._committed = committed
        self._loss_policy = losses

    def resolve(self, infos: StreamInfos, default: Bound) -> Positions:
        """The start in each of the streams of `infos`; `default` is the bound of those that the options do not name.

        Raises ConfigError for a stream with no entry at or after the starting time, unless it may begin at its end: by
        `startingOffsetsByTimestampStrategy`, or by default in a batch read.
        """
        bounds = {name: self._options.starting.for_stream(name, default) for name in infos}
        self._refuse_late(bounds, infos, default)
        known = self.committed_positions([name for name, bound in bounds.items() if bound == "committed"], infos)
        known |= self._group_starts([name for name, bound in bounds.items() if bound == "group"], infos)
        return {name: known.get(name) or _start_position(infos[name], bound) for name, bound in bounds.items()}

    def is_requested_start(self, name: str, at: Position) -> bool:
        """True if `at` is the id or time in the options, which no entry need have reached yet."""
        bound = self._options.starting.for_stream(name, "latest")
        return at.entries_added is None and at.id == id_of(bound)

    def _refuse_late(self, bounds: Mapping[str, Bound], infos: StreamInfos, default: Bound) -> None:
        if (self._options.late_start or ("error" if default == "latest" else "latest")) == "latest":
            return
        late = [name for name, bound in bounds.items() if _is_late(infos[name], bound)]
        if late:
            raise ConfigError(
                f"no entry at or after the starting time in {summarize_names(late)}; to begin there with the next entry, "
                'set option("startingOffsetsByTimestampStrategy", "latest")'
            )

    # --- after the commits of a handler ---

    def committed_positions(self, names: Sequence[str], infos: StreamInfos) -> dict[str, Position]:
        """The positions to go on at in streams with commits of the handler. Raises DataLoss, with `failOnDataLoss`."""
        committed_ids = self._committed.committed_ids(names)
        shown_offsets = progress_offsets(self._client, self._options.group or "", committed_ids)
        return {
            name: self._committed_position(name, committed_id, shown_offsets.get(name), infos[name])
            for name, committed_id in committed_ids.items()
        }

    def _committed_position(
        self, name: str, committed_id: EntryId, shown_position: Position | None, info: StreamInfo | None
    ) -> Position:
        """The position at `committed_id`. The progress group's count shows whether later entries were removed."""
        if info is not None and info.last_id < committed_id:
            raise recreated_stream_error(name, committed_id)
        if info is None or info.last_id == committed_id:
            return _position_at(committed_id, info)
        if info.is_whole_after(committed_id):
            return (
                shown_position
                if shown_position is not None and shown_position.id == committed_id
                else Position(committed_id, None)
            )
        if shown_position is None or shown_position.entries_added is None:
            self._loss_policy.warn_of_possible_loss(name, committed_id)
        elif (loss := detect_loss(name, shown_position, info)) is not None:
            # The query commits first and then moves the group, so after a kill it may be one batch behind.
            at_most = shown_position.id < committed_id
            self._loss_policy.report(
                replace(loss, start=Position(committed_id, shown_position.entries_added), at_most=at_most)
            )
        return _position_at(committed_id, info)

    # --- at the position of a group ---

    def _group_starts(self, names: Sequence[str], infos: StreamInfos) -> Positions:
        """The positions of the group of `startingOffsets=group`; the earliest entry of streams without that group."""
        group = self._options.starting_group
        existing = [name for name in names if infos[name] is not None]
        if group is None or not existing:
            return {}
        positions = group_positions(self._client, group, existing)
        if not positions and group != self._options.group:
            raise ConfigError(
                f"startingOffsets=group: no stream has the consumer group {group!r}; `millstream group list "
                f"{shlex.quote(existing[0])}` lists those that there are, or set another start"
            )
        pending = {name: group_position.pending for name, group_position in positions.items() if group_position.pending}
        if pending:
            logger.warning(
                "reading begins after the last delivered ids of the group %r: its %d pending entries, in %d streams, "
                "stay with its consumers",
                group,
                sum(pending.values()),
                len(pending),
            )
        starts: dict[str, Position] = {}
        for name in existing:
            info = infos[name]
            assert info is not None
            at = positions[name].position if name in positions else info.earliest_position()
            # A group may have been set to an id that no entry has reached.
            starts[name] = (
                info.tail
                if at.id >= info.last_id
                else at
                if at.entries_added is not None
                else _position_at(at.id, info)
            )
        return starts


def summarize_names(names: Sequence[str]) -> str:
    """The first three of `names` and the number of others, for a message."""
    return ", ".join(map(repr, names[:_NAMED])) + f" and {len(names) - _NAMED:,} more" * (len(names) > _NAMED)


def _is_late(info: StreamInfo | None, bound: Bound) -> bool:
    return isinstance(bound, Timestamp) and info is not None and info.last_id.ms < bound.ms


def _start_position(info: StreamInfo | None, bound: Bound) -> Position:
    if isinstance(bound, Timestamp):
        return info.tail if info is not None and _is_late(info, bound) else _position_at(bound.last_id_before, info)
    if isinstance(bound, EntryId):
        return _position_at(bound, info)
    if info is None:
        return BEGINNING
    return info.tail if bound == "latest" else info.earliest_position()


def _position_at(entry_id: EntryId, info: StreamInfo | None) -> Position:
    """The position at a given id; its count is known at the ends of the stream only."""
    if info is not None and info.last_id == entry_id:
        return info.tail
    if (
        info is not None
        and entry_id < info.last_id
        and not (info.is_whole_after(entry_id) or info.has_gaps_after(entry_id))
    ):
        return Position(entry_id, info.entries_removed)
    return Position(entry_id, None)
