"""Worker policy: how a worker prefetches, renews and stops."""

from dataclasses import dataclass

from millstream.errors import ConfigError

TIME_LIMIT_GRACE_MS = 1_000.0
"""How long after its time limit a run that cannot be cancelled is given up, with its process."""

LEAST_FROZEN_MS = 1_000
"""How long a process may be frozen at least: on a busy machine one is silent for a while by chance."""

_POSITIVE = ("prefetch", "prefetch_bytes", "batch", "threads", "block_ms", "claim_ms", "sweep_ms", "look_ahead")


@dataclass(frozen=True, kw_only=True)
class WorkerPolicy:
    """How one worker works on the streams of a handler. Times are in milliseconds.

    * `prefetch`: most entries in flight; the worker fetches as few as keep the handler busy
    * `prefetch_bytes`: most bytes of names and values in flight; one entry is fetched in any case, however large it is
    * `batch`: most entries in one read, and in one commit
    * `threads`: how many messages a plain handler processes at once; an async one has its own `concurrency`
    * `block_ms`: how long a read blocks for the first entry
    * `claim_ms`: other workers claim an entry that its worker has not renewed for so long
    * `frozen_ms`: a process in which no thread of Python has run for so long, though it could, is killed by its
      supervisor; at most two thirds of `claim_ms`. None: that, or the longest time limit of its handlers and a second,
      if that is less
    * `sweep_ms`: how often a worker looks for idle entries, for new streams, and whether it is paused
    * `stop_ms`: how long a stop waits for running messages
    * `look_ahead`: most entries in the key queues, for a handler with a key
    * `trim`: remove entries from the stream that no consumer group needs any more

    Raises ConfigError for values out of range.
    """

    prefetch: int = 4_000
    prefetch_bytes: int = 64 * 2**20
    batch: int = 1_000
    threads: int = 16
    block_ms: int = 1_000
    claim_ms: int = 30_000
    frozen_ms: int | None = None
    sweep_ms: int = 500
    stop_ms: int = 25_000
    look_ahead: int = 250_000
    trim: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a worker must be at least 1, not {getattr(self, name)}")
        if self.frozen_ms is not None and self.frozen_ms < LEAST_FROZEN_MS:
            raise ConfigError(
                f"frozen_ms of a worker must be at least {LEAST_FROZEN_MS:,}, not {self.frozen_ms}: on a busy machine a "
                "healthy process may seem frozen for a moment"
            )
        if self.stop_ms < 0:
            raise ConfigError("stop_ms of a worker must not be negative")
