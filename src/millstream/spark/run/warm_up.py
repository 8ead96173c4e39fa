"""A warm-up of Spark beside the start of the queries: the first batch finds the Python workers of its tasks running.

Spark starts the processes of a query one after another: those of its source first, and with the first batch the daemon of
its tasks, which imports pandas and pyarrow. Java loads and compiles what a batch needs only then, too. A job without
messages, with the plan of a handler's batch, does both while the source starts.
"""

import logging
import threading
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from millstream.spark.engine.micro_batch import Shuffle
from millstream.spark.key_blocks import SCHEMA
from millstream.spark.versions import spark_schema

logger = logging.getLogger(__name__)

_COLUMNS = (
    "cast(id as int) as bucket",
    "'' as stream",
    "cast('' as binary) as first_id",
    "cast('' as binary) as messages",
)


def start_warm_up(spark: SparkSession) -> threading.Thread:
    """Start the job in a thread of its own. The end of the session ends it."""
    thread = threading.Thread(target=_warm_up, args=(spark,), name="millstream-warm-up", daemon=True)
    thread.start()
    return thread


def _warm_up(spark: SparkSession) -> None:
    try:
        cores = spark.sparkContext.defaultParallelism
        frame = Shuffle()(spark.range(cores).selectExpr(*_COLUMNS), cores)
        frame.mapInArrow(unchanged, spark_schema(SCHEMA)).collect()
    except Exception as error:  # noqa: BLE001 - while a session ends PySpark raises errors of any kind; no message needs this job
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logger.debug("the warm-up of Spark has failed: %s; the first batch starts its Python workers", reason)


def unchanged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the batches of a task as they are."""
    yield from batches
