"""The Python of the pages on Spark runs as it is printed, in the one session of these tests."""

import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import prometheus_client
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millstream.observability.metrics import SPARK_ROWS
from millstream.spark.versions import HAS_FILTERS, HAS_LIMITS
from tests.support.fields import text_fields
from tests.support.pages import run_python, write_files
from tests.support.sources import Bench
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]

LOCAL = "redis://localhost:6379/0"
ALL_AVAILABLE = {"query.awaitTermination()": "query.processAllAvailable()"}
"""A query of a page runs until its program ends, one of a test until all is processed."""
ORDERS = (["customer", "ann", "amount", "10"], ["customer", "bob", "amount", "5"])


@pytest.fixture
def shop(bench: Bench) -> Iterator[Bench]:
    """A Redis with two orders; queries that programs leave running, and what they set, end with the test."""
    bench.add_raw("orders", map(list, ORDERS))
    yield bench
    for query in bench.spark.streams.active:
        query.stop()
    bench.spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def orders(shop: Bench) -> DataFrame:
    """The orders as a stream of rows."""
    return shop.stream("orders", schema="_id string, customer string, amount double", startingOffsets="earliest")


def at(shop: Bench, stream: str) -> dict[str, str]:
    """The URL, for a program that leaves it to MILLSTREAM_URL: the session's Java has an environment of its own."""
    subscribe = f'.option("subscribe", "{stream}")'
    return {subscribe: f'.option("url", "{shop.url}"){subscribe}'}


def await_all(shop: Bench) -> None:
    """Wait until each query has processed what is there."""
    for query in shop.spark.streams.active:
        query.processAllAvailable()


def option(name: str, folder: Path) -> dict[str, str]:
    """A folder that a page names as the value of an option, below that of the test."""
    return {f', "{name}")': f', "{folder / name}")'}


def entries(shop: Bench, stream: str) -> list[dict[str, str]]:
    """The fields of the entries of a stream."""
    return [text_fields(pairs) for _, pairs in shop.client.execute("XRANGE", stream, "-", "+")]


# --- The source ---


def test_the_query_of_the_page_on_the_source_writes_parquet(shop: Bench) -> None:
    parquet = {'("path", "orders")': f'("path", "{shop.folder / "orders"}")'}
    replaced = {LOCAL: shop.url, **parquet, **option("cp-orders", shop.folder), **ALL_AVAILABLE}
    run_python("docs/spark-source.md", replaced=replaced, only=[0])
    await_all(shop)
    assert shop.spark.read.parquet(str(shop.folder / "orders")).count() == len(ORDERS)


def test_the_columns_of_the_page_on_the_source_are_typed(shop: Bench) -> None:
    frame = run_python("docs/spark-source.md", {"spark": shop.spark}, at(shop, "orders"), only=[1])["orders"]
    assert sorted((row.customer, row.amount, row.paid) for row in frame.collect()) == [
        ("ann", 10.0, None),
        ("bob", 5.0, None),
    ]


def test_the_amounts_of_the_page_on_the_source_are_decimals_and_are_written_as_they_are_read(shop: Bench) -> None:
    shop.add_raw("orders", [["customer", "eve", "amount", "0.10"]])
    frame = run_python("docs/spark-source.md", {"spark": shop.spark}, at(shop, "orders"), only=[2])["exact"]
    assert [(row.customer, row.amount) for row in frame.where("customer = 'eve'").collect()] == [
        ("eve", Decimal("0.10"))
    ]
    frame.write.format("redis-streams").options(url=shop.url, stream="copies").mode("append").save()
    assert sorted(entry["amount"] for entry in entries(shop, "copies")) == ["0.10", "10.00", "5.00"]


@pytest.mark.skipif(not HAS_FILTERS, reason="filters are pushed down since Spark 4.1")
def test_the_filter_of_the_page_on_the_source_is_pushed_down(shop: Bench) -> None:
    frame = run_python("docs/spark-source.md", {"spark": shop.spark}, at(shop, "orders"), only=[3])["hour"]
    assert frame.count() == 0, "no order is of that hour"


def test_the_group_query_of_the_page_on_the_source_reads_the_group(shop: Bench) -> None:
    frame = run_python("docs/spark-source.md", {"spark": shop.spark}, at(shop, "orders"), only=[4])["stream"]
    shop.client.execute("XGROUP", "CREATE", "orders", "billing", "0")
    assert len(shop.collect(frame).rows) == len(ORDERS)
    assert shop.groups("orders")["billing"]["pending"] == 0


def test_the_session_of_the_page_on_the_source_has_the_setting(shop: Bench) -> None:
    for value in ("121s", "120s"):  # the session had the latter before
        spark = run_python("docs/spark-source.md", replaced={'"120s"': f'"{value}"'}, only=[5])["spark"]
        assert spark.conf.get("spark.python.authenticate.socketTimeout") == value


# --- The sink ---


