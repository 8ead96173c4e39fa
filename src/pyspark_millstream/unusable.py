"""unusable_source: stands in for the source where millstream cannot be imported, and says why when it is used."""

from typing import Any

from pyspark.sql.datasource import DataSource

from millstream.errors import install_hint
from millstream.spark.versions import SPARK_VERSION, SUPPORTED


def unusable_source(error: ImportError, format_name: str) -> type[DataSource]:
    """Return a source named `format_name` that raises ImportError, because of `error`, as soon as it is used.

    Spark then finds the sources of other packages, and a program without this one notices nothing.
    """
    reason = (
        f"{format_name} needs Spark {SUPPORTED}, and millstream with its packages in the Python that Spark starts: "
        f"{install_hint('spark')}. This is Spark {SPARK_VERSION}, and importing it fails there: {error}"
    )

    class UnusableSource(DataSource):
        def __init__(self, options: Any) -> None:
            raise ImportError(reason)

        @classmethod
        def name(cls) -> str:
            return format_name

    return UnusableSource
