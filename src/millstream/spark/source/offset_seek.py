"""Seek: finds the id of the n-th entry after a given one, without fetching the entries between.

Redis has no command for it. The planner reads n entries through a temporary consumer group with replies switched off,
then reads the last delivered id of the group: a third of what fetching the entries would cost the server, and no
payload on the wire (Redis documentation, XREADGROUP and CLIENT REPLY). The group has a unique name, so that two
planners of one stream do not move each other's. If a planner is killed, the next planner of that stream removes its
group an hour later.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from millstream.errors import AccessDenied, CommandFailed, GroupMissing, Unavailable
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.resp import Command, Reply
from millstream.spark.source.offsets import Position
from millstream.spark.source.stream_info import StreamInfo, fetch_calls, parse_full_info

MAX_SKIP = 10_000
"""Entries that one command skips at most: it blocks Redis for about 3 ms."""

_PREFIX = "millstream:plan:"
_LEFTOVER_AGE_MS = 3_600_000  # far more than the clocks of two drivers may differ
_PAIRS_PER_TRIP = 1000


class Seek(NamedTuple):
    """A request: from `after`, find the id of every `step`-th entry, up to `most` of them."""

    after: EntryId
    step: int
    most: int


class SeekResult(NamedTuple):
    """The ids found, fewer where the stream has fewer entries; and the stream info after the last of them."""

    ids: list[EntryId]
    info: StreamInfo | None


def seek(
    client: Client, requests: Mapping[str, Seek], *, give_up: Callable[[], bool] = lambda: False
) -> dict[str, SeekResult]:
    """Run the request of each stream. Once `give_up` returns True, return what is found so far.

    Raises AccessDenied if the Redis user may not use consumer groups, Unavailable if the caller has to retry.
    """
    if not requests:
        return {}
    group = f"{_PREFIX}{time.time_ns() // 1_000_000}:{secrets.token_hex(4)}"
    seekers = [_Seeker(stream, request) for stream, request in requests.items()]
    creates = [("XGROUP", "CREATE", seeker.stream, group, str(seeker.request.after)) for seeker in seekers]
    # The seek itself runs without replies, so it shows no refusal. This probe fails: no such group, or access denied.
    probe = ("XREADGROUP", "GROUP", f"{group}:none", "planner", "STREAMS", seekers[0].stream, ">")
    try:
        *replies, _ = [_check_access(reply) for reply in fetch_calls(client, [*creates, probe])]
        # CommandFailed: the stream is gone.
        _skip_all(
            client,
            group,
            [seeker for seeker, reply in zip(seekers, replies, strict=True) if not isinstance(reply, CommandFailed)],
            give_up,
        )
    finally:
        removed = fetch_calls(client, [("XGROUP", "DESTROY", stream, group) for stream in requests])
    for reply in removed:
        _check_access(reply)
    return {seeker.stream: SeekResult(seeker.ids, seeker.info) for seeker in seekers}


def position_after(
    start: Position, count: int, found: EntryId, before: StreamInfo, after: StreamInfo | None
) -> Position:
    """Return the position `count` entries after `start`, whose id a seek has `found`.

    It has the number of entries ever added unless entries may have been removed between `start` and it: `before` and
    `after` are the stream info before and after the seek.
    """
    if start.entries_added is None or after is None or after.has_gaps_after(start.id):
        return Position(found, None)
    is_whole = after.is_whole_after(start.id) or after.entries_removed == before.entries_removed
    return Position(found, start.entries_added + count if is_whole else None)


def _check_access(reply: Reply) -> Reply:
    if isinstance(reply, AccessDenied) and not reply.concerns_credentials:
        raise AccessDenied(f"{reply}; to limit or split a batch, grant XGROUP, XREADGROUP and XINFO on the stream")
    return reply if isinstance(reply, CommandFailed | GroupMissing) else raise_if_error(reply)


class _Seeker:
    """The seek on one stream: the ids found, and the entries skipped since the last of them."""

    def __init__(self, stream: str, request: Seek) -> None:
        self.stream = stream
        self.ids: list[EntryId] = []
        self.info: StreamInfo | None = None
        self.request = request
        self._last_id = request.after
        self._skipped = 0

    @property
    def skip_count(self) -> int:
        """Entries to skip next; 0 when all ids are found or the stream has ended."""
        request = self.request
        return min(MAX_SKIP, request.step - self._skipped) if len(self.ids) < request.most else 0

    def on_reply(self, own: str, reply: Reply) -> list[Command]:
        """Record the id after a skip; return commands that remove groups of killed planners."""
        self.info, groups = parse_full_info(self.stream, _check_access(reply))
        if own not in groups:
            raise Unavailable(f"the planning group on stream {self.stream!r} was deleted; planning again")
        self._on_position(groups[own])
        return [("XGROUP", "DESTROY", self.stream, name) for name in groups if _is_leftover(name)]

    def _on_position(self, at: EntryId) -> None:
        if at == self._last_id:
            self.request = self.request._replace(most=0)  # the stream has ended
            return
        self._skipped += self.skip_count
        self._last_id = at
        if self._skipped == self.request.step:
            self.ids.append(at)
            self._skipped = 0


def _skip_all(client: Client, group: str, seekers: Iterable[_Seeker], give_up: Callable[[], bool]) -> None:
    leftovers: list[Command] = []
    active = [seeker for seeker in seekers if seeker.skip_count]
    while active and not give_up():
        for at in range(0, len(active), _PAIRS_PER_TRIP):
            some = active[at : at + _PAIRS_PER_TRIP]
            for seeker, reply in zip(
                some, client.pipeline_skipping([_skip_commands(group, seeker) for seeker in some]), strict=True
            ):
                leftovers += seeker.on_reply(group, reply)
        active = [seeker for seeker in active if seeker.skip_count]
    fetch_calls(client, leftovers)


def _skip_commands(group: str, seeker: _Seeker) -> tuple[Command, Command]:
    stream = seeker.stream
    skip = ("XREADGROUP", "GROUP", group, "planner", "COUNT", seeker.skip_count, "NOACK", "STREAMS", stream, ">")
    return skip, ("XINFO", "STREAM", stream, "FULL", "COUNT", 1)


def _is_leftover(name: str) -> bool:
    if not name.startswith(_PREFIX):
        return False
    created_ms = name[len(_PREFIX) :].partition(":")[0]
    return created_ms.isdigit() and time.time() * 1000 - int(created_ms) > _LEFTOVER_AGE_MS