def test_the_queries_of_the_page_on_the_sink_write_streams(shop: Bench) -> None:
    run_python(
        "docs/spark-sink.md", replaced={LOCAL: shop.url, **option("cp-totals", shop.folder), **ALL_AVAILABLE}, only=[0]
    )
    await_all(shop)
    assert entries(shop, "totals") == [{"customer": "ann", "amount": "10.0"}, {"customer": "bob", "amount": "5.0"}]
    assert entries(shop, "daily") == [{"customer": "ann", "orders": "1"}]


def test_the_changes_of_the_page_on_the_sink_are_written_batch_by_batch(shop: Bench) -> None:
    totals = orders(shop).groupBy("customer").agg(F.sum("amount").alias("sum"))
    run_python("docs/spark-sink.md", {"totals": totals, "url": shop.url}, option("cp-changes", shop.folder), only=[1])
    await_all(shop)
    assert sorted(row["customer"] for row in entries(shop, "totals")) == ["ann", "bob"]


def test_the_hashes_of_the_page_on_the_sink_have_the_newest_row(shop: Bench) -> None:
    latest = orders(shop).withColumnRenamed("customer", "user")
    run_python("docs/spark-sink.md", {"latest": latest, "url": shop.url}, option("cp-users", shop.folder), only=[2])
    await_all(shop)
    assert shop.client.execute("HGET", "user:ann", "amount") == b"10.0"


# --- Versions, notebooks, metrics, stages ---


def test_the_limited_batches_of_the_page_on_versions_end_or_are_refused(shop: Bench) -> None:
    saved: list[int] = []
    names = {"spark": shop.spark, "url": shop.url, "save": lambda rows, _: saved.append(rows.count())}
    if HAS_LIMITS:
        with pytest.raises(AnalysisException, match="set the trigger"):
            run_python("docs/spark-versions.md", names, option("cp-saved", shop.folder))
    else:
        run_python("docs/spark-versions.md", names, option("cp-saved", shop.folder))
        assert sum(saved) == len(ORDERS)


@pytest.mark.skipif(not HAS_FILTERS, reason="filters are pushed down since Spark 4.1")
def test_the_cells_of_the_page_on_notebooks_show_history_and_a_live_table(
    shop: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.add_raw("temperatures", [["room", "attic", "celsius", "21.5"]])
    monkeypatch.setenv("MPLBACKEND", "agg")
    history = run_python("docs/notebooks.md", replaced=at(shop, "temperatures"), only=[0])["history"]
    assert [(row.room, row.celsius) for row in history.collect()] == [("attic", 21.5)]
    shown: list[int] = []
    live = shop.stream("temperatures", schema="room string", startingOffsets="earliest").groupBy("room").count()
    names = {"spark": shop.spark, "rooms": live, "display": lambda table: shown.append(len(table))}
    run_python("docs/notebooks.md", names, only=[1])
    assert len(shown) == 1


def test_the_listener_of_the_page_on_metrics_counts_rows(shop: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    added = {"QueryMetrics(recorder)": "listener := QueryMetrics(recorder)"}
    module = run_python("docs/metrics.md", {"spark": shop.spark}, added, only=[0])
    try:
        query = shop.collect(orders(shop)).query.id  # the label of a query without a name
        eventually(lambda: rows_counted(registry, query) == len(ORDERS), "the rows of the query")
    finally:
        shop.spark.streams.removeListener(module["listener"])


def rows_counted(registry: prometheus_client.CollectorRegistry, query: str) -> float:
    """How many rows a query has read; those of earlier tests may still be reported."""
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return sum(one.value for one in samples if one.name == SPARK_ROWS.name and one.labels["query"] == query)


def test_the_app_of_the_page_on_stages_has_a_handler_and_two_stages(shop: Bench) -> None:
    module = run_python("docs/spark-stages.md", {"DataFrame": DataFrame, "DataStreamWriter": DataStreamWriter})
    app = module["app"]
    assert (list(app.handlers), list(app.stages)) == (["total"], ["per_minute", "archive"])
    frame = shop.stream("orders", schema="customer string, amount double, at timestamp")
    assert app.stages["per_minute"].function(frame).columns == ["minute", "orders"]
    assert isinstance(app.stages["archive"].function(orders(shop)), DataStreamWriter)


def test_the_job_of_the_page_on_platforms_runs_the_app_in_a_session_that_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/spark-platforms.md"
    monkeypatch.chdir(bench.folder)
    monkeypatch.syspath_prepend(bench.folder)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    write_files(page, bench.folder)
    bench.client.execute("XADD", "orders", "*", "customer", "ann", "order", "o-1")
    checkpoint = f'"{bench.folder / "checkpoint"}", once=True'
    printed = {"rediss://redis.internal:6379": bench.url, '"s3://bucket/checkpoints/shop"': checkpoint}
    printed['"app.py"'] = f'"{bench.folder / "app.py"}"'  # the Java of the session has a folder of its own
    try:
        run_python(page, replaced=printed, only=[1])
    finally:
        sys.modules.pop("app", None)
    assert {"customer": "ann", "order": "o-1"} in entries(bench, "bills")
