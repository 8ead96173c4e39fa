"""GroupMove: what it does to set the last delivered id of a consumer group, before and after it is done."""

from dataclasses import dataclass
from typing import Literal

from millstream.admin.inspection import handler_of, inspect_streams
from millstream.admin.lag import count_between
from millstream.admin.reports import GroupReport, StreamReport
from millstream.admin.time_inputs import parse_after
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, GroupMissing
from millstream.groups import END, Group
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize
from millstream.redis_client.pipelining import server_time_ms

LATEST = "latest"

_NOT_MOVED = (
    "its progress is in the commit store. Moved back, the group would repeat nothing; moved on, it would skip messages "
    "for good. To process all of a stream again: millstream run --reprocess with a new --checkpoint. To process some of "
    "its messages again: publish them again, or millstream dlq redrive if they are dead letters"
)


@dataclass(frozen=True, kw_only=True)
class GroupMove:
    """A move of a group, as it would be now.

    * `before`: its last delivered id; `after`: where it goes, an id or LATEST; `to`: the id of that
    * `entries`: how many are delivered again (`direction` "back") or skipped ("forward"); a lower bound if not `exact`
    * `pending`: its pending entries, which stay pending
    """

    stream: str
    group: str
    before: str
    after: str
    to: str
    entries: int
    exact: bool
    pending: int

    @property
    def direction(self) -> Literal["back", "forward", "none"]:
        """Whether entries are delivered again, skipped, or neither."""
        before, to = EntryId.parse(self.before), EntryId.parse(self.to)
        return "none" if before == to else "back" if to < before else "forward"

    def describe(self) -> str:
        """What would become of entries."""
        entries = f"{'' if self.exact else 'at least '}{pluralize(self.entries, 'entry', 'entries')}"
        effect = {
            "back": f"{entries} would be delivered again",
            "forward": f"{entries} would be skipped",
            "none": "no entry would be delivered again or skipped",
        }[self.direction]
        if not self.pending:
            return effect
        pending = pluralize(self.pending, "pending entry stays", "pending entries stay")
        passing = ", and pass to the consumer that gets them again" if self.direction == "back" else ""
        return f"{effect}; its {pending} pending{passing}"


def plan_move(
    client: Client, stream: str, group: str, after: str, *, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
) -> GroupMove:
    """What a move would do to entries after `after`: an id, `earliest`, `latest` or a time (`parse_after`).

    Entries are counted for `budget_ms` milliseconds. Raises ConfigError for another `after`, and for one in the future:
    the group would skip entries that are not added yet. Raises GroupMissing, RedisError.
    """
    asked = parse_after(after)
    report, found = _find(client, stream, group)
    before, end = EntryId.parse(found.last_delivered_id), EntryId.parse(report.last_generated_id)
    to = asked or end
    if to > end and to.ms > server_time_ms(client):
        raise ConfigError(f"{after!r} is in the future: the group would skip all entries until then, too; use {LATEST}")
    counted = count_between(client, report, min(before, to), max(before, to), budget_ms=budget_ms, clock=clock)
    return GroupMove(
        stream=stream,
        group=group,
        before=str(before),
        after=str(asked) if asked else LATEST,
        to=str(to),
        entries=counted.count or 0,
        exact=not counted.is_partial,
        pending=found.pending,
    )


def move(client: Client, planned: GroupMove) -> str:
    """Set the last delivered id of the group; return it. Raises GroupMissing, and RedisError."""
    Group(client, planned.stream, planned.group).set_id(END if planned.after == LATEST else planned.to)
    return _find(client, planned.stream, planned.group)[1].last_delivered_id


def why_not_moved(stream: str, group: str) -> str | None:
    """Why this group cannot be moved: it is a handler's; None for any other."""
    keys = handler_of(stream, group)
    return None if keys is None else f"this is the group of the handler {keys.label}: {_NOT_MOVED}"


def group_missing(stream: str, group: str) -> GroupMissing:
    """The error for a group that does not exist; it names the command that lists the others."""
    return GroupMissing(f"there is no group {group!r} on {stream}; see: millstream group list {stream}")


def _find(client: Client, stream: str, group: str) -> tuple[StreamReport, GroupReport]:
    for report in inspect_streams(client, [stream]):
        for found in report.groups:
            if found.name == group:
                return report, found
    raise group_missing(stream, group)
