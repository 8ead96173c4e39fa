"""Streams, Bench: fill streams, read them through Spark, and collect the rows."""

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from tests.support.command_stats import commands_run
from tests.support.triggers import await_end, start_to_end

_numbers = itertools.count()


@dataclass
class Streams:
    """The streams of one Redis."""

    client: Client

    @property
    def url(self) -> str:
        """The URL of Redis."""
        return self.client.url

    def add(self, stream: str, count: int, *, start: int = 0) -> list[str]:
        """Add entries `n=<start>`, `n=<start + 1>` ...; return their ids."""
        return self.add_raw(stream, (["n", str(n)] for n in range(start, start + count)))

    def add_raw(
        self, stream: str, entries: Iterable[list[Any]], ids: Iterable[str] = itertools.repeat("*")
    ) -> list[str]:
        """Add entries given as flat lists; return their ids."""
        commands = [("XADD", stream, entry_id, *entry) for entry_id, entry in zip(ids, entries, strict=False)]
        found: list[str] = []
        for at in range(0, len(commands), 5000):
            found += [reply.decode() for reply in self.client.pipeline(commands[at : at + 5000])]
        return found

    def groups(self, stream: str) -> dict[str, dict[str, Any]]:
        """The consumer groups of a stream: {name: XINFO GROUPS}."""
        groups = [mapping_of(g) for g in self.client.execute("XINFO", "GROUPS", stream)]
        return {g[b"name"].decode(): {name.decode(): value for name, value in g.items()} for g in groups}

    def calls(self, command: str) -> int:
        """The number of calls of a command, or of a `command|subcommand`, that Redis has run."""
        return commands_run(self.client.execute)[command]


@dataclass
class Bench(Streams):
    """One Redis, one Spark session, and a folder for checkpoints."""

    spark: SparkSession
    folder: Path
    queries: list[StreamingQuery] = field(default_factory=list)

    def read(self, subscribe: str, **options: Any) -> DataFrame:
        """`spark.read` of the streams."""
        return self.spark.read.format("redis-streams").options(url=self.url, subscribe=subscribe, **options).load()

    def stream(self, subscribe: str | None = None, *, schema: str | None = None, **options: Any) -> DataFrame:
        """`spark.readStream` of the streams. Its progress is in the group `progress`, unless `options` names another."""
        chosen = {"group": "progress"} if subscribe is None else {"group": "progress", "subscribe": subscribe}
        reader = self.spark.readStream.format("redis-streams").options(url=self.url, **chosen | options)
        return (reader.schema(schema) if schema else reader).load()

    def start(self, frame: DataFrame, checkpoint: str = "checkpoint", *, once: bool = False) -> "CollectedRows":
        """Start a query that collects its rows; with `once` it ends at the newest entries of now (availableNow)."""
        collected = CollectedRows(f"query{next(_numbers)}")
        writer = frame.writeStream.foreachBatch(collected.add_batch).option(
            "checkpointLocation", str(self.folder / checkpoint)
        )
        collected.query = start_to_end(writer) if once else writer.start()
        self.queries.append(collected.query)
        return collected

    def collect(self, frame: DataFrame, checkpoint: str = "checkpoint") -> "CollectedRows":
        """Run a query up to the newest entries of now."""
        collected = self.start(frame, checkpoint, once=True)
        await_end(collected.query)
        return collected

    def offsets(self, checkpoint: str = "checkpoint") -> list[dict[str, list[Any]]]:
        """The offsets that Spark has logged, batch by batch."""
        logs = sorted((self.folder / checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        return [json.loads(path.read_text().splitlines()[2]) for path in logs]


class CollectedRows:
    """The rows that a query has read, by batch."""

    query: StreamingQuery

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches: list[list[Row]] = []

    def add_batch(self, frame: DataFrame, batch_id: int) -> None:
        """Collect one batch (the function that foreachBatch calls)."""
        self.batches.append(frame.collect())

    @property
    def rows(self) -> list[Row]:
        """The rows of all batches."""
        return [row for batch in self.batches for row in batch]

    @property
    def sizes(self) -> list[int]:
        """Rows per batch, without empty ones."""
        return [len(batch) for batch in self.batches if batch]

    @property
    def numbers(self) -> list[int]:
        """The values of `n`, sorted."""
        return sorted(int(pairs(row)[b"n"]) for row in self.rows)


def pairs(row: Row) -> Mapping[bytes, bytes]:
    """The fields of a row as a mapping."""
    return {bytes(name): bytes(value) for name, value in row["fields"]}
