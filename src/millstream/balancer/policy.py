"""BalancerPolicy: the settings of a consumer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from millstream.errors import ConfigError, text_of

_LEAST_LEASE_MS, _MOST_LEASE_MS = 300, 300_000


@dataclass(frozen=True, kw_only=True)
class BalancerPolicy:
    """How a `Balancer` leases streams and keeps them.

    * `lease_ms`: milliseconds without a heartbeat after which a consumer's streams are reassigned; it sends three
      heartbeats in that time. The price of a short lease: a pause of the process costs it its streams.
    * `max_streams`: the most streams; None = its whole share
    * `weight`: its share of all streams, relative to the weights of the others. A function is called at every
      heartbeat, so that a consumer with a backlog can have fewer streams.
    * `recover`: "share" leases streams that other consumers lost or released, up to the share of this one. "claim"
      leaves that to the program, which gets `StreamExpired` and calls `claim`; no stream is moved for balance then.
    * `moves`: fraction of all streams that may be moved in a second for the sake of balance; ten may in any case
    * `drain_ms`: milliseconds after which the lease on a revoked stream that was not released ends
    * `max_waiting`: while so many notifications are queued, no more streams are leased
    * `max_losses`: a stream that lost so many owners without a release in between becomes a dead letter of the
      service; None = never

    Raises ConfigError for values out of range.
    """

    lease_ms: int = 5_000
    max_streams: int | None = None
    weight: float | Callable[[], float] = 1.0
    recover: Literal["share", "claim"] = "share"
    moves: float = 0.05
    drain_ms: int = 30_000
    max_waiting: int = 500
    max_losses: int | None = None

    def __post_init__(self) -> None:
        if not _LEAST_LEASE_MS <= self.lease_ms <= _MOST_LEASE_MS:
            raise ConfigError(f"lease_ms={self.lease_ms}: use {_LEAST_LEASE_MS} to {_MOST_LEASE_MS:,} milliseconds")
        if not callable(self.weight):
            check_weight(self.weight)
        if not 0 < self.moves <= 1:
            raise ConfigError(f"moves={self.moves}: use a fraction of the streams, like 0.05")
        if self.recover not in ("share", "claim"):
            raise ConfigError(f'recover={self.recover!r}: use "share" or "claim"')
        for name in ("max_streams", "max_waiting", "max_losses", "drain_ms"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: use 1 or more")

    def weight_now(self) -> float:
        """The current weight. Raises ConfigError if it is out of range, or its function fails."""
        if not callable(self.weight):
            return self.weight
        try:
            return check_weight(self.weight())
        except BaseException as error:  # the program's function may raise anything, SystemExit too
            raise ConfigError(f"weight() failed: {text_of(error)}; return a number from 0.001 to 1,000,000") from error


def check_weight(weight: float) -> float:
    """Return `weight` if it is valid; raise ConfigError if not."""
    if not 0.001 <= weight <= 1_000_000:
        raise ConfigError(f"weight={weight}: use a number from 0.001 to 1,000,000, such as 1 for equal shares")
    return weight
