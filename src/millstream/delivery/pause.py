"""Pause: why a handler reads nothing new of a stream, as it is stored in Redis."""

import time
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

from millstream.handlers.breaker import Trip
from millstream.model import Breaker


@dataclass(frozen=True, kw_only=True)
class Pause:
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
        """Return in one line why the handler `label` is paused, and what to do."""
        if self.by == "operator":
            return f"paused by an operator; to go on: millstream resume {label}"
        return (
            f"paused by its breaker: {self.count:,} of {self.of:,} messages ended as {self.cause} ({self.error}); "
            f"fix the cause, then: millstream resume {label}"
        )


def pause_of(policy: Breaker, trip: Trip, worker: str) -> Pause:
    """Return the pause of a breaker that opens now."""
    now_ms = time.time_ns() // 1_000_000
    until_ms = None if policy.retry_after_s is None else now_ms + round(policy.retry_after_s * 1000)
    return Pause(by="breaker", at_ms=now_ms, until_ms=until_ms, worker=worker, **asdict(trip))


def parse_pause(stored: bytes | None, now_ms: float) -> Pause | None:
    """Parse a stored pause; None if there is none or if it is over. What cannot be read is an operator's pause."""
    if stored is None:
        return None
    try:
        pause = msgspec.json.decode(stored, type=Pause)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Pause()
    return None if pause.until_ms is not None and now_ms >= pause.until_ms else pause
