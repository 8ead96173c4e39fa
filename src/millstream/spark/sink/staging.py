"""What tasks do: stage their rows beside the streams that they are for, where no reader sees them."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from millstream.errors import CommandFailed, ConfigError, DataLoss, OutputError, RedisError, StaleOwner
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Arg, Client, Script, raise_if_error
from millstream.redis_client.key_names import SinkKeys, StreamKeys
from millstream.spark.sink.manifest import Manifest, StagedPart, StagedTask

logger = logging.getLogger(__name__)

BEGIN = Script("sink/begin")
STAGE = Script("sink/stage")

Part = str | msgspec.Raw

Row = Sequence[Part]
"""The id of an entry, "*" for one from Redis, and its items: name, value, name, value ... (bytes as `raw`)."""

STAGED_S = 86_400
"""How long rows are kept that nobody publishes, in seconds."""

_RUN_S = 30 * 86_400
_CHUNK_ROWS = 1_000
_CHUNK_BYTES = 1_000_000
_TRIP_BYTES = 8_000_000
_HELD_BYTES = 16_000_000
_GREATEST = EntryId(2**64 - 1, 2**64 - 1)
_HEADS = [bytes([0xA0 | size]) for size in range(32)]
_encode = msgspec.msgpack.Encoder().encode


def raw(value: bytes) -> msgspec.Raw:
    """A value that may be no UTF-8. The msgpack of Redis scripts knows text only, but takes any bytes for it."""
    size = len(value)
    if size < 32:
        return msgspec.Raw(_HEADS[size] + value)
    if size < 1 << 16:
        return msgspec.Raw(b"\xda" + size.to_bytes(2) + value)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4) + value)


def begin(client: Client, sink: str, run: str) -> int:
    """Return the epoch of the run `run` of `sink`; a new one gets the greatest so far, and sweeps up after older ones.

    Raises StaleOwner if a newer run has begun.
    """
    keys = SinkKeys(sink)
    try:
        epoch, new, manifest = client.script(BEGIN, (keys.record, keys.run(run)), (_RUN_S,))
    except CommandFailed as error:
        raise stale(sink, error) from error
    if new:
        sweep(client, sink, int(epoch), -1, keep=Manifest.parse(manifest).tokens if manifest else ())
    return int(epoch)


def stale(sink: str, error: CommandFailed) -> Exception:
    """What a refusal by the record of a sink means."""
    if error.code == "STALE":
        return StaleOwner(f"a newer run of the sink {sink} has taken over; this one stops, and publishes nothing more")
    return error


def token_of(epoch: int, batch: int, place: int, attempt: int) -> str:
    """The name of one attempt at a task; `attempt` is unique in its run."""
    return f"{epoch}.{batch}.{place}.{attempt}"


def sweep(client: Client, sink: str, epoch: int, batch: int, *, keep: Iterable[str] = ()) -> None:
    """Free what runs before `epoch`, and this run's batches up to `batch`, have staged and nobody will publish."""
    index, kept = SinkKeys(sink).staged, set(keep)
    old = []
    for member in client.execute("SMEMBERS", index):
        token, _, stream = member.decode("utf-8", "surrogateescape").partition(" ")
        staged_by, staged_for = map(int, token.split(".")[:2])
        if token not in kept and (staged_by < epoch or (staged_by == epoch and staged_for <= batch)):
            old.append((member, StreamKeys(stream).staged(sink, token)))
    for at in range(0, len(old), _CHUNK_ROWS):
        some = old[at : at + _CHUNK_ROWS]
        unlink(client, [key for _, key in some])
        client.execute("SREM", index, *(member for member, _ in some))


def unlink(client: Client, keys: Sequence[Arg]) -> None:
    """Free keys of any slots."""
    for reply in client.pipeline([("UNLINK", key) for key in keys]):
        raise_if_error(reply)


