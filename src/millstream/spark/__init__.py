"""millstream on Apache Spark: the `redis-streams` source and sink, and the engine that runs handlers on them.

Only this package and `pyspark_millstream` import pyspark.
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
