"""Partitioned streams: the partition of each key, and how the number of partitions grows."""