class Stage:
    """Stages the rows of one attempt at one task of the sink `sink`. Not thread-safe.

    * `indexed`: note what is staged where later batches look for what nobody published
    * `staged_s`: how long it is kept, in seconds
    * `patience_ms`: how long to wait for a Redis that is away or full; None = as long as it takes

    Raises OutputError for ids that do not ascend, DataLoss if what was staged is gone again, RedisError.
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
        self._held: dict[str, list[Row]] = {}
        self._held_bytes = 0
        self._chunks: dict[str, int] = {}
        self._ids: dict[str, tuple[str, str]] = {}

    def expect(self, stream: str) -> None:
        """Have `stream` in the share even if there is no row for it: it may be one that is to be emptied."""
        self._chunks.setdefault(stream, 0)

    def add(self, rows: Iterable[tuple[str, list[Row]]], size: int) -> None:
        """Take rows for streams, about `size` bytes in all; those of one stream in their order."""
        for stream, some in rows:
            if some and some[0][0] != "*":
                self._note_ids(stream, some)
            self._held.setdefault(stream, []).extend(some)
        self._held_bytes += size
        full = self._held_bytes >= _HELD_BYTES
        self._send([stream for stream, held in self._held.items() if full or len(held) >= _CHUNK_ROWS])
        if not self._held:
            self._held_bytes = 0

    def finish(self, place: int, epoch: int = 0) -> StagedTask:
        """Stage what is left; return the whole share. `place`: of the task in its batch."""
        self._send(list(self._held))
        portions = {
            stream: StagedPart(count, *self._ids.get(stream, ("", ""))) for stream, count in self._chunks.items()
        }
        return StagedTask(self._token, place, epoch, portions)

    def drop(self) -> None:
        """Free what was staged, if Redis can be asked; else it expires."""
        try:
            unlink(self._client, [self._key(stream) for stream in self._chunks])
        except RedisError as error:
            logger.warning("what a failed task has staged stays for %d s: %s", self._staged_s, error)

    def _key(self, stream: str) -> str:
        return StreamKeys(stream).staged(self._sink, self._token)

    def _note_ids(self, stream: str, rows: Sequence[Row]) -> None:
        first, last = self._ids.get(stream, ("", ""))
        newest = EntryId.parse(last) if last else None
        for row in rows:
            entry_id = _id_of(row, stream)
            if newest is not None and entry_id <= newest:
                raise OutputError(
                    f"the id {entry_id} for stream {stream!r} comes after {newest}: ids must ascend; sort within "
                    "partitions by the id, or leave idColumn out"
                )
            newest = entry_id
            first = first or str(entry_id)
        self._ids[stream] = (first, str(newest))

    def _send(self, streams: Sequence[str]) -> None:
        calls: list[tuple[str, list[bytes]]] = []
        size = 0
        for stream in streams:
            rows = self._held.pop(stream)
            for at in range(0, len(rows), _CHUNK_ROWS):
                for chunk in _chunks(rows[at : at + _CHUNK_ROWS]):
                    if calls and size + len(chunk) > _TRIP_BYTES:
                        self._trip(calls)
                        calls, size = [], 0
                    if not calls or calls[-1][0] != stream:
                        calls.append((stream, []))
                    calls[-1][1].append(chunk)
                    size += len(chunk)
        if calls:
            self._trip(calls)

    def _trip(self, calls: Sequence[tuple[str, list[bytes]]]) -> None:
        """One round trip per node, which may safely be repeated: each call says how many chunks came before it."""

        def stage() -> None:
            new = [f"{self._token} {stream}" for stream, _ in calls if not self._chunks.get(stream)]
            if new and self._indexed:  # noted before it is staged, or nobody would find it
                self._client.execute("SADD", SinkKeys(self._sink).staged, *new)
            self._client.scripts(
                [
                    (STAGE, (self._key(stream),), (self._chunks.get(stream, 0), self._staged_s, *chunks))
                    for stream, chunks in calls
                ]
            )

        try:
            self._client.patiently(stage, what=f"staging for the sink {self._sink}", limit_ms=self._patience_ms)
        except CommandFailed as error:
            if error.code == "LOST":
                raise DataLoss(f"Redis has forgotten rows that this task has staged: {error}") from error
            raise
        for stream, chunks in calls:
            self._chunks[stream] = self._chunks.get(stream, 0) + len(chunks)


def _id_of(row: Row, stream: str) -> EntryId:
    try:
        entry_id = EntryId.parse(str(row[0]))
    except ConfigError as error:
        raise OutputError(f"an id for stream {stream!r}: {error}") from error
    if str(entry_id) != row[0] or not ZERO_ID < entry_id <= _GREATEST:
        raise OutputError(f"{row[0]!r} is no id for stream {stream!r}: write milliseconds-sequence, from 0-1 on")
    return entry_id


def _chunks(rows: list[Row]) -> Iterator[bytes]:
    """Encode rows so that no chunk is large, but for a row that is."""
    chunk = _encode(rows)
    if len(chunk) <= _CHUNK_BYTES or len(rows) == 1:
        yield chunk
    else:
        half = len(rows) // 2
        yield from _chunks(rows[:half])
        yield from _chunks(rows[half:])
