"""Key blocks: how the messages of a batch cross Spark's shuffle, many in one row.

Java copies, compares and converts rows one by one. So a task of the source packs the messages of one stream and one bucket
into one row, a block. A bucket is a hash of stream and key: all messages of a key are in one bucket, and Spark moves whole
buckets. In a partition that is sorted by `SORT_COLUMNS`, the messages of a key are in the order of their stream.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa

from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.redis_client.replies import pairs_of

SCHEMA = pa.schema(
    [
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("first_id", pa.binary(), nullable=False),
        pa.field("messages", pa.binary(), nullable=False),
    ]
)
"""The columns of a block.

* `first_id`: the block's entries come after those of blocks with a smaller one; 16 bytes that compare as ids do
* `messages`: key, [id, fields, id, fields, ...], next key, ... as msgpack. Fields are packed once more, as one list of
  binaries. The key is nil for messages without a key.
"""

SORT_COLUMNS = ("bucket", "stream", "first_id")

CHUNK_MESSAGES = 10_000
CHUNK_BYTES = 16 << 20
"""A task unpacks about so much of its partition at a time."""

_MIN_BUCKETS, _MIN_CLUSTER_BUCKETS = 64, 512
_BUCKETS_PER_CORE = 8

Messages = list[bytes]
"""Messages of one stream, in order: [id, fields, id, fields, ...], the fields packed."""

ByKey = Mapping[bytes | None, Messages]
"""Messages of one stream by key; those without a key are under None."""


class Chunk(NamedTuple):
    """Messages by stream and key. `may_be_redriven`: some of them may be for one handler alone, as what was redriven is."""

    messages: dict[tuple[str, bytes | None], Messages]
    may_be_redriven: bool = False


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def bucket_count(cores: int, *, may_grow: bool = False) -> int:
    """Return a number of buckets that spreads the keys of a batch evenly over so many cores.

    `may_grow`: over many more, too, as executors may join a cluster later.
    """
    return max(_MIN_CLUSTER_BUCKETS if may_grow else _MIN_BUCKETS, _BUCKETS_PER_CORE * cores)


# --- Making blocks ---


def group_by_key(keys: Sequence[bytes | None], ids: Sequence[bytes], packed: Sequence[bytes]) -> ByKey:
    """Group messages of one stream by key. An empty key is none."""
    groups: dict[bytes | None, Messages] = {}
    for key, entry_id, fields in zip(keys, ids, packed, strict=True):
        group = groups.get(key or None)
        if group is None:
            groups[key or None] = [entry_id, fields]
        else:
            group += (entry_id, fields)
    return groups


def make_blocks(streams: Iterable[tuple[str, ByKey, bytes]], buckets: int) -> pa.RecordBatch:
    """Return the blocks of several streams: of each its name, its messages by key, and their `first_id`."""
    rows: list[tuple[int, str, bytes, bytes]] = []
    for stream, by_key, first_id in streams:
        blocks = _by_bucket(stream, by_key, buckets) if buckets > 1 else {0: [*chain.from_iterable(by_key.items())]}
        rows += [(bucket, stream, first_id, _pack(block)) for bucket, block in blocks.items()]
    columns = zip(*rows, strict=True) if rows else ((),) * len(SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _by_bucket(stream: str, by_key: ByKey, buckets: int) -> Mapping[int, list[object]]:
    seed = crc32(stream.encode())
    blocks: dict[int, list[object]] = defaultdict(list)
    for key, messages in by_key.items():
        if key is not None:
            blocks[crc32(key, seed) % buckets] += (key, messages)
        else:  # they are spread by their ids, not gathered in one bucket
            for entry_id, fields in pairs_of(messages):
                blocks[crc32(entry_id, seed) % buckets] += (None, [entry_id, fields])
    return blocks


def sortable(entry_id: bytes) -> bytes:
    """Return an id, as Redis writes it, in 16 bytes that compare as ids do."""
    ms, _, seq = entry_id.partition(b"-")  # to validate the id of each of 100,000 streams takes a tenth of a second
    return int(ms).to_bytes(8, "big") + int(seq).to_bytes(8, "big")


# --- Reading blocks ---


def unpack_block(messages: bytes) -> Iterator[tuple[bytes | None, Messages]]:
    """Yield each key of a block with its messages."""
    return pairs_of(_unpack(messages))


def read_chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
    """Unpack the blocks of a sorted partition, about 10,000 messages or 16 MB at a time.

    A chunk ends before the next bucket once it is half full, within a bucket only once it is full: most keys are in one
    chunk, with all their messages.
    """
    chunk = Chunk({})
    count = size = 0
    last_bucket = None
    for batch in batches:
        buckets, streams = (batch.column(name).to_pylist() for name in ("bucket", "stream"))
        for bucket, stream, packed in zip(buckets, streams, batch.column("messages"), strict=True):
            fill = max(count / CHUNK_MESSAGES, size / CHUNK_BYTES)
            if fill >= 1 or (fill >= 0.5 and bucket != last_bucket):
                yield chunk
                chunk, count, size = Chunk({}), 0, 0
            last_bucket = bucket
            block = packed.as_py()
            size += len(block)
            chunk = Chunk(chunk.messages, chunk.may_be_redriven or REDRIVE_FIELD in block)
            count += _add(chunk.messages, stream, block)
    if count:
        yield chunk


def _add(into: dict[tuple[str, bytes | None], Messages], stream: str, block: bytes) -> int:
    """Add the messages of a block; return how many they are."""
    count = 0
    for key, messages in unpack_block(block):
        count += len(messages) // 2
        found = into.get((stream, key))
        if found is None:
            into[stream, key] = messages
        else:
            found += messages
    return count
