"""How a worker reads, holds and stops."""

from dataclasses import dataclass

from millstream.errors import ConfigError

_POSITIVE = ("prefetch", "prefetch_bytes", "batch", "threads", "block_ms", "claim_ms", "sweep_ms", "look_ahead")


@dataclass(frozen=True, kw_only=True)
class WorkerPolicy:
    """How one worker works on the streams of a handler. Times are in milliseconds.

    * `prefetch`: most entries in hand; as few are taken as keep the handler busy
    * `prefetch_bytes`: most bytes of names and values in hand; one entry is taken in any case, however large it is
    * `batch`: most entries in one read, and in one commit
    * `threads`: how many messages a plain handler works on at once; an async one has its own `concurrency`
    * `block_ms`: how long a read waits for the first entry
    * `claim_ms`: an entry whose worker has not been heard of for so long is adopted by another
    * `sweep_ms`: how often a worker looks for such entries, for new streams, and whether it is paused
    * `stop_ms`: how long a stop waits for the messages that run
    * `look_ahead`: most entries that wait in the lines of keys, of a handler with a key
    * `trim`: remove from the stream what no consumer group needs any more

    Raises ConfigError for values that make no sense.
    """

    prefetch: int = 4_000
    prefetch_bytes: int = 64 * 2**20
    batch: int = 1_000
    threads: int = 16
    block_ms: int = 1_000
    claim_ms: int = 30_000
    sweep_ms: int = 500
    stop_ms: int = 25_000
    look_ahead: int = 250_000
    trim: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a worker must be at least 1, not {getattr(self, name)}")
        if self.stop_ms < 0:
            raise ConfigError("stop_ms of a worker must not be negative")
