"""Shows a query's progress in Redis: a consumer group per stream that stands where the query has committed.

Nothing is read through the group. It is moved from the planning of the next batch, because Spark's own commit call
comes one batch late and never for the last one.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from millstream.client import Client, Command, Reply, raise_if_error
from millstream.errors import AccessDenied, CommandFailed, ConfigError, GroupMissing, WrongType
from millstream.model import EntryId
from millstream.spark.facts import ask
from millstream.spark.offsets import Offsets, Position


class Standing(NamedTuple):
    """Where a group stands on one stream, and how many of the entries that it was given nobody has confirmed."""

    at: Position
    pending: int


def standings(client: Client, group: str, streams: Iterable[str]) -> dict[str, Standing]:
    """Where `group` stands on those of `streams` that have it."""
    found: dict[str, Standing] = {}
    for stream, groups in _groups(client, streams).items():
        about = next((about for about in groups if about[b"name"] == group.encode()), None)
        if about is not None:
            at = Position(EntryId.parse(about[b"last-delivered-id"]), about[b"entries-read"])
            found[stream] = Standing(at, about[b"pending"])
    return found


def shown(client: Client, group: str, streams: Iterable[str]) -> Offsets:
    """What `group` says was committed at least, on those of `streams` that have it. "" is no group."""
    return {stream: about.at for stream, about in standings(client, group, streams).items()} if group else {}


def _groups(client: Client, streams: Iterable[str]) -> dict[str, list[dict[bytes, Any]]]:
    """The consumer groups of each stream; none of one that does not exist."""
    names = list(streams)
    replies = [_answered(reply) for reply in ask(client, [("XINFO", "GROUPS", name) for name in names])]
    return {
        name: [dict(zip(items[::2], items[1::2], strict=True)) for items in reply] if isinstance(reply, list) else []
        for name, reply in zip(names, replies, strict=True)
    }


def _answered(reply: Reply) -> Reply:
    """Let pass what the planner has its own word on: a stream that is gone, does not exist yet, or is no stream."""
    if isinstance(reply, AccessDenied):
        raise AccessDenied(f'{reply}; grant XGROUP and XINFO on it, or show no progress: option("group", "")')
    return reply if isinstance(reply, GroupMissing | CommandFailed | WrongType) else raise_if_error(reply)


class LagGroup:
    """Keeps the consumer group `group` of every stream at the query's position; "" keeps none.

    `ours`: only a handler's own workers read through it, from whom this run has taken over.
    """

    def __init__(self, client: Client, group: str, *, ours: bool = False) -> None:
        self._client = client
        self._group = group
        self._ours = ours
        self._shown: Offsets = {}

    def show(self, offsets: Offsets) -> None:
        """Move the group to `offsets` on the streams where it stands elsewhere; make it where it is missing.

        Raises ConfigError if somebody else uses the group: it has consumers or pending entries.
        """
        if not self._group:
            return
        moved = {stream: at for stream, at in offsets.items() if self._shown.get(stream) != at}
        if not self._ours:  # a worker may read once more before it sees that it is not in charge any more
            self._refuse_foreign(stream for stream in moved if stream not in self._shown)
        self._move(moved)
        self._shown.update(moved)

    def _refuse_foreign(self, streams: Iterable[str]) -> None:
        for stream, groups in _groups(self._client, streams).items():
            for group in groups:
                if group[b"name"] == self._group.encode() and (group[b"consumers"] or group[b"pending"]):
                    raise ConfigError(
                        f"the group {self._group!r} of stream {stream!r} has {group[b'consumers']} consumers and "
                        f"{group[b'pending']} pending entries, so others read through it: give this query a group of "
                        'its own with option("group", NAME), or "" to show no progress'
                    )

    def _move(self, moved: Offsets) -> None:
        replies = ask(self._client, [self._command("SETID", *item) for item in moved.items()])
        missing = {
            stream: at
            for (stream, at), reply in zip(moved.items(), replies, strict=True)
            if isinstance(reply, GroupMissing)
        }
        made = ask(self._client, [self._command("CREATE", *item) for item in missing.items()])
        for reply in (*replies, *made):
            _answered(reply)

    def _command(self, verb: str, stream: str, at: Position) -> Command:
        known: Command = () if at.added is None else ("ENTRIESREAD", at.added)
        return ("XGROUP", verb, stream, self._group, str(at.id), *known)
