"""Notifications of a balancer to its program: leases, and their changes."""

from dataclasses import dataclass, field
from typing import Any, Literal

DisownCause = Literal["rebalanced", "stuck", "expired", "lost contact", "forgotten", "taken away"]
"""Why work on a stream must stop.

* "rebalanced": the stream goes to another consumer
* "stuck": its own deadline passed
* "expired": the consumer sent no heartbeat for too long
* "lost contact": the consumer cannot reach Redis
* "forgotten": Redis does not know the lease any more, after a failure or because a call whose reply was lost ended it
* "taken away": an operator ended it (`millstream lease release`, `millstream lease remove`)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One consumer's lease on one stream.

    * `token`: the fencing token, greater than those of all earlier leases on the stream. Pass it to every store the
      program writes to: a writer with a smaller one is stale (M. Kleppmann, "How to do distributed locking", 2016).
    * `info`: the info of the stream's announcement
    * `announced`: id of the announcement
    * `losses`: how many owners of the stream were lost since the last release by an owner
    """

    stream: str
    token: int
    info: Any = None
    announced: str = ""
    losses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAdded:
    """A stream is assigned to this consumer."""

    lease: Lease

    @property
    def stream(self) -> str:
        """Its name."""
        return self.lease.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamExpired:
    """The stream has no owner: `claim` it, or leave it to others. Repeated until it has an owner."""

    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDisowned:
    """Work on a stream must stop.

    If `why` is "rebalanced", the lease is still valid: finish the messages in flight and `release` it within `drain_ms`
    milliseconds. Otherwise another consumer may own the stream already, and writes under the lease are refused.
    """

    lease: Lease
    why: DisownCause
    drain_ms: int = 0

    @property
    def stream(self) -> str:
        """Its name."""
        return self.lease.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """The last notification. `error`: the cause, unless the balancer was closed."""

    error: Exception | None = field(default=None)


Notice = StreamAdded | StreamExpired | StreamDisowned | Terminated
