"""Stage: stages the rows of a task in keys beside their streams, invisible to readers."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from millstream.errors import CommandFailed, ConfigError, DataLoss, OutputError, RedisError, StaleOwner
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import SinkKeys, StreamKeys
from millstream.redis_client.resp import Arg
from millstream.redis_client.scripts import Script
from millstream.spark.sink.manifest import Manifest, StagedPart, StagedTask

logger = logging.getLogger(__name__)

BEGIN = Script("sink/begin")
STAGE = Script("sink/stage")

Part = str | msgspec.Raw

Row = Sequence[Part]
"""The id of an entry, "*" if Redis generates it, then name, value, name, value ... (bytes as `raw`)."""

STAGED_S = 86_400
"""Seconds until staged rows that are not published expire."""

_RUN_S = 30 * 86_400
_CHUNK_ROWS = 1_000
_CHUNK_BYTES = 1_000_000
_TRIP_BYTES = 8_000_000
_BUFFER_BYTES = 16_000_000
_encode = msgspec.msgpack.Encoder().encode


def begin(client: Client, sink: str, run: str) -> int:
    """Return the epoch of the run `run` of `sink`. A new run gets the greatest so far, and deletes rows of older runs.

    Raises StaleOwner if a newer run has begun.
    """
    keys = SinkKeys(sink)
    try:
        epoch, is_new, manifest = client.script(BEGIN, (keys.record, keys.run(run)), (_RUN_S,))
    except CommandFailed as error:
        raise translate_stale(sink, error) from error
    if is_new:
        sweep(client, sink, int(epoch), -1, keep=Manifest.parse(manifest).tokens if manifest else ())
    return int(epoch)


def translate_stale(sink: str, error: CommandFailed) -> Exception:
    """The StaleOwner error for a refusal by the sink's record; other errors as they are."""
    if error.code == "STALE":
        return StaleOwner(f"a newer run of the sink {sink} has taken over; this one stops and publishes nothing more")
    return error


def token_of(epoch: int, batch: int, partition_id: int, attempt: int) -> str:
    """The token of one attempt at a task; `attempt` is unique in its run."""
    return f"{epoch}.{batch}.{partition_id}.{attempt}"


def sweep(client: Client, sink: str, epoch: int, batch: int, *, keep: Iterable[str] = ()) -> None:
    """Delete unpublished staged rows of runs before `epoch`, and of this run's batches up to `batch`."""
    index, keep_tokens = SinkKeys(sink).staged, set(keep)
    old = []
    for member in client.execute("SMEMBERS", index):
        token, _, stream = member.decode("utf-8", "surrogateescape").partition(" ")
        staged_by, staged_for = map(int, token.split(".")[:2])
        if token not in keep_tokens and (staged_by < epoch or (staged_by == epoch and staged_for <= batch)):
            old.append((member, StreamKeys(stream).staged(sink, token)))
    for at in range(0, len(old), _CHUNK_ROWS):
        some = old[at : at + _CHUNK_ROWS]
        unlink(client, [key for _, key in some])
        client.execute("SREM", index, *(member for member, _ in some))


def unlink(client: Client, keys: Sequence[Arg]) -> None:
    """Delete keys, which may be in different slots."""
    for reply in client.pipeline([("UNLINK", key) for key in keys]):
        raise_if_error(reply)


