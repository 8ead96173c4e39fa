"""Makes `format("redis-streams")` known to Spark without registration.

Spark imports every top-level package named `pyspark_*` and takes its `DefaultSource` (PySpark, "Python Data Source
API"). It does so in each lookup process, so this import stays cheap.
"""

from millstream.spark.source.provider import RedisStreamsSource as DefaultSource

__all__ = ["DefaultSource"]
