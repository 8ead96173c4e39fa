"""Shows a query's progress in Redis: a consumer group per stream that stands where the query has committed.

Nothing is read through the group. It is moved from the planning of the next batch, because Spark's own commit call
comes one batch late and never for the last one.
"""

from collections.abc import Iterable

from millstream.client import Client, Command, Reply, raise_if_error
from millstream.errors import AccessDenied, CommandFailed, ConfigError, GroupMissing
from millstream.spark.facts import ask
from millstream.spark.offsets import Offsets, Position


class LagGroup:
    """Keeps the consumer group `group` of every stream at the query's position; "" keeps none."""

    def __init__(self, client: Client, group: str) -> None:
        self._client = client
        self._group = group
        self._shown: Offsets = {}

    def show(self, offsets: Offsets) -> None:
        """Move the group to `offsets` on the streams where it stands elsewhere; make it where it is missing.

        Raises ConfigError if somebody else uses the group: it has consumers or pending entries.
        """
        if not self._group:
            return
        moved = {stream: at for stream, at in offsets.items() if self._shown.get(stream) != at}
        self._refuse_foreign(stream for stream in moved if stream not in self._shown)
        self._move(moved)
        self._shown.update(moved)

    def _refuse_foreign(self, streams: Iterable[str]) -> None:
        names = list(streams)
        for stream, reply in zip(names, ask(self._client, [("XINFO", "GROUPS", s) for s in names]), strict=True):
            for items in [] if isinstance(self._answered(reply), CommandFailed) else reply:
                group = dict(zip(items[::2], items[1::2], strict=True))
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
            self._answered(reply)

    def _command(self, verb: str, stream: str, at: Position) -> Command:
        known: Command = () if at.added is None else ("ENTRIESREAD", at.added)
        return ("XGROUP", verb, stream, self._group, str(at.id), *known)

    def _answered(self, reply: Reply) -> Reply:
        """Let pass what the planner has its own word on: a stream that is gone, or does not exist yet."""
        if isinstance(reply, AccessDenied):
            raise AccessDenied(f'{reply}; grant XGROUP and XINFO on it, or show no progress: option("group", "")')
        return reply if isinstance(reply, GroupMissing | CommandFailed) else raise_if_error(reply)
