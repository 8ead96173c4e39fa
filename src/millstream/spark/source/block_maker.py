"""BlockMaker: makes blocks by key, for the handler engine, of the entries that a task has read."""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import msgspec
import pyarrow as pa

from millstream.model import value_of
from millstream.spark.key_blocks import ByKey, group_by_key, make_blocks, sortable
from millstream.spark.source.entry_runs import Run, chunks, streams_of
from millstream.spark.source.entry_segment import EntrySegment

T = TypeVar("T")

_pack = msgspec.msgpack.Encoder().encode


class BlockMaker:
    """Makes the blocks of raw stream entries, of which `key_field` is the key; None: none has a key.

    Of a repeated field the last value counts, as on workers. With one bucket, the blocks are in the order of the entries.
    """

    def __init__(self, key_field: bytes | None, buckets: int) -> None:
        self._key_field = key_field
        self._buckets = buckets

    def __call__(self, runs: Sequence[Run]) -> pa.RecordBatch:
        """Return the blocks of consecutive entries of streams."""
        ids, packed, keys = self._columns(runs)
        places: dict[str, list[slice]] = {}
        at = 0
        for stream, count in streams_of(runs):
            if count:
                places.setdefault(stream, []).append(slice(at, at + count))
                at += count
        blocks = (
            (
                stream,
                self._by_key(*(_joined(column, own) for column in (ids, packed, keys))),
                sortable(ids[own[0].start]),
            )
            for stream, own in places.items()
        )
        return make_blocks(blocks, self._buckets)

    def _columns(self, runs: Sequence[Run]) -> tuple[list[bytes], list[bytes], list[bytes | None]]:
        """The id of each entry, its fields packed, and its key; no keys without a field of the key."""
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
        return ids, packed, keys

    def _by_key(self, ids: list[bytes], packed: list[bytes], keys: list[bytes | None]) -> ByKey:
        if self._key_field is None:
            return {None: list(chain.from_iterable(zip(ids, packed, strict=True)))}
        return group_by_key(keys, ids, packed)


def _joined(column: list[T], places: Sequence[slice]) -> list[T]:
    if len(places) == 1:
        return column[places[0]]
    return [item for place in places for item in column[place]]
