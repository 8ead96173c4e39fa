"""Seek: finds the id of the n-th entry after a given one, without fetching the entries between.

Redis has no command for it. The planner reads n entries through a temporary consumer group with replies switched off,
then reads the last delivered id of the group: a third of what fetching the entries would cost the server, and no
payload on the wire (Redis documentation, XREADGROUP and CLIENT REPLY). The group has a unique name, so that two
planners of one stream do not move each other's. If a planner is killed, the next planner of that stream removes its
group an hour later.
"""

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from millstream.errors import AccessDenied, CommandFailed, GroupMissing, Unavailable
from millstream.model import EntryId
from millstream.redis_client.client import Client, Command, Reply, raise_if_error
from millstream.spark.source.stream_info import StreamInfo, facts_and_groups, fetch_calls

CHUNK = 10_000
"""Entries that one command skips at most: it blocks Redis for about 3 ms."""

_PREFIX = "millstream:plan:"
_LEFTOVER_AGE_MS = 3_600_000  # far more than the clocks of two drivers may differ
_PAIRS_PER_TRIP = 1000


class Seek(NamedTuple):
    """A request: from `after`, find the id of every `step`-th entry, `marks` times."""

    after: EntryId
    step: int
    marks: int


class SeekResult(NamedTuple):
    """The ids found, fewer where the stream has fewer entries; and the stream info after the last of them."""

    marks: list[EntryId]
    facts: StreamInfo | None


def seek(client: Client, wishes: Mapping[str, Seek]) -> dict[str, SeekResult]:
    """Run the request of each stream.

    Raises AccessDenied if the Redis user may not use consumer groups, Unavailable if the caller has to retry.
    """
    if not wishes:
        return {}
    group = f"{_PREFIX}{time.time_ns() // 1_000_000}:{secrets.token_hex(4)}"
    walkers = [_Seeker(stream, wish) for stream, wish in wishes.items()]
    made = [("XGROUP", "CREATE", walker.stream, group, str(walker.wish.after)) for walker in walkers]
    # The seek itself runs without replies, so it shows no refusal. This probe fails: no such group, or access denied.
    probe = ("XREADGROUP", "GROUP", f"{group}:none", "planner", "STREAMS", walkers[0].stream, ">")
    try:
        *replies, _ = [_allowed(reply) for reply in fetch_calls(client, [*made, probe])]
        # CommandFailed: the stream is gone.
        _skip_all(client, group, [w for w, r in zip(walkers, replies, strict=True) if not isinstance(r, CommandFailed)])
    finally:
        removed = fetch_calls(client, [("XGROUP", "DESTROY", stream, group) for stream in wishes])
    for reply in removed:
        _allowed(reply)
    return {walker.stream: SeekResult(walker.found, walker.facts) for walker in walkers}


def _allowed(reply: Reply) -> Reply:
    if isinstance(reply, AccessDenied):
        raise AccessDenied(f"{reply}; to limit or split a batch, grant XGROUP, XREADGROUP and XINFO on the stream")
    return reply if isinstance(reply, CommandFailed | GroupMissing) else raise_if_error(reply)


class _Seeker:
    """The seek on one stream: its id, and the entries skipped since the last mark."""

    def __init__(self, stream: str, wish: Seek) -> None:
        self.stream = stream
        self.found: list[EntryId] = []
        self.facts: StreamInfo | None = None
        self.wish = wish
        self._at = wish.after
        self._skipped = 0

    @property
    def wanted(self) -> int:
        """Entries to skip next; 0 when all marks are found or the stream has ended."""
        wish = self.wish
        return min(CHUNK, wish.step - self._skipped) if len(self.found) < wish.marks else 0

    def hear(self, own: str, reply: Reply) -> list[Command]:
        """Record the id after skipping `wanted` entries; return commands that remove groups of killed planners."""
        self.facts, groups = facts_and_groups(self.stream, _allowed(reply))
        if own not in groups:
            raise Unavailable(f"the planning group on stream {self.stream!r} was deleted; planning again")
        self._arrive(groups[own])
        return [("XGROUP", "DESTROY", self.stream, name) for name in groups if _is_leftover(name)]

    def _arrive(self, at: EntryId) -> None:
        if at == self._at:
            self.wish = self.wish._replace(marks=0)  # the stream has ended
            return
        self._skipped += self.wanted
        self._at = at
        if self._skipped == self.wish.step:
            self.found.append(at)
            self._skipped = 0


def _skip_all(client: Client, group: str, walkers: Iterable[_Seeker]) -> None:
    leftovers: list[Command] = []
    active = [walker for walker in walkers if walker.wanted]
    while active:
        for at in range(0, len(active), _PAIRS_PER_TRIP):
            some = active[at : at + _PAIRS_PER_TRIP]
            for walker, reply in zip(some, client.unanswered([_pair(group, w) for w in some]), strict=True):
                leftovers += walker.hear(group, reply)
        active = [walker for walker in active if walker.wanted]
    fetch_calls(client, leftovers)


def _pair(group: str, walker: _Seeker) -> tuple[Command, Command]:
    stream = walker.stream
    skip = ("XREADGROUP", "GROUP", group, "planner", "COUNT", walker.wanted, "NOACK", "STREAMS", stream, ">")
    return skip, ("XINFO", "STREAM", stream, "FULL", "COUNT", 1)


def _is_leftover(name: str) -> bool:
    if not name.startswith(_PREFIX):
        return False
    born_ms = name[len(_PREFIX) :].partition(":")[0]
    return born_ms.isdigit() and time.time() * 1000 - int(born_ms) > _LEFTOVER_AGE_MS
