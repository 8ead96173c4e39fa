"""A program at the client's end of Spark Connect: `connect_client.py REMOTE REDIS FOLDER PROGRAM`.

It also runs PROGRAM, a file, in its session, and reports by a line of JSON. Up to its last part it has no millstream, as a client's machine need not have one.
"""

import io
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

FORMAT = "redis-streams"


class Client:
    """One session, and what its part of the test found out."""

    def __init__(self, remote: str, url: str, folder: Path) -> None:
        self.spark = SparkSession.builder.remote(remote).getOrCreate()
        self.url = url
        self.folder = folder

    def read(self, subscribe: str, **options: Any) -> DataFrame:
        reader = self.spark.read.format(FORMAT).options(url=self.url, subscribe=subscribe, **options)
        return reader.schema("_stream string, n long").load()

    def stream(self, subscribe: str, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format(FORMAT).options(url=self.url, subscribe=subscribe, **options)
        return reader.options(startingOffsets="earliest", group=f"of-{subscribe}").load()

    def drain(self, writer: Any, checkpoint: str) -> StreamingQuery:
        """Run a query to the end of what is there now."""
        query: StreamingQuery = (
            writer.option("checkpointLocation", str(self.folder / checkpoint)).trigger(availableNow=True).start()
        )
        query.awaitTermination()
        return query

    def arrow(self) -> list[list[Any]]:
        """Two streams, in the order of the rows."""
        table = self.read("a,b").toArrow()
        return [list(row) for row in zip(table["_stream"].to_pylist(), table["n"].to_pylist(), strict=True)]

    def copy(self) -> list[int]:
        """Copy what is new in `a` and `b` to streams of their own; the rows of each batch."""
        renamed = self.stream("a,b", maxOffsetsPerTrigger=200)
        renamed = renamed.select(F.concat(F.lit("copy:"), "stream").alias("stream"), "fields")
        writer = renamed.writeStream.queryName("copy").format(FORMAT).options(url=self.url, fieldsAs="fields")
        return [progress.numInputRows for progress in self.drain(writer, "copy").recentProgress]

    def append(self, start: int, end: int) -> None:
        """Write numbers to `a`."""
        numbers = self.spark.range(start, end, numPartitions=1).select(F.col("id").alias("n"))
        numbers.write.format(FORMAT).options(url=self.url, stream="a").mode("append").save()

    def totals(self) -> None:
        """A numbered write in foreachBatch, made twice."""
        url = self.url

        def write(changed: DataFrame, batch: int) -> None:
            options = {"url": url, "stream": "totals", "txnAppId": "totals", "txnVersion": str(batch)}
            for _ in range(2):
                changed.write.format("redis-streams").options(**options).mode("append").save()

        counts = self.stream("b").groupBy("stream").count()
        self.drain(counts.writeStream.outputMode("update").foreachBatch(write), "totals")

    def refusals(self) -> dict[str, str]:
        """The errors that a user gets after a mistake."""
        return {
            "option": _told(lambda: self.read("a", startingOfsets="earliest").collect()),
            "type": _told(lambda: self.drain(self.stream("plain").writeStream.format("noop"), "type")),
            "ids": _told(self._one_id_twice),
        }

    def _one_id_twice(self) -> None:
        rows = self.spark.range(0, 2, numPartitions=2).select(F.lit("1-1").alias("at"), F.col("id").alias("n"))
        rows.write.format(FORMAT).options(url=self.url, stream="ids", idColumn="at").mode("append").save()


def shown_by(program: Path) -> str:
    """What a program prints, which finds the session of this one by its address."""
    with redirect_stdout(io.StringIO()) as shown:
        exec(compile(program.read_text(), program, "exec"), {"__name__": "__main__"})
    return shown.getvalue()


def _told(wrong: Any) -> str:
    try:
        wrong()
    except PySparkException as error:
        return str(error)
    return ""


def with_millstream(client: Client) -> dict[str, Any]:
    """What needs it at this end."""
    from millstream import App
    from millstream.errors import ConfigError
    from millstream.observability import metrics
    from millstream.spark.run.query_metrics import QueryMetrics
    from millstream.spark.run.supervisor import RunSettings, Supervisor

    try:
        Supervisor(App("app"), client.spark, RunSettings(url=client.url, checkpoint="none"), on_event=print)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    recorder = metrics.Recorder()
    client.spark.streams.addListener(QueryMetrics(recorder))
    copied = client.copy()
    while recorder.value(metrics.SPARK_ROWS, query="copy") < sum(copied):  # the test that waits ends it otherwise
        time.sleep(0.05)
    return {"runner": refusal, "copied_then": copied, "counted": recorder.value(metrics.SPARK_ROWS, query="copy")}


if __name__ == "__main__":
    ours = ("millstream", "pyspark_millstream", "pyspark_millstream_state")
    sys.modules.update(dict.fromkeys(ours))  # type: ignore[arg-type]  # None: not to be found
    client = Client(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    found: dict[str, Any] = {"rows": client.arrow(), "copied": client.copy()}
    client.append(200, 230)
    client.totals()
    found["refusals"] = client.refusals()
    found["shown"] = shown_by(Path(sys.argv[4]))
    for name in ours:
        del sys.modules[name]
    print(json.dumps(found | with_millstream(client)))  # noqa: T201 - it is how it reports
    client.spark.stop()
