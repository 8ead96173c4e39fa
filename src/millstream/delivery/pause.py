"""Pause: why a handler reads nothing new of a stream, as it is stored in Redis."""

import time
from typing import Literal

import msgspec

from millstream.handlers.breaker_window import Trip
from millstream.model import Breaker
from millstream.redis_client.formats import format_time


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of a handler on one stream.

    * `by`: an operator, or the handler's breaker; `at_ms`: since when, in Unix milliseconds, 0 if unknown
    * `until_ms`: when it ends by itself; None: with `millstream resume`
    * `worker`: the worker, or run, whose breaker opened
    * `cause`, `count`, `of`, `error`: `count` of the last `of` messages became dead letters for `cause`; an example
    """

    by: Literal["operator", "breaker"] = "operator"
    at_ms: int = 0
    until_ms: int | None = None
    worker: str = ""
    cause: str = ""
    count: int = 0
    of: int = 0
    error: str = ""

    def encode(self) -> bytes:
        """Return it as it is stored."""
        return msgspec.json.encode(self)

    def describe(self, label: str) -> str:
        """Return in one line why, and since when, the handler `label` is paused, and what to do."""
        todo = f"millstream resume {label}"
        return f"{self.reason}; {'fix the cause, then' if self.by == 'breaker' else 'to go on'}: {todo}"

    @property
    def reason(self) -> str:
        """Why, and since when, the handler is paused, in one line."""
        since = f", since {format_time(self.at_ms)}" if self.at_ms else ""
        if self.by == "operator":
            return f"paused by an operator{since}"
        return (
            f"paused by its breaker: {self.count:,} of {self.of:,} messages ended as {self.cause} ({self.error}){since}"
        )


def pause_of(policy: Breaker, trip: Trip, worker: str) -> Pause:
    """Return the pause of a breaker that opens now."""
    now_ms = time.time_ns() // 1_000_000
    until_ms = None if policy.retry_after_s is None else now_ms + round(policy.retry_after_s * 1000)
    return Pause(by="breaker", at_ms=now_ms, until_ms=until_ms, worker=worker, **msgspec.structs.asdict(trip))


def parse_pause(stored: bytes | None, now_ms: float) -> Pause | None:
    """Parse a stored pause; None if there is none or if it is over. An unreadable one counts as an operator's."""
    if stored is None:
        return None
    try:
        pause = msgspec.json.decode(stored, type=Pause)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Pause()
    return None if pause.until_ms is not None and now_ms >= pause.until_ms else pause
