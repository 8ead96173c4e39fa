"""What a balancer tells its program: leases, and what becomes of them."""

from dataclasses import dataclass, field
from typing import Any, Literal

Why = Literal["rebalanced", "stuck", "expired", "lost contact", "forgotten", "taken away"]
"""Why a stream is not to be worked on any more: others are to have it; its own time ran out; the consumer was not heard
of for too long; it does not hear of Redis; Redis does not know of the lease any more, after a failure or because a call
whose reply was lost has ended it; a person has ended it (`millstream release`, `millstream done`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One consumer's hold on one stream.

    * `token`: the fencing token, greater than those of all leases on the stream before. Hand it to whatever is written
      to: a writer with a smaller one is stale (M. Kleppmann, "How to do distributed locking", 2016).
    * `info`: what the announcement says of the stream
    * `announced`: id of the announcement
    * `losses`: how often owners of the stream were lost since one last gave it back
    """

    stream: str
    token: int
    info: Any = None
    announced: str = ""
    losses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAdded:
    """A stream is this consumer's to work on."""

    lease: Lease

    @property
    def stream(self) -> str:
        """Its name."""
        return self.lease.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamExpired:
    """Nobody has the stream any more: `claim` it, or leave it to others. It is said again until somebody has it."""

    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDisowned:
    """Work on a stream has to end.

    If it is "rebalanced", the lease still holds: finish what is in hand and `release` it within `drain_ms`. Else others
    may have it already, and what is written under the lease is refused.
    """

    lease: Lease
    why: Why
    drain_ms: int = 0

    @property
    def stream(self) -> str:
        """Its name."""
        return self.lease.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """Nothing comes any more. `error`: why, unless the balancer was closed."""

    error: Exception | None = field(default=None)


Notice = StreamAdded | StreamExpired | StreamDisowned | Terminated
