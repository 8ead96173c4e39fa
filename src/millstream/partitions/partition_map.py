"""PartitionMap: the number of partitions in each generation, and the keys that each growth moved.

A key's partition is found by jump consistent hashing, so a growth moves keys to the new partitions only, and no more of
them than it must (J. Lamping and E. Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014).
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import msgspec

from millstream.errors import ConfigError
from millstream.handlers.handler import check_partition_count
from millstream.redis_client.key_names import partition_name

_MASK = (1 << 64) - 1


class PastOwner(NamedTuple):
    """A partition that owned a key before, by its number, and the generation in which the key left it."""

    partition: int
    left_in: int


class PartitionMap(msgspec.Struct, frozen=True, kw_only=True):
    """The partitions of `base`, generation by generation.

    * `counts`: how many there were in each generation; the last is in use
    * `close_ids`: for each generation but the first, the id at which each older partition was closed: producers of older
      generations have published nothing beyond it
    * `growing_to`: the number of partitions after the growth under way; None if there is none
    """

    base: str
    counts: tuple[int, ...]
    close_ids: tuple[tuple[str, ...], ...] = ()
    growing_to: int | None = None

    @property
    def generation(self) -> int:
        """The number of the generation in use, from 1 on."""
        return len(self.counts)

    @property
    def count(self) -> int:
        """How many partitions are in use."""
        return self.counts[-1]

    @property
    def streams(self) -> list[str]:
        """The partitions in use, by number."""
        return [self.stream(partition) for partition in range(self.count)]

    def stream(self, partition: int) -> str:
        """The name of a partition."""
        return partition_name(self.base, partition)

    def partition_of(self, key: bytes) -> int:
        """The partition that owns a key now."""
        return _jump(_number(key), self.count)

    def created_in(self, partition: int) -> int:
        """The generation in which a partition was created."""
        return next(number for number, count in enumerate(self.counts, 1) if partition < count)

    def close_id(self, past_owner: PastOwner) -> str:
        """The id at which a partition was closed when keys left it."""
        return self.close_ids[past_owner.left_in - 2][past_owner.partition]

    def owners(self, key: bytes) -> list[int]:
        """The partitions that have owned a key, in order; the last owns it now."""
        number = _number(key)
        return list(dict.fromkeys(_jump(number, count) for count in self.counts))

    def past_owners(self, key: bytes, partition: int) -> list[PastOwner]:
        """The partitions that owned a key before this one, in order; none if this one never owned it."""
        owners = self.owners(key)
        if partition not in owners:
            return []
        return [
            PastOwner(before, self.created_in(after))
            for before, after in pairwise(owners[: owners.index(partition) + 1])
        ]

    # The form in Redis

    def pack(self) -> bytes:
        """Return it as text for Redis."""
        return msgspec.json.encode(_Packed(counts=self.counts, close_ids=self.close_ids, growing=self.growing_to))

    @classmethod
    def unpack(cls, base: str, text: bytes) -> "PartitionMap":
        """Parse the text that `pack` returns. Raises ConfigError if it is invalid."""
        try:
            found = msgspec.json.decode(text, type=_Packed)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"the partition map of {base!r} in Redis cannot be read; restore it from a backup: {error}"
            ) from error
        return cls(base=base, counts=found.counts, close_ids=found.close_ids, growing_to=found.growing)


class _Packed(msgspec.Struct):
    counts: tuple[int, ...]
    close_ids: tuple[tuple[str, ...], ...]
    growing: int | None


def check_growth(layout: PartitionMap, count: int) -> None:
    """Raise ConfigError if the number of partitions cannot become `count`."""
    check_partition_count(count)
    if count < layout.count:
        raise ConfigError(
            f"{layout.base!r} has {layout.count} partitions and cannot have fewer: use {layout.count} or more"
        )


def moved_away(layout: PartitionMap, partition: int, keys: Sequence[bytes], generation: int) -> list[tuple[bytes, int]]:
    """Return those of `keys` that had left a partition by a generation, each with the partition it went to from
    there.
    """
    found = []
    for key in keys:
        owners = layout.owners(key)
        at = owners.index(partition) if partition in owners else len(owners)
        if at + 1 < len(owners) and layout.created_in(owners[at + 1]) <= generation:
            found.append((key, owners[at + 1]))
    return found


def _number(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def _jump(number: int, count: int) -> int:
    """Return the bucket of a number among `count`; with more buckets, it is the same one or a new one."""
    bucket, after = 0, 0
    while after < count:
        bucket = after
        number = (number * 2_862_933_555_777_941_757 + 1) & _MASK
        after = int((bucket + 1) * ((1 << 31) / ((number >> 33) + 1)))
    return bucket
