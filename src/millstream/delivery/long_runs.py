"""LongRun: a message on which a worker's handler has been running for long, reported so that operators see it."""

from collections.abc import Iterable, Sequence

import msgspec

from millstream.delivery.expiring_members import read_members, replace_members
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age
from millstream.redis_client.key_names import long_runs_key
from millstream.redis_client.pipelining import server_time_ms

LONG_MS = 60_000.0
"""A run that takes longer than this is reported."""
LONG_ISOLATED_MS = 5_000.0
"""The same for a run in isolation: its process starts nothing else meanwhile."""
HELD_MS = 30_000
"""How long a report is kept, unless it is repeated."""

_MAX_REPORTS = 20


class LongRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has not ended.

    * `handler`: its label; `stream`, `id`, `key`: the message, printable; `worker`: the consumer that runs it
    * `started_ms`: when the run started (Unix milliseconds); `time_limit_ms`: after how long it is ended
    * `isolated`: its process starts no other message until it has ended
    """

    handler: str
    stream: str
    id: str
    key: str | None
    worker: str
    started_ms: int
    time_limit_ms: int
    isolated: bool = False

    def describe(self, now_ms: float) -> str:
        """Return it in one line; `now_ms`: Unix milliseconds."""
        key = "" if self.key is None else f", key {self.key},"
        isolated = "; it runs in isolation: that process starts no other message" if self.isolated else ""
        return (
            f"{self.handler}: message {self.id} of {self.stream}{key} has been running for "
            f"{format_age(max(0.0, now_ms - self.started_ms))} on worker {self.worker}; its time limit ends it after "
            f"{format_age(self.time_limit_ms)}{isolated}"
        )


def report_long_runs(client: Client, app: str, runs: Sequence[LongRun], ended: Sequence[LongRun] = ()) -> None:
    """Report runs, the longest of them; repeat it before `HELD_MS`, with equal values. Raises RedisError.

    The reports of those that have `ended` are removed.
    """
    longest = sorted(runs, key=lambda one: one.started_ms)[:_MAX_REPORTS]
    replace_members(client, long_runs_key(app), HELD_MS, kept=longest, ended=ended)


def read_long_runs(client: Client, apps: Iterable[str]) -> tuple[LongRun, ...]:
    """Return the reported runs of `apps`, the longest first, as far as this user may read them. Raises RedisError."""
    found = read_members(client, map(long_runs_key, sorted(set(apps))), LongRun, server_time_ms(client))
    return tuple(sorted((run for runs in found for run, _ in runs), key=lambda one: one.started_ms))
