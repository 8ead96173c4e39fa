"""Spark Connect and Declarative Pipelines, against a server in a process of its own: source and sink work there, too."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millstream.redis_client.client import Client
from millstream.spark.versions import HAS_LIMITS
from tests.support.connect_server import ConnectServer
from tests.support.fields import text_fields
from tests.support.pages import blocks_of
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [
    pytest.mark.drivers,
    pytest.mark.spark,
    pytest.mark.skipif(not HAS_LIMITS, reason="limited batches with a trigger of their own since Spark 4.2"),
]
HERE = Path(__file__).parent
PAGE = "docs/spark-connect.md"
EXAMPLE = HERE.parents[1] / "examples" / "pipelines"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    with ConnectServer(tmp_path_factory.mktemp("connect")) as server:
        yield server


def run(command: Sequence[str | Path], *, cwd: Path, **environment: str) -> str:
    """What a program writes to stdout; it must end well."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def entries(client: Client, stream: str) -> list[dict[str, str]]:
    found = [fields for _, fields in client.execute("XRANGE", stream, "-", "+")]
    return [text_fields(f) for f in found]


def numbers(client: Client, stream: str) -> list[int]:
    return [int(entry["n"]) for entry in entries(client, stream)]


def python_of_the_page(number: int) -> str:
    return [block.text for block in blocks_of(PAGE) if block.language == "python"][number]


def test_a_client_without_millstream_reads_and_writes_streams_exactly_once_and_runs_the_program_of_the_page(
    server: ConnectServer, millstream_url: str, tmp_path: Path
) -> None:
    text = python_of_the_page(0)
    for place, ours in (
        ("sc://spark.internal:15002", server.remote),
        ("redis://redis.internal:6379/0", millstream_url),
    ):
        assert place in text
        text = text.replace(place, ours)
    program = tmp_path / "page.py"
    program.write_text(text)
    with Client(millstream_url) as client:
        client.pipeline([("XADD", stream, "*", "n", n) for stream in "ab" for n in range(200)])
        client.execute("SET", "plain", "no stream")
        client.execute("XADD", "orders", "1-0", "customer", "ann", "amount", "10")
        stdout = run(
            [sys.executable, HERE / "connect_client.py", server.remote, millstream_url, tmp_path, program], cwd=tmp_path
        )
        result: dict[str, Any] = json.loads(stdout)
        assert "|1-0|     ann|  10.0|" in result["shown"]
        assert result["rows"] == [[stream, n] for stream in "ab" for n in range(200)]
        assert (sum(result["copied"]), len(result["copied"])) == (400, 2)
        assert sum(result["copied_then"]) == result["counted"] == 30, "what came since"
        assert numbers(client, "copy:a") == numbers(client, "a") == list(range(230))
        assert numbers(client, "copy:b") == list(range(200))
        assert entries(client, "totals") == [{"stream": "b", "count": "200"}]
        assert not client.execute("EXISTS", "ids")
    refusals = result["refusals"]
    assert "ConfigError: option 'startingofsets' is unknown to redis-streams; did you mean" in refusals["option"]
    assert "WrongType: the key 'plain' holds another type of value than a stream" in refusals["type"]
    assert "OutputError: the ids for stream 'ids' overlap between partitions" in refusals["ids"]
    assert not refusals["ids"].startswith("Writing job failed"), "its end has not failed as well"
    assert result["runner"].startswith("this is a Spark Connect session: handlers and stages need")


class Pipeline:
    """The example, with storage of its own."""

    def __init__(self, server: ConnectServer, url: str, folder: Path) -> None:
        self._server = server
        self._url = url
        self.folder = folder / "pipelines"
        shutil.copytree(EXAMPLE, self.folder)
        spec = self.folder / "spark-pipeline.yml"
        was = spec.read_text()
        spec.write_text(was.replace("file:///tmp/millstream-pipelines", f"file://{folder}/storage"))
        assert spec.read_text() != was

    def run(self, *options: str) -> str:
        """Run it as `spark-pipelines` does, but for the Java processes that only start this one."""
        command = [sys.executable, "-m", "pyspark.pipelines.cli", "run", *options]
        return run(command, cwd=self.folder, MILLSTREAM_URL=self._url, SPARK_REMOTE=self._server.remote)

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows of one of its tables."""
        files = sorted((self._server.warehouse / name).glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_a_declarative_pipeline_adds_each_entry_once_to_its_table_and_its_stream(
    server: ConnectServer, millstream_url: str, tmp_path: Path
) -> None:
    pipeline = Pipeline(server, millstream_url, tmp_path)

    def publish(start: int, end: int) -> None:
        client.pipeline([("XADD", "orders", "*", "customer", "ann", "amount", n) for n in range(start, end)])

    def check(count: int) -> None:
        assert sorted(row["amount"] for row in pipeline.table("orders")) == list(range(count))
        assert pipeline.table("turnover") == [{"customer": "ann", "turnover": sum(range(count))}]
        large = entries(client, "orders:large")
        assert large == [{"customer": "ann", "amount": f"{n}.0"} for n in range(100, count)]

    with Client(millstream_url) as client:
        publish(0, 150)
        pipeline.run()
        check(150)
        publish(150, 180)
        pipeline.run()
        check(180)
        assert {group[1]: group[-1] for group in client.execute("XINFO", "GROUPS", "orders")} == {
            b"large-orders": 0,
            b"orders-table": 0,
        }, "nothing waits"
        if os.environ.get("MILLSTREAM_SOAK"):
            pipeline.run("--full-refresh-all")
            check(180)


def test_the_pipeline_of_the_page_is_that_of_the_example() -> None:
    assert (EXAMPLE / "transformations" / "orders.py").read_text().endswith(python_of_the_page(1))
