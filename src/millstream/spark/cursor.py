"""Finds the id of the n-th entry after a given one, without fetching what lies between.

Redis has no command for it. A temporary consumer group is read past n entries with the reply switched off, and then
asked where it stands: a third of what fetching the entries would cost the server, and nothing on the wire (Redis
documentation, XREADGROUP and CLIENT REPLY). The group has a name of its own, so that two planners of one stream do
not move each other's; one that a killed planner left behind is removed by the next planner of that stream.
"""

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from millstream.client import Client, Command, Reply, raise_if_error
from millstream.errors import AccessDenied, CommandFailed, GroupMissing, Unavailable
from millstream.model import EntryId
from millstream.spark.facts import ask

CHUNK = 10_000
"""Entries that one command may skip: Redis serves nobody else for about 3 ms."""

_PREFIX = "millstream:plan:"
_LEFTOVER_AGE_MS = 60_000
_PAIRS_PER_TRIP = 1000


class Walk(NamedTuple):
    """A wish: from `after`, note the id of every `step`-th entry, `marks` times."""

    after: EntryId
    step: int
    marks: int


def walk(client: Client, wishes: Mapping[str, Walk]) -> dict[str, list[EntryId]]:
    """Return the ids that each stream's wish asks for; fewer where a stream has fewer entries or is gone.

    Raises AccessDenied if the Redis user may not use consumer groups, Unavailable if it has to be done again.
    """
    group = f"{_PREFIX}{time.time_ns() // 1_000_000}:{secrets.token_hex(4)}"
    made = [("XGROUP", "CREATE", stream, group, str(wish.after)) for stream, wish in wishes.items()]
    walkers = []
    try:
        for (stream, wish), reply in zip(wishes.items(), ask(client, made), strict=True):
            if not isinstance(reply, CommandFailed):  # the stream is gone
                _explain(reply)
                walkers.append(_Walker(stream, wish))
        _skip_all(client, group, walkers)
    finally:
        ask(client, [("XGROUP", "DESTROY", stream, group) for stream in wishes])
    return {walker.stream: walker.found for walker in walkers}


def _explain(reply: Reply) -> None:
    if isinstance(reply, AccessDenied):
        raise AccessDenied(f"{reply}; limiting or splitting a batch needs XGROUP, XREADGROUP and XINFO on the stream")
    raise_if_error(reply)


class _Walker:
    """One stream's way: how far it has come towards its next mark."""

    def __init__(self, stream: str, wish: Walk) -> None:
        self.stream = stream
        self.found: list[EntryId] = []
        self._wish = wish
        self._at = wish.after
        self._skipped = 0

    @property
    def wanted(self) -> int:
        """Entries to skip next; 0 when the wish is fulfilled or the stream has ended."""
        wish = self._wish
        return min(CHUNK, wish.step - self._skipped) if len(self.found) < wish.marks else 0

    def arrive(self, at: EntryId) -> None:
        """Take note that skipping `wanted` entries led to `at`."""
        if at == self._at:
            self._wish = self._wish._replace(marks=0)
            return
        self._skipped += self.wanted
        self._at = at
        if self._skipped == self._wish.step:
            self.found.append(at)
            self._skipped = 0


def _skip_all(client: Client, group: str, walkers: Iterable[_Walker]) -> None:
    active = [walker for walker in walkers if walker.wanted]
    leftovers: set[tuple[str, str]] = set()
    while active:
        for at in range(0, len(active), _PAIRS_PER_TRIP):
            some = active[at : at + _PAIRS_PER_TRIP]
            for walker, reply in zip(some, client.unanswered([_pair(group, w) for w in some]), strict=True):
                groups = {bytes(g[1]).decode("utf-8", "replace"): g for g in _groups(reply)}
                if group not in groups:
                    raise Unavailable(f"the planning group on stream {walker.stream!r} has vanished; it is made again")
                walker.arrive(EntryId.parse(dict(zip(*[iter(groups[group])] * 2))[b"last-delivered-id"]))
                leftovers.update((walker.stream, name) for name in groups if _is_leftover(name))
        active = [walker for walker in active if walker.wanted]
    ask(client, [("XGROUP", "DESTROY", stream, name) for stream, name in leftovers])


def _pair(group: str, walker: _Walker) -> tuple[Command, Command]:
    stream = walker.stream
    skip = ("XREADGROUP", "GROUP", group, "planner", "COUNT", walker.wanted, "NOACK", "STREAMS", stream, ">")
    return skip, ("XINFO", "GROUPS", stream)


def _groups(reply: Reply) -> list[list[bytes]]:
    if isinstance(reply, GroupMissing | CommandFailed):
        return []
    _explain(reply)
    groups: list[list[bytes]] = reply
    return groups


def _is_leftover(name: str) -> bool:
    if not name.startswith(_PREFIX):
        return False
    born_ms = name[len(_PREFIX) :].partition(":")[0]
    return born_ms.isdigit() and time.time() * 1000 - int(born_ms) > _LEFTOVER_AGE_MS
