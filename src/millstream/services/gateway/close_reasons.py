"""Close reasons: why a connection ends, and what its client is sent."""

from dataclasses import dataclass
from typing import Literal

from millstream.errors import MillstreamError
from millstream.router import TooSlow

EndReason = Literal["left", "slow", "stalled", "stopping", "failed"]

REFUSALS = (400, 401, 403, 405, 429, 503)
"""The HTTP statuses with which a connection is refused before it begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseReason:
    """Why a connection ends.

    * `code`: closes a WebSocket (RFC 6455, 7.4)
    * `text`: for people
    * `reconnect_ms`: about when an EventSource should reconnect, in milliseconds
    """

    reason: EndReason
    code: int
    text: str
    reconnect_ms: int = 1_000


LEFT = CloseReason(reason="left", code=1000, text="the client left")
STALLED = CloseReason(reason="stalled", code=1006, text="the client reads nothing")
STOPPING = CloseReason(reason="stopping", code=1012, text="the server is stopping; reconnect and resume")
SLOW = CloseReason(reason="slow", code=1013, text="the client is too slow; reconnect and resume", reconnect_ms=200)


def close_reason_of(error: BaseException) -> CloseReason | None:
    """The close reason for an error of a subscription or a connection; None for an unexpected error."""
    if isinstance(error, TooSlow):
        return SLOW
    if isinstance(error, MillstreamError):
        return CloseReason(reason="failed", code=1011, text=str(error), reconnect_ms=10_000)
    return LEFT if isinstance(error, OSError) else None
