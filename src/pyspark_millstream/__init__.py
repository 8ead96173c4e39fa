"""DefaultSource: makes `format("redis-streams")` available in Spark without registration.

Spark imports every top-level package named `pyspark_*` and uses its `DefaultSource` (PySpark, "Python Data Source
API"). It does so in each lookup process, so this import must stay cheap. And it must not fail: Spark then gives up the
lookup, and finds no data source of any package.
"""

try:
    from millstream.spark.source.provider import RedisStreamsSource as DefaultSource
except ImportError as error:
    from pyspark_millstream.unusable import unusable_source

    DefaultSource = unusable_source(error, "redis-streams")  # type: ignore[assignment, misc] # a class of that name is what Spark wants

__all__ = ["DefaultSource"]
