"""Shows a query's progress in Redis: a consumer group per stream that stands where the query has committed.

Nothing is read through the group. It is moved from the planning of the next batch, because Spark's own commit call
comes one batch late and never for the last one.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, CommandFailed, ConfigError, GroupMissing, WrongType
from millstream.model import EntryId
from millstream.redis_client.client import Client, Command, Reply, raise_if_error
from millstream.spark.source.offsets import Offsets, Position
from millstream.spark.source.stream_info import fetch_calls

_MOST_MS = 50.0
_STREAMS_AT_A_TIME = 500


class GroupPosition(NamedTuple):
    """Where a group stands on one stream, and how many of the entries that it was given nobody has confirmed."""

    at: Position
    pending: int


def group_positions(client: Client, group: str, streams: Iterable[str]) -> dict[str, GroupPosition]:
    """Where `group` stands on those of `streams` that have it."""
    found: dict[str, GroupPosition] = {}
    for stream, groups in _groups(client, streams).items():
        about = next((about for about in groups if about[b"name"] == group.encode()), None)
        if about is not None:
            at = Position(EntryId.parse(about[b"last-delivered-id"]), about[b"entries-read"])
            found[stream] = GroupPosition(at, about[b"pending"])
    return found


def shown(client: Client, group: str, streams: Iterable[str]) -> Offsets:
    """What `group` says was committed at least, on those of `streams` that have it. "" is no group."""
    return {stream: about.at for stream, about in group_positions(client, group, streams).items()} if group else {}


def _groups(client: Client, streams: Iterable[str]) -> dict[str, list[dict[bytes, Any]]]:
    """The consumer groups of each stream; none of one that does not exist."""
    names = list(streams)
    replies = [_answered(reply) for reply in fetch_calls(client, [("XINFO", "GROUPS", name) for name in names])]
    return {
        name: [dict(zip(items[::2], items[1::2], strict=True)) for items in reply] if isinstance(reply, list) else []
        for name, reply in zip(names, replies, strict=True)
    }


def _answered(reply: Reply) -> Reply:
    """Let pass what the planner has its own word on: a stream that is gone, does not exist yet, or is no stream."""
    if isinstance(reply, AccessDenied):
        raise AccessDenied(f'{reply}; grant XGROUP and XINFO on it, or show no progress: option("group", "")')
    return reply if isinstance(reply, GroupMissing | CommandFailed | WrongType) else raise_if_error(reply)


class ProgressGroup:
    """Keeps the consumer group `group` of every stream at the query's position; "" keeps none.

    `ours`: only a handler's own workers read through it, from whom this run has taken over.
    """

    def __init__(self, client: Client, group: str, *, ours: bool = False, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._group = group
        self._ours = ours
        self._clock = clock
        self._shown: Offsets = {}
        self._due: Offsets = {}
        self._offsets: Offsets = {}

    def show(self, offsets: Offsets) -> None:
        """Move the group to `offsets` on the streams where it stands elsewhere; make it where it is missing.

        What takes longer than a twentieth of a second is left for the next call. Raises ConfigError if somebody else uses the
        group: it has consumers or pending entries.
        """
        if not self._group:
            return
        if offsets is not self._offsets:
            shown = self._shown
            moved = {stream: at for stream, at in offsets.items() if shown.get(stream) != at}
            # Those that wait for their turn come first.
            self._due = {stream: moved.pop(stream) for stream in self._due if stream in moved} | moved
            self._offsets = offsets
        self._catch_up(self._clock.monotonic_ms() + _MOST_MS)

    def catch_up(self) -> None:
        """Do what was left. Raises as `show`."""
        self._catch_up(float("inf"))

    def _catch_up(self, until_ms: float) -> None:
        while self._due:
            some = dict(islice(self._due.items(), _STREAMS_AT_A_TIME))
            self._move(some)
            self._shown |= some
            for stream in some:
                del self._due[stream]
            if self._clock.monotonic_ms() >= until_ms:
                return

    def _move(self, moved: Offsets) -> None:
        made = self._made({stream: at for stream, at in moved.items() if stream not in self._shown})
        moved = {stream: at for stream, at in moved.items() if stream not in made}
        replies = self._sent("SETID", moved)
        self._sent(
            "CREATE", {stream: moved[stream] for stream, reply in replies.items() if isinstance(reply, GroupMissing)}
        )

    def _made(self, new: Offsets) -> set[str]:
        """Make the group on streams that may not have it yet; return those that had none. Raises ConfigError."""
        replies = self._sent("CREATE", new)
        existing = [
            stream
            for stream, reply in replies.items()
            if isinstance(reply, CommandFailed) and reply.code == "BUSYGROUP"
        ]
        if not self._ours:  # a worker may read once more before it sees that it is not in charge any more
            self._refuse_foreign(existing)
        return new.keys() - existing

    def _refuse_foreign(self, streams: Iterable[str]) -> None:
        for stream, groups in _groups(self._client, streams).items():
            for group in groups:
                if group[b"name"] == self._group.encode() and (group[b"consumers"] or group[b"pending"]):
                    raise ConfigError(
                        f"the group {self._group!r} of stream {stream!r} has {group[b'consumers']} consumers and "
                        f"{group[b'pending']} pending entries, so others read through it: give this query a group of "
                        'its own with option("group", NAME), or "" to show no progress'
                    )

    def _sent(self, verb: str, places: Offsets) -> dict[str, Reply]:
        replies = fetch_calls(self._client, [self._command(verb, *item) for item in places.items()])
        return {stream: _answered(reply) for stream, reply in zip(places, replies, strict=True)}

    def _command(self, verb: str, stream: str, at: Position) -> Command:
        known: Command = () if at.added is None else ("ENTRIESREAD", at.added)
        return ("XGROUP", verb, stream, self._group, str(at.id), *known)
