"""Policies of a router: how much it reads at a time, and the size of its pool."""

from dataclasses import dataclass
from typing import Literal

from millstream.errors import ConfigError

ReaderName = Literal["tracking", "pool"]


@dataclass(frozen=True, kw_only=True)
class PoolPolicy:
    """The pool of blocking reads, for servers that do not report changes.

    * `workers`: the fewest connections; `max_workers`: the most, opened as needed to wait on every stream. The same
      number twice makes a fixed pool
    * `streams`: streams in one blocking read
    * `block_ms`: how long a read blocks, in milliseconds; None: not at all, which keeps a core and the server busy

    With more streams than `max_workers` x `streams`, a message waits for its stream's turn: up to streams /
    (max_workers x streams in a read) x `block_ms`. On Redis Cluster a read holds streams of one hash slot only. Raises
    ConfigError for values out of range.
    """

    workers: int = 8
    max_workers: int = 64
    streams: int = 100
    block_ms: int | None = 100

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= self.max_workers or self.streams < 1:
            raise ConfigError("PoolPolicy: workers must be 1 to max_workers, and streams 1 or more")
        if self.block_ms is not None and self.block_ms < 1:
            raise ConfigError("PoolPolicy: block_ms must be 1 or more, or None")


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """How much is read at a time, and ahead, and how often every stream is swept.

    * `streams`: the most streams in one read; `count`: the most entries of each
    * `reply_bytes`: about the largest reply, in bytes: sizes of past entries lower `count`, to 1 at least, and the
      streams in one read as well
    * `budget_bytes`: the most bytes in the buffers of all subscriptions together. At that limit each subscription reads
      ahead 16 kB, or one message
    * `sweep_ms`: within this time, in milliseconds, every stream is read once even without a reported change

    Raises ConfigError for values out of range.
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
    """The settings of a router. `reader`: the requested reader; "auto": the best that the server supports."""

    reader: Literal["auto", "tracking", "pool"]
    read: ReadPolicy
    pool: PoolPolicy
