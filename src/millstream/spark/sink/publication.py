"""Publication: publishes, on the driver, the rows that the tasks of a batch have staged: once, and all or none."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from millstream.errors import BatchBehind, CommandFailed, DataLoss, OutputError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import SinkKeys
from millstream.redis_client.resp import Arg, Reply
from millstream.redis_client.scripts import Script
from millstream.spark.sink.manifest import Manifest, StagedTask
from millstream.spark.sink.staging import STAGED_S, sweep, translate_stale, unlink
from millstream.spark.sink.write_options import WriteOptions

# Publishing must run at maxmemory: it frees the staged rows, which take no more memory as entries.
READ_DECISION = Script("sink/read_decision", allow_oom=True)
DECIDE = Script("sink/decide", allow_oom=True)
END_BATCH = Script("sink/end_batch", allow_oom=True)
CLOSE = Script("sink/close", allow_oom=True)
DRAIN = Script("sink/drain", allow_oom=True)

_CALLS_PER_TRIP = 128
_DROPPED_PER_TRIP = 1_000

T = TypeVar("T")


class Publication:
    """Publishes the batches of the sink `sink`. Every step may be repeated, by this process or another.

    `patience_ms`: how long to wait for an unavailable Redis; None = for ever. Each method raises RedisError.
    """

    def __init__(self, client: Client, sink: str, options: WriteOptions, *, patience_ms: float | None = None) -> None:
        self._client = client
        self._sink = sink
        self._options = options
        self._patience_ms = patience_ms
        self._record, self._staged = SinkKeys(sink).record, SinkKeys(sink).staged

    def publish(
        self, tasks: Sequence[StagedTask], *, batch: int, epoch: int, before: Literal["refuse", "skip"] = "refuse"
    ) -> bool:
        """Publish batch number `batch`, staged by the run of `epoch`; return False if it was published before.

        A batch before the last one is refused with BatchBehind, or counts as published (`before`). Raises StaleOwner
        if a newer run has begun, DataLoss if staged rows are gone, OutputError for ids that do not ascend.
        """
        manifest = Manifest(tasks)
        new = self._is_new(manifest, batch, epoch, before)
        if new:
            self._close_parts(manifest, keep_s="")
            self._call_record(DECIDE, (epoch, batch, manifest.attempt, manifest.packed))
            self._roll_forward(manifest)
        else:
            self._delete_staged(manifest)
        self._with_retry(lambda: sweep(self._client, self._sink, epoch, batch))
        return new

    def publish_once(self, tasks: Sequence[StagedTask]) -> None:
        """Publish a write without a batch number: after a kill on the way, the rest is not published and expires."""
        manifest = Manifest(tasks)
        self._close_parts(manifest, keep_s=STAGED_S)
        self._drain(manifest)
        self._delete_staged(manifest)

    def withdraw(self, tasks: Sequence[StagedTask]) -> bool:
        """Delete the staged rows of a failed batch; return False if it is decided, and so will be published."""
        manifest = Manifest(tasks)
        if not self._call_record(END_BATCH, (manifest.attempt, "withdraw")):
            return False
        self._delete_staged(manifest)
        return True

    def discard(self, tasks: Sequence[StagedTask]) -> None:
        """Delete the staged rows of a write without a batch number."""
        self._delete_staged(Manifest(tasks))

    def _is_new(self, manifest: Manifest, batch: int, epoch: int, before: str) -> bool:
        counters = [f"{manifest.counter_token} {stream}" for stream in manifest.streams]
        while True:
            status, *manifests = self._call_record(READ_DECISION, (epoch, batch, before, *counters))
            if status != b"decided":
                return bool(status == b"go")
            self._roll_forward(Manifest.parse(manifests[0]))

    def _call_record(self, script: Script, args: Sequence[Arg]) -> Reply:
        try:
            return self._with_retry(lambda: self._client.script(script, (self._record, self._staged), args))
        except CommandFailed as error:
            if error.code == "BEHIND":
                raise BatchBehind(
                    f"batch {args[1]!s} comes before batch {error.detail}, the last one that the sink {self._sink} has "
                    "published: another run was active on this checkpoint when this one started, or the checkpoint was "
                    "set back; start it again, or, to publish all batches again, use a new checkpoint"
                ) from error
            raise translate_stale(self._sink, error) from error

    def _close_parts(self, manifest: Manifest, *, keep_s: int | Literal[""]) -> None:
        manifest.check()
        calls = []
        for stream, parts in manifest.streams.items():
            first = "" if self._options.skip_existing_ids or not parts else parts[0][1].first
            overwrite = "1" if self._options.overwrite else ""
            counts = [part.chunks for _, part in parts]
            args = (keep_s, overwrite, first, *counts)
            calls.append((CLOSE, manifest.keys(self._sink, stream), args))
        for at in range(0, len(calls), _DROPPED_PER_TRIP):
            some = calls[at : at + _DROPPED_PER_TRIP]
            self._translate_errors(partial(self._client.scripts, some))

    def _roll_forward(self, manifest: Manifest) -> None:
        """Publish the rest of a decided batch, and record its end. Other processes may do the same at the same time."""
        try:
            self._drain(manifest)
        except DataLoss:
            attempt, state = self._client.execute("HMGET", self._record, "attempt", "state")
            if state == b"decided" and attempt == manifest.attempt.encode():
                raise
            return  # another process has published it, and begun a later batch
        self._call_record(END_BATCH, (manifest.attempt, "finish"))

    def _drain(self, manifest: Manifest) -> None:
        skip = "1" if self._options.skip_existing_ids else ""
        args = (*self._options.trim_args, skip)
        left = [(DRAIN, manifest.keys(self._sink, stream), args) for stream in manifest.streams]
        while left:
            some = left[:_CALLS_PER_TRIP]
            times = _CALLS_PER_TRIP // len(some)  # several calls a stream in each round trip
            calls = [call for call in some for _ in range(times)]
            replies: list[Reply] = self._translate_errors(partial(self._client.scripts, calls))
            drained = [replies[(place + 1) * times - 1] == 0 for place in range(len(some))]
            left = [call for call, done in zip(some, drained, strict=True) if not done] + left[len(some) :]

    def _delete_staged(self, manifest: Manifest) -> None:
        keys = [key for stream in manifest.streams for key in manifest.keys(self._sink, stream)[1:]]
        for at in range(0, len(keys), _DROPPED_PER_TRIP):
            self._with_retry(partial(unlink, self._client, keys[at : at + _DROPPED_PER_TRIP]))

    def _translate_errors(self, operation: Callable[[], T]) -> T:
        try:
            return self._with_retry(operation)
        except CommandFailed as error:
            if error.code == "LOST":
                raise DataLoss(
                    f"Redis has lost staged rows ({error.detail}): they expire after {STAGED_S} s, are evicted under a "
                    "maxmemory-policy of allkeys-*, and may be lost in a failover"
                ) from error
            if error.code == "TOPPED":
                last, _, stream = error.detail.partition(" ")
                raise OutputError(
                    f"the stream {stream!r} has reached the id {last}, and the next row's id is not above it: the sink "
                    'must be the only writer of a stream with idColumn; option("existingIds", "skip") skips such rows'
                ) from error
            raise

    def _with_retry(self, operation: Callable[[], T]) -> T:
        return self._client.retry_while_unavailable(
            operation, what=f"the sink {self._sink}", limit_ms=self._patience_ms
        )
