"""ProgressGroup: shows a query's progress in Redis, as a consumer group per stream at the query's committed offset.

The query reads nothing through the group. It moves the group when it plans the next batch, because Spark's own commit
call comes one batch late and never for the last one.
"""

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, CommandFailed, ConfigError, GroupMissing, WrongType
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import stage_of
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Command, Reply
from millstream.spark.source.offsets import Offsets, Position, Positions
from millstream.spark.source.stream_info import fetch_calls

logger = logging.getLogger(__name__)

_MAX_MS = 50.0
_CHECK_EVERY_MS = 10_000.0
_STREAMS_PER_TRIP = 500


class GroupPosition(NamedTuple):
    """The last delivered position of a group on one stream, and its number of pending entries."""

    position: Position
    pending: int


def group_positions(client: Client, group: str, streams: Iterable[str]) -> dict[str, GroupPosition]:
    """The positions of `group` on those of `streams` that have it."""
    found: dict[str, GroupPosition] = {}
    for stream, groups in _groups(client, streams).items():
        fields = next((fields for fields in groups if fields[b"name"] == group.encode()), None)
        if fields is not None:
            position = Position(EntryId.parse(fields[b"last-delivered-id"]), fields[b"entries-read"])
            found[stream] = GroupPosition(position, fields[b"pending"])
    return found


def progress_offsets(client: Client, group: str, streams: Iterable[str]) -> Positions:
    """The offsets that `group` shows as committed, on those of `streams` that have it. "" is no group."""
    positions = group_positions(client, group, streams) if group else {}
    return {stream: position.position for stream, position in positions.items()}


def _groups(client: Client, streams: Iterable[str]) -> dict[str, list[dict[bytes, Any]]]:
    """The consumer groups of each stream; none for one that does not exist."""
    names = list(streams)
    replies = [_expected_errors(reply) for reply in fetch_calls(client, [("XINFO", "GROUPS", name) for name in names])]
    return {
        name: [mapping_of(items) for items in reply] if isinstance(reply, list) else []
        for name, reply in zip(names, replies, strict=True)
    }


def _expected_errors(reply: Reply) -> Reply:
    """Return errors that the planner handles: no group, no stream, or a key of another type. Raise all others."""
    if isinstance(reply, AccessDenied) and not reply.concerns_credentials:
        raise AccessDenied(f'{reply}; grant XGROUP and XINFO on it, or set option("group", "") to show no progress')
    return reply if isinstance(reply, GroupMissing | CommandFailed | WrongType) else raise_if_error(reply)


class ProgressGroup:
    """Keeps the consumer group `group` of every stream at the query's offset; "" keeps none.

    `is_handler_group`: only workers of a handler read through the group, and this run has replaced them.

    Logs a warning, once, if another query seems to show its progress in the group: entries that the other has finished
    may be trimmed (`millstream worker --trim`) though this one has not read them.
    """

    def __init__(
        self, client: Client, group: str, *, is_handler_group: bool = False, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._client = client
        self._group = group
        self._is_handler_group = is_handler_group
        self._clock = clock
        self._published: dict[str, Position] = {}
        self._due: dict[str, Position] = {}
        self._due_version = 0
        self._is_warned = is_handler_group or stage_of(group) is not None  # these groups have one run each
        self._check_due_ms = clock.monotonic_ms() + _CHECK_EVERY_MS

    def publish(self, offsets: Offsets) -> None:
        """Move the group to `offsets` on the streams where it is elsewhere; create it where it is missing.

        Stops after 50 ms and leaves the rest to the next call. Raises ConfigError if the group has consumers or pending
        entries, so that others read through it.
        """
        if not self._group:
            return
        if offsets.version != self._due_version:
            published = self._published
            moved = {stream: at for stream, at in offsets.positions.items() if published.get(stream) != at}
            # Streams left by the last call come first.
            self._due = {stream: moved.pop(stream) for stream in self._due if stream in moved} | moved
            self._due_version = offsets.version
        self._publish_due(self._clock.monotonic_ms() + _MAX_MS)

    def publish_rest(self) -> None:
        """Move the group on all streams that are left. Raises ConfigError as above."""
        self._publish_due(float("inf"))

    def _publish_due(self, until_ms: float) -> None:
        while self._due:
            some = dict(islice(self._due.items(), _STREAMS_PER_TRIP))
            self._move(some)
            self._published |= some
            for stream in some:
                del self._due[stream]
            if self._clock.monotonic_ms() >= until_ms:
                return

    def _move(self, offsets: Positions) -> None:
        self._check_sharing()
        created = self._create({stream: at for stream, at in offsets.items() if stream not in self._published})
        offsets = {stream: at for stream, at in offsets.items() if stream not in created}
        replies = self._send("SETID", offsets)
        self._send(
            "CREATE", {stream: offsets[stream] for stream, reply in replies.items() if isinstance(reply, GroupMissing)}
        )

    def _create(self, new: Positions) -> set[str]:
        """Create the group on streams that may not have it yet; return those that had none. Raises ConfigError."""
        replies = self._send("CREATE", new)
        existing = [
            stream
            for stream, reply in replies.items()
            if isinstance(reply, CommandFailed) and reply.code == "BUSYGROUP"
        ]
        if not self._is_handler_group:  # a replaced worker may read once more before it is fenced
            self._refuse_foreign({stream: new[stream] for stream in existing})
        return new.keys() - existing

    def _check_sharing(self) -> None:
        """Check on one stream, from time to time, whether the group still is where this query has moved it."""
        now_ms = self._clock.monotonic_ms()
        if self._is_warned or not self._published or now_ms < self._check_due_ms:
            return
        self._check_due_ms = now_ms + _CHECK_EVERY_MS
        stream, at = next(iter(self._published.items()))
        found = group_positions(self._client, self._group, [stream]).get(stream)
        if found is not None and found.position.id != at.id:
            self._warn_of_sharing(stream, found.position.id, at.id)

    def _warn_of_sharing(self, stream: str, found: EntryId, own: EntryId) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "the group %r of stream %r is at %s, and this query at %s: another query shows its progress in it, or "
                "this one has begun anew; what only the other has read may be trimmed. Give each query a group of its "
                'own: option("group", NAME)',
                self._group,
                stream,
                found,
                own,
            )

    def _refuse_foreign(self, offsets: Mapping[str, Position]) -> None:
        for stream, groups in _groups(self._client, offsets).items():
            for group in groups:
                if group[b"name"] != self._group.encode():
                    continue
                if (found := EntryId.parse(group[b"last-delivered-id"])) > offsets[stream].id:
                    self._warn_of_sharing(stream, found, offsets[stream].id)
                if group[b"consumers"] or group[b"pending"]:
                    raise ConfigError(
                        f"the group {self._group!r} of stream {stream!r} has {group[b'consumers']} consumers and "
                        f"{group[b'pending']} pending entries, so others read through it: give this query a group of "
                        'its own by option("group", NAME), or "" to show no progress'
                    )

    def _send(self, verb: str, offsets: Positions) -> dict[str, Reply]:
        replies = fetch_calls(self._client, [self._command(verb, *item) for item in offsets.items()])
        return {stream: _expected_errors(reply) for stream, reply in zip(offsets, replies, strict=True)}

    def _command(self, verb: str, stream: str, at: Position) -> Command:
        known: Command = () if at.entries_added is None else ("ENTRIESREAD", at.entries_added)
        return ("XGROUP", verb, stream, self._group, str(at.id), *known)
