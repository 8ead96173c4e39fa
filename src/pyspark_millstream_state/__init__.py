"""DefaultSource: makes `format("redis-state")` available in Spark without registration.

A package of its own, as Spark takes one data source from each; `pyspark_millstream` says how.
"""

try:
    from millstream.spark.source.state_provider import RedisStateSource as DefaultSource
except ImportError as error:
    from pyspark_millstream.unusable import unusable_source

    DefaultSource = unusable_source(error, "redis-state")  # type: ignore[assignment, misc] # a class of that name is what Spark wants

__all__ = ["DefaultSource"]
