"""Handlers and stages in one app: totals per customer, sales per minute, late payments, and all of it in Parquet.

millstream run examples/sales.py:app
"""

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from millstream import App, Reject, Rows, State

if TYPE_CHECKING:  # workers load this file too, and need no Spark
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

app = App("sales")


@dataclass
class Order:
    """An entry of the stream `orders`."""

    order: str
    customer: str
    amount: float
    at: datetime


@dataclass
class Payment:
    """An entry of the stream `payments`."""

    order: str
    paid: float
    at: datetime


@app.handler("orders", key="customer", into="totals")
def total(order: Order, state: State) -> dict[str, object]:
    """Sum up each customer's orders, in order."""
    if order.amount < 0:
        raise Reject("an order cannot be negative")
    state["sum"] = state.get("sum", 0) + order.amount
    return {"customer": order.customer, "sum": state["sum"], "at": order.at}


@app.stage(Rows("orders", Order), into="sales:minutes")
def per_minute(orders: "DataFrame") -> "DataFrame":
    """Orders and turnover per minute of event time, written once a watermark of two minutes has passed."""
    from pyspark.sql import functions as F

    minutes = orders.withWatermark("at", "2 minutes").groupBy(F.window("at", "1 minute"))
    sums = minutes.agg(F.count("*").alias("orders"), F.sum("amount").alias("turnover"))
    return sums.select(F.col("window.start").alias("minute"), "orders", "turnover")


@app.stage(Rows("orders", Order), Rows("payments", Payment), into="sales:paid")
def paid(orders: "DataFrame", payments: "DataFrame") -> "DataFrame":
    """Join each order with its payment within a day."""
    from pyspark.sql import functions as F

    orders = orders.select("order", "customer", "amount", F.col("at").alias("ordered_at"))
    payments = payments.select(F.col("order").alias("pays"), "paid", F.col("at").alias("paid_at"))
    return (
        orders.withWatermark("ordered_at", "1 hour")
        .join(
            payments.withWatermark("paid_at", "1 hour"),
            F.expr("order = pays and paid_at between ordered_at and ordered_at + interval 1 day"),
        )
        .drop("pays")
    )


@app.stage(Rows(total, "customer string, sum double, at timestamp"))
def archive(totals: "DataFrame") -> "DataStreamWriter":
    """Write the handler's output as Parquet, by day."""
    from pyspark.sql import functions as F

    by_day = totals.withColumn("day", F.to_date("at"))
    return by_day.writeStream.format("parquet").option("path", ".millstream/sales").partitionBy("day")
