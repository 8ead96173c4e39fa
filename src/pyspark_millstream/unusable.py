"""unusable_source: stands in for the source where millstream cannot be imported, and says why when it is used."""

from typing import Any

from pyspark.sql.datasource import DataSource

from millstream.errors import install_hint
from millstream.spark.versions import SPARK_VERSION, SUPPORTED


def unusable_source(error: ImportError) -> type[DataSource]:
    """Return a source named `redis-streams` that raises ImportError, because of `error`, as soon as it is used.

    Spark then finds the sources of other packages, and a program without `redis-streams` notices nothing.
    """
    reason = (
        f"redis-streams needs Spark {SUPPORTED}, and millstream with its packages in the Python that Spark starts: "
        f"{install_hint('spark')}. This is Spark {SPARK_VERSION}, and importing it fails there: {error}"
    )

    class UnusableSource(DataSource):
        def __init__(self, options: Any) -> None:
            raise ImportError(reason)

        @classmethod
        def name(cls) -> str:
            return "redis-streams"

    return UnusableSource
