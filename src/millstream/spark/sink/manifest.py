"""Manifest: the task attempts of a batch, and the chunks that each has staged for each stream."""

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import msgspec

from millstream.errors import OutputError
from millstream.model import EntryId
from millstream.redis_client.key_names import StreamKeys
from millstream.redis_client.resp import Arg


class StagedPart(msgspec.Struct, frozen=True, array_like=True):
    """The chunks of one task attempt for one stream; `first` and `last` ids are "" if Redis generates the ids."""

    chunks: int
    first: str = ""
    last: str = ""


class StagedTask(msgspec.Struct, frozen=True, array_like=True):
    """All parts that one task attempt has staged, its partition number, and the epoch of its run."""

    token: str
    partition_id: int
    epoch: int
    parts: dict[str, StagedPart]


class Manifest:
    """The staged tasks of a batch, in the order in which their rows are published: by id, if rows have ids."""

    def __init__(self, tasks: Sequence[StagedTask]) -> None:
        self._tasks = sorted(tasks, key=lambda task: task.partition_id)
        self.streams: dict[str, list[tuple[str, StagedPart]]] = {}
        for task in self._tasks:
            for stream, part in task.parts.items():
                parts = self.streams.setdefault(stream, [])
                if part.chunks:
                    parts.append((task.token, part))
        for parts in self.streams.values():
            if _with_ids(parts):
                parts.sort(key=lambda part: EntryId.parse(part[1].first))

    def check(self) -> None:
        """Raise OutputError if rows have ids, and the id ranges of different tasks overlap."""
        for stream, parts in self.streams.items():
            for (_, one), (_, other) in pairwise(parts if _with_ids(parts) else ()):
                if EntryId.parse(one.last) >= EntryId.parse(other.first):
                    raise OutputError(
                        f"the ids for stream {stream!r} overlap between partitions ({one.last} in one, {other.first} "
                        "in another): repartition by the stream and sort within partitions by the id, "
                        "or remove idColumn"
                    )

    @classmethod
    def parse(cls, blob: bytes) -> "Manifest":
        """Parse a `packed`."""
        return cls(msgspec.msgpack.decode(blob, type=list[StagedTask]))

    @cached_property
    def packed(self) -> bytes:
        """The manifest as msgpack."""
        return msgspec.msgpack.encode(self._tasks)

    @cached_property
    def attempt(self) -> str:
        """A hash that identifies this set of task attempts."""
        return blake2b(self.packed, digest_size=12).hexdigest()

    @property
    def counter_token(self) -> str:
        """The token of the counters of chunks left to publish, one for each stream. Each attempt has its own."""
        epoch, batch, *_ = self._tasks[0].token.split(".") if self._tasks else ("0", "0")
        return f"{epoch}.{batch}.left.{self.attempt}"

    @property
    def tokens(self) -> set[str]:
        """The tokens of the task attempts, and of the chunk counters."""
        return {self.counter_token, *(task.token for task in self._tasks)}

    def keys(self, sink: str, stream: str) -> list[Arg]:
        """The KEYS of one stream for the scripts: stream, chunk counter, staged chunks."""
        names = StreamKeys(stream)
        return [
            stream,
            names.staged(sink, self.counter_token),
            *(names.staged(sink, token) for token, _ in self.streams[stream]),
        ]


def _with_ids(parts: Sequence[tuple[str, StagedPart]]) -> bool:
    return any(part.first for _, part in parts)
