"""How a consumer balances, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from millstream.errors import ConfigError, text_of

_LEAST_LEASE_MS, _MOST_LEASE_MS = 300, 300_000


@dataclass(frozen=True, kw_only=True)
class BalancerPolicy:
    """How a `Balancer` takes and keeps streams.

    * `lease_ms`: so long after a consumer was last heard of its streams go to others, in milliseconds; it is heard of
      three times as often. The price of a short one is that a pause of the process costs it its streams.
    * `most_streams`: so many streams at most; None = its whole share
    * `weight`: its part of all streams, beside the weights of the others. A function is asked in every round, so that a
      consumer whose streams lag can have fewer of them.
    * `recover`: "share" takes what other consumers lost or gave back, up to the share of this one. "claim" leaves it to
      the program, which is told by `StreamExpired` and calls `claim`; nothing is moved for balance then.
    * `moves`: fraction of all streams that may change hands in a second for the sake of balance; ten may in any case
    * `drain_ms`: a stream that is to be given back is taken away after so many milliseconds, if it was not released
    * `most_waiting`: while so many notifications wait for the program, no more streams are taken
    * `most_losses`: a stream whose owner was lost so many times without an orderly release between is given up as a dead
      letter of the service; None = never

    Raises ConfigError for values that make no sense.
    """

    lease_ms: int = 5_000
    most_streams: int | None = None
    weight: float | Callable[[], float] = 1.0
    recover: Literal["share", "claim"] = "share"
    moves: float = 0.05
    drain_ms: int = 30_000
    most_waiting: int = 500
    most_losses: int | None = None

    def __post_init__(self) -> None:
        if not _LEAST_LEASE_MS <= self.lease_ms <= _MOST_LEASE_MS:
            raise ConfigError(f"lease_ms={self.lease_ms}: use {_LEAST_LEASE_MS} to {_MOST_LEASE_MS:,} milliseconds")
        if not callable(self.weight):
            check_weight(self.weight)
        if not 0 < self.moves <= 1:
            raise ConfigError(f"moves={self.moves}: use a fraction of the streams, like 0.05")
        if self.recover not in ("share", "claim"):
            raise ConfigError(f'recover={self.recover!r}: use "share" or "claim"')
        for name in ("most_streams", "most_waiting", "most_losses", "drain_ms"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: use 1 or more")

    def weight_now(self) -> float:
        """The weight at this moment. Raises ConfigError for one that cannot be, or that its function fails to say."""
        if not callable(self.weight):
            return self.weight
        try:
            return check_weight(self.weight())
        except Exception as error:
            raise ConfigError(f"the weight cannot be told: {text_of(error)}") from error


def check_weight(weight: float) -> float:
    """Return `weight` if shares can be made of it; raise ConfigError if not."""
    if not 0.001 <= weight <= 1_000_000:
        raise ConfigError(
            f"weight={weight}: use a number from 0.001 to 1,000,000, like 1 for all consumers that are alike"
        )
    return weight
