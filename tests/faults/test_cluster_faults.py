"""A cluster: executors in folders of their own, which know of the app only what the driver gives them, and which die."""

import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyspark
import pytest

import millstream
from millstream.redis_client.client import Client
from millstream.testing.history import check_outputs
from tests.support.drivers import Driver
from tests.support.fields import text_fields
from tests.support.waiting import eventually

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
MESSAGES, KILLS, BATCHES = (40_000, 20, 10) if SOAK else (400, 0, 2)
"""Kills at random, besides the one between a commit and the end of its task."""
pytestmark = [pytest.mark.spark, pytest.mark.drivers, pytest.mark.faults]

APP = """
import os, time
import millstream
from millstream import App, Message, Rows, State
from prices import price
from taxes.rates import rate

app = App("shop")

@app.handler("orders", key="customer", into="totals")
def total(message: Message, state: State) -> dict:
    time.sleep(0.001)
    state["count"] = state.get("count", 0) + 1
    place = {"cwd": os.getcwd(), "millstream": millstream.__file__, "app": __file__}
    return {"id": message.id, "customer": message.text("customer"), "count": state["count"], "price": price() * rate(), **place}

@app.stage(Rows("orders", "_id string, customer string"), into="copies")
def copy(orders):
    from pyspark.sql import functions as F
    return orders.select(F.col("_id").alias("id"), "customer", F.udf(price, "int")().alias("price"))
"""
DEADLY = """
import psutil, signal
from millstream.delivery.commit_store import CommitStore

commit = CommitStore.commit

def commit_and_die(self, *args, **options):
    result = commit(self, *args, **options)
    try:
        os.unlink("{armed}")
    except FileNotFoundError:
        return result
    for one in psutil.Process().parents():
        if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()):
            open("{armed}-killed", "w").close()
            one.kill()
    os.kill(os.getpid(), signal.SIGKILL)

CommitStore.commit = commit_and_die
"""
"""The first executor to commit while the file is there takes it, and dies before its task has ended."""
UPSERTS = """
@app.stage(Rows("orders", "_id string, customer string"))
def newest(orders):
    writer = orders.withColumnRenamed("_id", "id").writeStream.format("redis-streams")
    return writer.options(target="hash", keyColumn="customer", keyPrefix="newest:", guardColumn="id")
"""


