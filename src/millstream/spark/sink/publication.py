"""What the driver does: publish what the tasks of a batch have staged, once, and none of it unless all of it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from millstream.errors import CommandFailed, DataLoss, OutputError, StaleOwner
from millstream.redis_client.client import Arg, Client, Reply, Script
from millstream.redis_client.key_names import SinkKeys
from millstream.spark.sink.manifest import Manifest, StagedTask
from millstream.spark.sink.staging import STAGED_S, stale, sweep, unlink
from millstream.spark.sink.write_options import WriteOptions

# What publishes was staged before and takes no more room as entries: it ends what a full Redis would else be stuck with.
READ_DECISION = Script("sink/read_decision", allow_oom=True)
DECIDE = Script("sink/decide", allow_oom=True)
NEXT_CHUNK = Script("sink/next_chunk", allow_oom=True)
CLOSE = Script("sink/close", allow_oom=True)
DRAIN = Script("sink/drain", allow_oom=True)

_CALLS_PER_TRIP = 128
_DROPPED_PER_TRIP = 1_000

T = TypeVar("T")


class Publication:
    """Publishes the batches of the sink `sink`. Every step may be repeated, by this process or another.

    `patience_ms`: how long to wait for a Redis that is away; None = as long as it takes. Each method raises RedisError.
    """

    def __init__(self, client: Client, sink: str, terms: WriteOptions, *, patience_ms: float | None = None) -> None:
        self._client = client
        self._sink = sink
        self._terms = terms
        self._patience_ms = patience_ms
        self._record, self._staged = SinkKeys(sink).record, SinkKeys(sink).staged

    def publish(
        self, shares: Sequence[StagedTask], *, batch: int, epoch: int, before: Literal["refuse", "skip"] = "refuse"
    ) -> bool:
        """Publish batch number `batch`, staged by the run of `epoch`, unless it is published; return whether it was not.

        A batch that comes before the last one is refused, or taken for published (`before`). Raises StaleOwner if
        a newer run has begun, DataLoss if staged rows are gone, OutputError for ids that do not ascend.
        """
        manifest = Manifest(shares)
        new = self._is_new(manifest, batch, epoch, before)
        if new:
            self._seal(manifest, keep_s="")
            self._about_record(DECIDE, (epoch, batch, manifest.attempt, manifest.blob))
            self._roll_forward(manifest)
        else:
            self._drop(manifest)
        self._patiently(lambda: sweep(self._client, self._sink, epoch, batch))
        return new

    def publish_once(self, shares: Sequence[StagedTask]) -> None:
        """Publish what is nobody's numbered batch: killed in the midst of it, the rest expires."""
        manifest = Manifest(shares)
        self._seal(manifest, keep_s=STAGED_S)
        self._drain(manifest)
        self._drop(manifest)

    def withdraw(self, shares: Sequence[StagedTask]) -> bool:
        """Free what was staged for a batch that failed; return False if it is decided, and so will be published."""
        manifest = Manifest(shares)
        if not self._about_record(NEXT_CHUNK, (manifest.attempt, "withdraw")):
            return False
        self._drop(manifest)
        return True

    def free(self, shares: Sequence[StagedTask]) -> None:
        """Free what was staged for a write that is nobody's numbered batch."""
        self._drop(Manifest(shares))

    def _is_new(self, manifest: Manifest, batch: int, epoch: int, before: str) -> bool:
        seals = [f"{manifest.seal} {stream}" for stream in manifest.streams]
        while True:
            verdict, *about = self._about_record(READ_DECISION, (epoch, batch, before, *seals))
            if verdict != b"decided":
                return bool(verdict == b"go")
            self._roll_forward(Manifest.parse(about[0]))

    def _about_record(self, script: Script, args: Sequence[Arg]) -> Reply:
        try:
            return self._patiently(lambda: self._client.script(script, (self._record, self._staged), args))
        except CommandFailed as error:
            if error.code == "BEHIND":
                raise StaleOwner(
                    f"batch {args[1]!s} comes before the last one that the sink {self._sink} has published, {error.detail}: this is "
                    "an old run, or its checkpoint was set back; start with a new checkpoint to publish it all again"
                ) from error
            raise stale(self._sink, error) from error

    def _seal(self, manifest: Manifest, *, keep_s: int | Literal[""]) -> None:
        manifest.check()
        calls = []
        for stream, parts in manifest.streams.items():
            first = "" if self._terms.skip_old_ids or not parts else parts[0][1].first
            fresh = "1" if self._terms.overwrite else ""
            counts = [portion.chunks for _, portion in parts]
            args = (keep_s, fresh, first, *counts)
            calls.append((CLOSE, manifest.keys(self._sink, stream), args))
        for at in range(0, len(calls), _DROPPED_PER_TRIP):
            some = calls[at : at + _DROPPED_PER_TRIP]
            self._explained(partial(self._client.scripts, some))

    def _roll_forward(self, manifest: Manifest) -> None:
        """Publish what is decided to its end, and say so. Whoever else does it at the same time does no harm."""
        try:
            self._drain(manifest)
        except DataLoss:
            attempt, state = self._client.execute("HMGET", self._record, "attempt", "state")
            if state == b"decided" and attempt == manifest.attempt.encode():
                raise
            return  # another process has ended it, and gone on
        self._about_record(NEXT_CHUNK, (manifest.attempt, "finish"))

    def _drain(self, manifest: Manifest) -> None:
        skip = "1" if self._terms.skip_old_ids else ""
        args = (*self._terms.trim, skip)
        left = [(DRAIN, manifest.keys(self._sink, stream), args) for stream in manifest.streams]
        while left:
            some = left[:_CALLS_PER_TRIP]
            times = _CALLS_PER_TRIP // len(some)  # several for each: they take turns at the server, not on the wire
            calls = [call for call in some for _ in range(times)]
            replies: list[Reply] = self._explained(partial(self._client.scripts, calls))
            ended = [replies[(place + 1) * times - 1] == 0 for place in range(len(some))]
            left = [call for call, done in zip(some, ended, strict=True) if not done] + left[len(some) :]

    def _drop(self, manifest: Manifest) -> None:
        keys = [key for stream in manifest.streams for key in manifest.keys(self._sink, stream)[1:]]
        for at in range(0, len(keys), _DROPPED_PER_TRIP):
            self._patiently(partial(unlink, self._client, keys[at : at + _DROPPED_PER_TRIP]))

    def _explained(self, operation: Callable[[], T]) -> T:
        try:
            return self._patiently(operation)
        except CommandFailed as error:
            if error.code == "LOST":
                raise DataLoss(
                    f"Redis has forgotten rows that were staged ({error.detail}): they expire after {STAGED_S} s, are evicted under "
                    "a maxmemory-policy of allkeys-*, and are lost with a failover"
                ) from error
            if error.code == "TOPPED":
                last, _, stream = error.detail.partition(" ")
                raise OutputError(
                    f"the stream {stream!r} has reached the id {last}, and the next row's is not above it: the sink must be the only "
                    'writer of a stream whose ids it gives; option("existingIds", "skip") passes such rows over'
                ) from error
            raise

    def _patiently(self, operation: Callable[[], T]) -> T:
        return self._client.patiently(operation, what=f"the sink {self._sink}", limit_ms=self._patience_ms)
