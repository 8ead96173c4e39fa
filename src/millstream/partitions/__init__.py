"""Partitioned streams: the partition of each key, and how the number of partitions grows."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.partitions.partitioned_producer import PartitionedProducer
    from millstream.partitions.partitions import Partitions
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.partitions.partitioned_producer": ("PartitionedProducer",),
            "millstream.partitions.partitions": ("Partitions",),
        },
    )

__all__ = ["PartitionedProducer", "Partitions"]
