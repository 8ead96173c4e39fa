"""millstream on Apache Spark: the `redis-streams` source and sink, the `redis-state` source, and the engine that runs handlers.

Only this package, `pyspark_millstream` and `pyspark_millstream_state` import pyspark.
"""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.spark.run.query_metrics import QueryMetrics
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.spark.run.query_metrics": ("QueryMetrics",),
        },
    )

__all__ = ["QueryMetrics"]
