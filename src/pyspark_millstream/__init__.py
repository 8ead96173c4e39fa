"""DefaultSource: makes `format("redis-streams")` available in Spark without registration.

Spark imports every top-level package named `pyspark_*` and uses its `DefaultSource` (PySpark, "Python Data Source
API"). It does so in each lookup process, so this import must stay cheap.
"""

from millstream.spark.source.provider import RedisStreamsSource as DefaultSource

__all__ = ["DefaultSource"]