class Stage:
    """Stages the rows of one attempt at one task of the sink `sink`. Not thread-safe.

    * `indexed`: add the staged keys to the index by which later batches delete unpublished rows
    * `staged_s`: seconds until staged rows expire
    * `patience_ms`: how long to wait for an unavailable or full Redis; None = for ever

    Raises OutputError for ids that do not ascend, DataLoss if Redis has lost staged rows, RedisError.
    """

    def __init__(
        self,
        client: Client,
        sink: str,
        token: str,
        *,
        indexed: bool = True,
        staged_s: int = STAGED_S,
        patience_ms: float | None = None,
    ) -> None:
        self._client = client
        self._sink = sink
        self._token = token
        self._indexed = indexed
        self._staged_s = staged_s
        self._patience_ms = patience_ms
        self._buffered: dict[str, list[Row]] = {}
        self._buffered_bytes = 0
        self._chunks: dict[str, int] = {}
        self._ids: dict[str, tuple[str, str]] = {}

    def include(self, stream: str) -> None:
        """Include `stream` in the staged task even without rows for it: overwrite may have to empty it."""
        self._chunks.setdefault(stream, 0)

    def add(self, rows: Iterable[tuple[str, list[Row]]], size: int) -> None:
        """Buffer rows by stream, about `size` bytes in all, and stage full chunks; keeps the order of each stream."""
        for stream, some in rows:
            if some and some[0][0] != "*":
                self._check_ids(stream, some)
            self._buffered.setdefault(stream, []).extend(some)
        self._buffered_bytes += size
        full = self._buffered_bytes >= _BUFFER_BYTES
        self._stage_chunks(
            [stream for stream, buffered in self._buffered.items() if full or len(buffered) >= _CHUNK_ROWS]
        )
        if not self._buffered:
            self._buffered_bytes = 0

    def finish(self, partition_id: int, epoch: int = 0) -> StagedTask:
        """Stage the buffered rows; return all that the task has staged. `partition_id`: the task's partition number."""
        self._stage_chunks(list(self._buffered))
        parts = {stream: StagedPart(count, *self._ids.get(stream, ("", ""))) for stream, count in self._chunks.items()}
        return StagedTask(self._token, partition_id, epoch, parts)

    def discard(self) -> None:
        """Delete the staged rows; if Redis is unavailable, they expire."""
        try:
            unlink(self._client, [self._key(stream) for stream in self._chunks])
        except RedisError as error:
            logger.warning(
                "cannot delete the staged rows of a failed task: %s; they expire in %d s", error, self._staged_s
            )

    def _key(self, stream: str) -> str:
        return StreamKeys(stream).staged(self._sink, self._token)

    def _check_ids(self, stream: str, rows: Sequence[Row]) -> None:
        first, last = self._ids.get(stream, ("", ""))
        newest = EntryId.parse(last) if last else None
        for row in rows:
            entry_id = _id_of(row, stream)
            if newest is not None and entry_id <= newest:
                raise OutputError(
                    f"the id {entry_id} for stream {stream!r} comes after {newest}: ids must ascend; sort within "
                    "partitions by the id, or remove idColumn"
                )
            newest = entry_id
            first = first or str(entry_id)
        self._ids[stream] = (first, str(newest))

    def _stage_chunks(self, streams: Sequence[str]) -> None:
        calls: list[tuple[str, list[bytes]]] = []
        size = 0
        for stream in streams:
            rows = self._buffered.pop(stream)
            for at in range(0, len(rows), _CHUNK_ROWS):
                for chunk in _chunks(rows[at : at + _CHUNK_ROWS]):
                    if calls and size + len(chunk) > _TRIP_BYTES:
                        self._send_chunks(calls)
                        calls, size = [], 0
                    if not calls or calls[-1][0] != stream:
                        calls.append((stream, []))
                    calls[-1][1].append(chunk)
                    size += len(chunk)
        if calls:
            self._send_chunks(calls)

    def _send_chunks(self, calls: Sequence[tuple[str, list[bytes]]]) -> None:
        """Stage chunks in one round trip a node. It may be repeated: each call has the number of chunks before it."""

        def stage() -> None:
            new = [f"{self._token} {stream}" for stream, _ in calls if not self._chunks.get(stream)]
            if new and self._indexed:  # indexed before it is staged, so that the sweep finds it
                self._client.execute("SADD", SinkKeys(self._sink).staged, *new)
            self._client.scripts(
                [
                    (STAGE, (self._key(stream),), (self._chunks.get(stream, 0), self._staged_s, *chunks))
                    for stream, chunks in calls
                ]
            )

        try:
            self._client.retry_while_unavailable(
                stage, what=f"staging for the sink {self._sink}", limit_ms=self._patience_ms
            )
        except CommandFailed as error:
            if error.code == "LOST":
                raise DataLoss(f"Redis has lost rows that this task has staged: {error}") from error
            raise
        for stream, chunks in calls:
            self._chunks[stream] = self._chunks.get(stream, 0) + len(chunks)


def _id_of(row: Row, stream: str) -> EntryId:
    try:
        entry_id = EntryId.parse(str(row[0]))
    except ConfigError as error:
        raise OutputError(f"an id for stream {stream!r}: {error}") from error
    if str(entry_id) != row[0] or entry_id == ZERO_ID:
        raise OutputError(f"{row[0]!r} is not an id for stream {stream!r}: write milliseconds-sequence, from 0-1 on")
    return entry_id


def _chunks(rows: list[Row]) -> Iterator[bytes]:
    """Encode rows in chunks of at most 1 MB; a larger row is a chunk of its own."""
    chunk = _encode(rows)
    if len(chunk) <= _CHUNK_BYTES or len(rows) == 1:
        yield chunk
    else:
        half = len(rows) // 2
        yield from _chunks(rows[:half])
        yield from _chunks(rows[half:])
