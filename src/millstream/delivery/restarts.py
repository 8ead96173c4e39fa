"""Restarts: which worker processes of an app ended without being told to within ten minutes, so that operators see it."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import restarts_key
from millstream.redis_client.pipelining import send_all, server_time_ms
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.scripts import Script

HOLD_MEMBERS = Script("shared/hold_members")

KEPT_MS = 600_000
"""How long a restart is kept."""
CRASH_LOOP = 3
"""So many restarts are a crash loop, if the last was within two minutes."""

_RECENT_MS = 120_000


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """A process ended without being told to. `incarnation` is its unique name, `cause` says how it ended."""

    worker: str
    incarnation: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class RecentRestarts:
    """The restarts of an app within `KEPT_MS`: how many, and the worker, the cause and the age of the last."""

    app: str
    count: int
    worker: str
    cause: str
    age_ms: int

    @property
    def is_crash_loop(self) -> bool:
        """True if processes end again and again, up to now."""
        return self.count >= CRASH_LOOP and self.age_ms < _RECENT_MS

    def describe(self) -> str:
        """Return it in one line."""
        return (
            f"{self.app}: {pluralize(self.count, 'restart')} of worker processes within {KEPT_MS // 60_000} min; "
            f"the last {format_age(self.age_ms)} ago: {self.worker} {self.cause}"
        )


def record_restart(client: Client, app: str, restart: Restart) -> None:
    """Record a restart. May be repeated. Raises RedisError."""
    client.script(HOLD_MEMBERS, (restarts_key(app),), (KEPT_MS, msgspec.json.encode(restart)))


def read_restarts(client: Client, apps: Iterable[str]) -> tuple[RecentRestarts, ...]:
    """Return the recent restarts of those of `apps` that have any and that this user may read. Raises RedisError."""
    asked = sorted(set(apps))
    now_ms = server_time_ms(client)
    replies = send_all(client, [("ZRANGE", restarts_key(app), 0, -1, "WITHSCORES") for app in asked])
    found = []
    for app, reply in zip(asked, replies, strict=True):
        if isinstance(reply, AccessDenied | WrongType):
            continue
        # A score is the time until which the restart is kept.
        kept = [(member, float(until)) for member, until in pairs_of(raise_if_error(reply)) if float(until) > now_ms]
        if kept:
            last, until_ms = kept[-1]
            try:
                restart = msgspec.json.decode(last, type=Restart)
            except (msgspec.MsgspecError, UnicodeDecodeError):  # another program has written there
                continue
            found.append(
                RecentRestarts(
                    app=app,
                    count=len(kept),
                    worker=restart.worker,
                    cause=restart.cause,
                    age_ms=max(0, round(now_ms + KEPT_MS - until_ms)),
                )
            )
    return tuple(found)
