"""Queries that end at the newest entries of now: Trigger.AvailableNow, or what stands in for it before Spark 4.2."""

from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millstream.spark.versions import HAS_LIMITS


def start_to_end(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query for `await_end`."""
    return (writer.trigger(availableNow=True) if HAS_LIMITS else writer).start()


def await_end(query: StreamingQuery) -> None:
    """Wait until it has read what was there. Raises what has failed it."""
    if not HAS_LIMITS:
        query.processAllAvailable()
        query.stop()
    query.awaitTermination()


def run_to_end(writer: DataStreamWriter) -> StreamingQuery:
    """Run a query from its start to its end."""
    query = start_to_end(writer)
    await_end(query)
    return query
