"""Why a client's connection ends, and what it is told."""

from dataclasses import dataclass
from typing import Literal

from millstream.errors import MillstreamError
from millstream.router import TooSlow


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseReason:
    """One way to end.

    * `code`: to close a WebSocket with (RFC 6455, 7.4)
    * `text`: for people
    * `back_ms`: about when an EventSource should come back, in milliseconds
    """

    reason: Literal["left", "slow", "stalled", "stopping", "failed"]
    code: int
    text: str
    back_ms: int = 1_000


LEFT = CloseReason(reason="left", code=1000, text="the client left")
STALLED = CloseReason(reason="stalled", code=1006, text="the client takes nothing")
STOPPING = CloseReason(reason="stopping", code=1012, text="the server stops: come back and resume")
SLOW = CloseReason(reason="slow", code=1013, text="too slow: come back and resume", back_ms=200)


def close_reason_of(error: BaseException) -> CloseReason | None:
    """What an error of a subscription or of a connection means; None for a mistake of ours."""
    if isinstance(error, TooSlow):
        return SLOW
    if isinstance(error, MillstreamError):
        return CloseReason(reason="failed", code=1011, text=str(error), back_ms=10_000)
    return LEFT if isinstance(error, OSError) else None
