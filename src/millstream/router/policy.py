"""How a router reads."""

from dataclasses import dataclass
from typing import Literal

from millstream.errors import ConfigError

ReaderName = Literal["tracking", "pool"]


@dataclass(frozen=True, kw_only=True)
class PoolPolicy:
    """The pool of blocking reads, for servers that do not say what changed.

    * `workers`: connections at least; `max_workers`: as many more as are needed for every stream to be listened to,
      up to this. The same number twice makes a fixed pool
    * `streams`: streams in one blocking read
    * `block_ms`: how long it waits, in milliseconds; None: not at all, which keeps a core and the server busy

    With more streams than `max_workers` x `streams`, a message waits for its stream's turn: up to
    streams / (max_workers x streams in a read) x `block_ms`. On Redis Cluster a read holds streams of one hash slot only.
    Raises ConfigError for values that make no sense.
    """

    workers: int = 8
    max_workers: int = 64
    streams: int = 100
    block_ms: int | None = 100

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= self.max_workers or self.streams < 1:
            raise ConfigError("PoolPolicy: give 1 worker or more, no more than max_workers, and 1 stream or more")
        if self.block_ms is not None and self.block_ms < 1:
            raise ConfigError("PoolPolicy: block_ms must be 1 or more, or None")


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """How much is read at a time, and ahead, and how often everything is looked at.

    * `streams`: streams in one read; `count`: entries of each at most
    * `reply_bytes`: what a reply should not exceed, in bytes; `count` is lowered by the size of the entries seen so far,
      to 1 at least, and streams in one read as well
    * `budget_bytes`: what the buffers of all subscriptions may hold together, in bytes. While they hold that much, each
      goes on with 16 kB, or one message
    * `sweep_ms`: within this time, in milliseconds, every stream is read once even if nothing was heard of it

    Raises ConfigError for values that make no sense.
    """

    streams: int = 256
    count: int = 500
    reply_bytes: int = 256 * 1024
    budget_bytes: int = 256 * 1024 * 1024
    sweep_ms: float = 60_000.0

    def __post_init__(self) -> None:
        if min(self.streams, self.count, self.reply_bytes, self.budget_bytes) < 1 or self.sweep_ms <= 0:
            raise ConfigError("ReadPolicy: streams, count, reply_bytes, budget_bytes and sweep_ms must be positive")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that a router was told about reading. `choice`: which reader; "auto": the best that the server can do."""

    choice: Literal["auto", "tracking", "pool"]
    read: ReadPolicy
    pool: PoolPolicy
