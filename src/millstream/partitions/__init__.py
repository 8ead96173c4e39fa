"""Partitioned streams: where each key is, and how their number grows."""
