"""Restarts: which worker processes of an app ended unrequested within ten minutes, so that operators see it."""

from collections.abc import Iterable

import msgspec

from millstream.delivery.expiring_members import hold_members, read_members
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import restarts_key
from millstream.redis_client.pipelining import server_time_ms

KEPT_MS = 600_000
"""How long a restart is kept."""
CANNOT_CONTINUE = "it cannot continue"
"""In the cause of a process that ended itself for good: no message has crashed it."""
CRASH_LOOP = 3
"""So many restarts are a crash loop, if the last was within two minutes."""

_RECENT_MS = 120_000


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """A process ended unrequested. `incarnation` is its unique name, `cause` says how it ended."""

    worker: str
    incarnation: str
    cause: str


class RecentRestarts(msgspec.Struct, frozen=True, kw_only=True):
    """The restarts of an app within `KEPT_MS`: how many, and the worker, the cause and the age of the last.

    `first_age_ms`: the age of the first.
    """

    app: str
    count: int
    worker: str
    cause: str
    age_ms: int
    first_age_ms: int

    @property
    def is_crash_loop(self) -> bool:
        """True if processes end again and again, up to now."""
        return self.count >= CRASH_LOOP and self.age_ms < _RECENT_MS

    @property
    def number(self) -> str:
        """How many there were, in words."""
        return f"{self.app}: {pluralize(self.count, 'restart')} of worker processes within {KEPT_MS // 60_000} min"

    @property
    def last(self) -> str:
        """The last of them, in words."""
        return f"the last {format_age(self.age_ms)} ago: {self.worker} {self.cause}"

    def describe(self) -> str:
        """Return it in one line."""
        return f"{self.number}; {self.last}"


def record_restart(client: Client, app: str, restart: Restart) -> None:
    """Record a restart. May be repeated. Raises RedisError."""
    hold_members(client, KEPT_MS, {restarts_key(app): (restart,)})


def read_restarts(client: Client, apps: Iterable[str]) -> tuple[RecentRestarts, ...]:
    """Return the recent restarts of those of `apps` that have any and that this user may read. Raises RedisError."""
    asked = sorted(set(apps))
    now_ms = server_time_ms(client)
    found = []
    for app, kept in zip(asked, read_members(client, map(restarts_key, asked), Restart, now_ms), strict=True):
        if kept:
            last, until_ms = kept[-1]
            found.append(
                RecentRestarts(
                    app=app,
                    count=len(kept),
                    worker=last.worker,
                    cause=last.cause,
                    age_ms=_age_ms(until_ms, now_ms),
                    first_age_ms=_age_ms(kept[0][1], now_ms),
                )
            )
    return tuple(found)


def _age_ms(until_ms: float, now_ms: float) -> int:
    return max(0, round(now_ms + KEPT_MS - until_ms))
