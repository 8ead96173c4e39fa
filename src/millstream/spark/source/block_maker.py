"""BlockMaker: makes blocks by key, for the handler engine, of the entries that a task has read."""

from collections.abc import Sequence
from itertools import chain

import msgspec
import pyarrow as pa

from millstream.model import value_of
from millstream.spark.key_blocks import ByKey, group_by_key, make_blocks, sortable
from millstream.spark.source.entry_segment import EntrySegment, first_id
from millstream.spark.source.row_decoder import StreamEntries, chunks

_pack = msgspec.msgpack.Encoder().encode


class BlockMaker:
    """Makes the blocks of raw stream entries, of which `key_field` is the key; None: none has a key.

    Of a repeated field the last value counts, as on workers. With one bucket, the blocks are in the order of the entries.
    """

    def __init__(self, key_field: bytes | None, buckets: int) -> None:
        self._key_field = key_field
        self._buckets = buckets

    def __call__(self, runs: Sequence[StreamEntries]) -> pa.RecordBatch:
        """Return the blocks of consecutive entries of streams."""
        streams: dict[str, list[StreamEntries]] = {}
        for run in runs:
            if run[1]:
                streams.setdefault(run[0], []).append(run)
        blocks = ((stream, self._by_key(own), sortable(first_id(own[0][1]))) for stream, own in streams.items())
        return make_blocks(blocks, self._buckets)

    def _by_key(self, runs: Sequence[StreamEntries]) -> ByKey:
        ids: list[bytes] = []
        packed: list[bytes] = []
        keys: list[bytes | None] = []
        for chunk in chunks(runs):
            if isinstance(chunk, EntrySegment):
                ids += chunk.ids.to_pylist()
                packed += chunk.packed().to_pylist()
                if self._key_field is not None:
                    keys += chunk.last_values(self._key_field).to_pylist()
            else:
                ids += [entry[0] for entry in chunk]
                packed += [_pack(entry[1]) for entry in chunk]
                if self._key_field is not None:
                    keys += [value_of(entry[1], self._key_field) for entry in chunk]
        if self._key_field is None:
            return {None: list(chain.from_iterable(zip(ids, packed, strict=True)))}
        return group_by_key(keys, ids, packed)