@pytest.fixture
def cluster(tmp_path: Path, millstream_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver that starts two executors; they have Python and its libraries from an archive."""
    home, app, taxes = tmp_path / "spark", tmp_path / "app", tmp_path / "elsewhere" / "taxes"
    for folder in (home, app, taxes):
        folder.mkdir(parents=True)
    # Executors work below Spark's home. With full counts PySpark is in it as an archive, which each Python compiles anew.
    for part in ("bin", "jars", *(("python",) if SOAK else ())):
        (home / part).symlink_to(Path(pyspark.__file__).parent / part)
    (app / "shop_of_cluster.py").write_text(APP + UPSERTS * SOAK + DEADLY.format(armed=tmp_path / "armed"))
    (app / "prices.py").write_text("def price() -> int:\n    return 1\n")
    (taxes / "rates.py").write_text("def rate() -> int:\n    return 10\n")
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
    options = (
        *("--spark-master", "local-cluster[2,1,1024]", "--py-files", str(taxes)),
        *("--max-per-batch", str(MESSAGES // BATCHES)),
        *("--conf", f"spark.archives={environment(tmp_path)}#environment"),
        *("--conf", "spark.executorEnv.PYTHONPATH=", "--conf", "spark.sql.shuffle.partitions=2"),
    )
    with Driver(f"{app}/shop_of_cluster.py", url=millstream_url, folder=tmp_path, options=options) as driver:
        yield driver


def environment(folder: Path) -> Path:
    """Pack what stands for a virtual environment, and unpack it for the driver."""
    here, source = folder / "environment", Path(millstream.__file__).parent
    (here / "bin").mkdir(parents=True)
    python = here / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$(dirname "$0")/../lib:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    packed = folder / "environment.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(here / "bin", "bin")
        for package in (source, *source.parent.glob("pyspark_millstream*")):
            archive.add(package, f"lib/{package.name}")
    # Not by `tarfile`: the first releases of Python 3.11, as Debian 12 has it, know no filter of what is extracted.
    subprocess.run(["tar", "-xzf", packed, "-C", here], check=True)
    return packed


def publish(client: Client, start: int) -> dict[bytes, list[str]]:
    """Add orders; return the ids of each customer's."""
    customers = [b"c%d" % (n % 50) for n in range(start, start + MESSAGES)]
    ids = client.pipeline([("XADD", "orders", "*", "customer", customer) for customer in customers])
    found: dict[bytes, list[str]] = {}
    for customer, entry_id in zip(customers, ids, strict=True):
        found.setdefault(customer, []).append(entry_id.decode())
    return found


def rows(client: Client, stream: str) -> list[dict[str, str]]:
    entries = client.execute("XRANGE", stream, "-", "+")
    return [text_fields(items) for _, items in entries]


def executors(driver: Driver) -> list[psutil.Process]:
    return [one for one in driver.descendants() if "CoarseGrainedExecutorBackend" in command_of(one)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it ends at this moment
        return ""


def wait_for(client: Client, stream: str, count: int, driver: Driver) -> None:
    eventually(lambda: client.execute("XLEN", stream) >= count, f"{count} {stream}", log=driver.errors)


def finish(driver: Driver, client: Client, count: int) -> None:
    wait_for(client, "totals", count, driver)
    wait_for(client, "copies", count, driver)
    if SOAK:
        newest = client.execute("XREVRANGE", "orders", "+", "-", "COUNT", 1)[0][0]
        eventually(lambda: client.execute("HGET", "newest:c49", "id") == newest, "the newest order", log=driver.errors)
    assert driver.stop() == 0


def kill_executors(driver: Driver, client: Client, folder: Path) -> None:
    """Kill one between a commit and the end of its task, then others one at a time, all through the first messages."""
    eventually((folder / "armed-killed").exists, "an executor to die", log=driver.errors)
    for kill in range(KILLS):
        wait_for(client, "totals", (kill + 1) * MESSAGES // (KILLS + 2), driver)
        eventually(lambda: len(executors(driver)) == 2, "two executors", log=driver.errors)
        random.choice(executors(driver)).kill()


def check(client: Client, ids: dict[bytes, list[str]], prices: Sequence[int], folder: Path) -> None:
    """Everything is there once, in order, by the version of the app of its time, which the driver has sent."""
    count = len(prices) * MESSAGES
    totals, copies = rows(client, "totals"), rows(client, "copies")
    check_outputs(ids, [(row["customer"].encode(), row["id"]) for row in totals], []).raise_if_bad()
    assert sorted(row["id"] for row in copies) == sorted(one for some in ids.values() for one in some)
    assert [row["count"] for row in totals if row["customer"] == "c7"] == [str(n + 1) for n in range(count // 50)]
    for price in prices:
        assert sum(row["price"] == str(10 * price) for row in totals) == MESSAGES
        assert sum(row["price"] == str(price) for row in copies) == MESSAGES
    for row in totals:
        assert "/app.zip/" in row["app"], "it came from the driver"
        assert row["cwd"].startswith(str(folder / "spark" / "work"))
        assert Path(row["millstream"]).is_relative_to(row["cwd"]), "it came with the archive"


def test_executors_that_die_lose_and_double_nothing(cluster: Driver, millstream_url: str, tmp_path: Path) -> None:
    with Client(millstream_url) as client:
        ids = publish(client, 0)
        (tmp_path / "armed").touch()
        cluster.start()
        kill_executors(cluster, client, tmp_path)
        finish(cluster, client, MESSAGES)
        check(client, ids, [1], tmp_path)


@pytest.mark.skipif(not SOAK, reason="the same as above, twice: make soak")
def test_an_upgraded_app_continues_where_the_earlier_one_has_stopped(
    cluster: Driver, millstream_url: str, tmp_path: Path
) -> None:
    with Client(millstream_url) as client:
        ids: dict[bytes, list[str]] = {}
        for price in (1, 2):
            (tmp_path / "app" / "prices.py").write_text(f"def price() -> int:\n    return {price}\n")
            for customer, later in publish(client, (price - 1) * MESSAGES).items():
                ids.setdefault(customer, []).extend(later)
            cluster.start()
            finish(cluster, client, price * MESSAGES)
        check(client, ids, [1, 2], tmp_path)
