"""The stream `orders` as a table, turnover by customer from it, and large orders in a stream of their own.

cd examples/pipelines && spark-pipelines run
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()
URL = os.environ.get("MILLSTREAM_URL", "redis://127.0.0.1:6379/0")


def incoming(group: str) -> DataFrame:
    """Return the new entries of `orders`; `group` shows this flow's progress in Redis."""
    reader = spark.readStream.format("redis-streams").options(url=URL, subscribe="orders", group=group)
    # Each run reads the entries that exist at its start: from the latest entry on, the first run would read none.
    return reader.option("startingOffsets", "earliest").schema("_id string, customer string, amount double").load()


@dp.table
def orders() -> DataFrame:
    """Every order, once."""
    return incoming("orders-table")


@dp.materialized_view
def turnover() -> DataFrame:
    """Turnover by customer, recomputed from the table in each run."""
    return spark.read.table("orders").groupBy("customer").agg(F.sum("amount").alias("turnover"))


# Large orders keep their ids, so none is written twice, even if `--full-refresh-all` restarts the flow.
TO = {"url": URL, "stream": "orders:large", "idColumn": "_id", "existingIds": "skip"}
dp.create_sink("large_orders", "redis-streams", TO)


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """Orders of 100 and more, each once and in their order, through failed and killed runs."""
    return incoming("large-orders").where("amount >= 100")
