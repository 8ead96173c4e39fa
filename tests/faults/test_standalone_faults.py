"""A real standalone cluster, of which everything dies: executors, a worker, the driver, the master."""

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.testing.history import check_outputs
from tests.support.commandline import PROGRAM
from tests.support.drivers import Driver
from tests.support.fields import text_fields
from tests.support.memory import refusals
from tests.support.standalone import Standalone
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.spark,
    pytest.mark.drivers,
    pytest.mark.faults,
    pytest.mark.skipif(
        not os.environ.get("MILLSTREAM_SOAK"), reason="six Java processes, started many times: make soak"
    ),
]
ROUNDS = int(os.environ.get("MILLSTREAM_ROUNDS", "10"))
PORTION, CUSTOMERS, STREAMS = 300, 20, 300
KEYS = HandlerKeys("desk", "follow", "orders")
ZOMBIE_MS = 60_000

APP = """
import os
import time
from millstream import App, Message, Reject, Retry, Rows, State

app = App("desk")

@app.handler("orders", key="customer", into="followed", retry=Retry(attempts=8, delay_ms=10))
def follow(message: Message, state: State) -> dict:
    time.sleep(0.002)
    refused_until = message.fields.get("refuse")
    if refused_until and not os.path.exists(refused_until):
        raise Reject("as it says")
    state["count"] = state.get("count", 0) + 1
    return {"id": message.id, "customer": message.text("customer"), "n": message.text("n"), "count": state["count"]}

@app.stage(Rows("orders", "_id string, n string"), into="days")
def days(orders):
    return orders.dropDuplicates(["n"])  # what was published twice comes once, as long as its state is kept

@app.stage(Rows("orders", "_id string, n string"), into="copies")
def copy(orders):
    return orders

@app.handler(pattern="many.*", key="customer", into="scattered")
def scatter(message: Message, state: State) -> dict:
    state["count"] = state.get("count", 0) + 1
    return {"stream": message.stream, "count": state["count"], "size": len(message.fields.get("blob", ""))}
"""

STAGES = """
from millstream import App, Rows

app = App("desk")

@app.stage(Rows("orders", "_id string, n string"), into="copies")
def copy(orders):
    return orders

@app.stage(Rows("orders", "_id string, n string"))
def files(orders):
    return orders.writeStream.format("parquet").option("path", "{folder}")
"""


class Orders:
    """What was published, and what must have come of it.

    * `refused_every`: every so many-th order is refused, until `accepts` exists
    * `redriven`: whether all that were refused are to be accepted after a redrive
    """

    def __init__(self, client: Client, *, refused_every: int = 100, accepts: Path = Path("/never")) -> None:
        self.client = client
        self.refused_every = refused_every
        self.accepts = accepts
        self.redriven = False
        self.of: dict[bytes, list[str]] = {}
        self.number_of: dict[str, str] = {}
        self.dead: list[str] = []
        self.published = self.numbers = self.scattered = 0

    def publish(self) -> None:
        """One portion: each order twice, some that are refused, and some to many streams, of which one is large."""
        commands, customers = [], []
        for n in range(self.numbers, self.numbers + PORTION):
            for _ in range(2):
                customers.append(b"c%d" % (n % CUSTOMERS))
                refused = n % self.refused_every == self.refused_every - 1 and not self.accepts.exists()
                refuse = ("refuse", str(self.accepts)) if refused else ()
                commands.append(("XADD", "orders", "*", "customer", customers[-1], "n", n, *refuse))
        for customer, command, reply in zip(customers, commands, self.client.pipeline(commands), strict=True):
            entry_id = reply.decode()
            if "refuse" in command:
                self.dead.append(entry_id)
            self.of.setdefault(customer, []).append(entry_id)
            self.number_of[entry_id] = str(command[6])
        self.numbers += PORTION
        self.published += 2 * PORTION
        blob = b"x" * (5 << 20)
        self.client.pipeline([("XADD", f"many.{n}", "*", "customer", "x", "blob", b"") for n in range(STREAMS)])
        self.client.execute("XADD", "many.0", "*", "customer", "x", "blob", blob)
        self.scattered += STREAMS + 1

    @property
    def letters(self) -> list[str]:
        """The ids of the dead letters that are left at the end."""
        return [] if self.redriven else self.dead

    def rows(self, stream: str) -> list[dict[str, str]]:
        entries = self.client.execute("XRANGE", stream, "-", "+")
        return [text_fields(items) for _, items in entries]

    def is_done(self) -> bool:
        """Whether as much has come as must."""
        wanted = {"followed": self.published - len(self.letters), "days": self.numbers, "copies": self.published}
        wanted |= {"scattered": self.scattered, KEYS.dead_letters: len(self.letters)}
        return all(self.client.execute("XLEN", stream) >= count for stream, count in wanted.items())

    def check(self) -> None:
        """Everything once, in order; each state has been kept."""
        followed, days, copies = self.rows("followed"), self.rows("days"), self.rows("copies")
        found = self.client.execute("XRANGE", KEYS.dead_letters, "-", "+")
        dead = [DeadLetter.parse(*entry).id for entry in found]
        assert sorted(dead) == sorted(self.letters)
        effects = [(row["customer"].encode(), row["id"]) for row in followed if row["id"] in self.number_of]
        check_outputs(self.of, effects, self.dead).raise_if_bad()
        again = Counter(row["n"] for row in followed if row["id"] not in self.number_of)
        assert again == (Counter(self.number_of[one] for one in self.dead) if self.redriven else Counter())
        counts: dict[str, int] = {}
        for row in followed:
            counts[row["customer"]] = counts.get(row["customer"], 0) + 1
            assert row["count"] == str(counts[row["customer"]])
        assert sorted(int(row["n"]) for row in days) == list(range(self.numbers))
        assert sorted(int(row["n"]) for row in copies) == sorted([*range(self.numbers)] * 2)
        scattered: dict[str, int] = {}
        for row in self.rows("scattered"):
            scattered[row["stream"]] = scattered.get(row["stream"], 0) + 1
            assert row["count"] == str(scattered[row["stream"]])
        assert sum(scattered.values()) == self.scattered


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Standalone]:
    """A master and two workers."""
    cluster = Standalone(tmp_path)
    cluster.start_master()
    cluster.start_worker()
    cluster.start_worker()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def driver(
    cluster: Standalone, millstream_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    """A run on the cluster, not started yet."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "desk.py").write_text(APP)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    options = (
        *("--spark-master", cluster.url, "--max-per-batch", "400"),
        *("--conf", "spark.executor.memory=512m", "--conf", "spark.sql.shuffle.partitions=2"),
        # More would be given to the first consumer, also while that one is stopped.
        *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.cores.max=2"),
    )
    with Driver(f"{tmp_path}/app/desk.py", url=millstream_url, folder=tmp_path, options=options) as driver:
        yield driver


def await_progress(orders: Orders, driver: Driver, cluster: Standalone) -> None:
    """Wait until a part of what was published last is done."""
    goal = orders.client.execute("XLEN", "followed") + 50
    eventually(
        lambda: orders.client.execute("XLEN", "followed") >= goal or not driver.alive or orders.is_done(),
        f"{goal} of {orders.published} followed",
        log=driver.errors,
    )
    assert driver.alive, driver.errors()


def finish(orders: Orders, driver: Driver, cluster: Standalone) -> None:
    eventually(lambda: orders.is_done() or not driver.alive, "all of it", log=driver.errors)
    assert driver.alive, driver.errors()
    assert driver.stop() == 0
    orders.check()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_message_is_applied_once_though_executors_worker_driver_and_master_die(
    cluster: Standalone, driver: Driver, client: Client, number: int
) -> None:
    orders = Orders(client)
    orders.publish()
    driver.start()
    for _ in range(2):
        await_progress(orders, driver, cluster)
        eventually(cluster.executors, "an executor", log=driver.errors)
        with suppress(psutil.NoSuchProcess):
            random.choice(cluster.executors()).kill()
        orders.publish()
    await_progress(orders, driver, cluster)
    cluster.kill_worker()
    orders.publish()
    await_progress(orders, driver, cluster)
    driver.kill()
    orders.publish()
    driver.start()  # one worker of one core is left
    await_progress(orders, driver, cluster)
    cluster.start_worker()
    cluster.kill_master()
    orders.publish()
    await_progress(orders, driver, cluster)
    cluster.start_master()
    finish(orders, driver, cluster)


def test_a_stopped_driver_that_wakes_after_another_took_over_changes_nothing(
    cluster: Standalone, driver: Driver, client: Client, millstream_url: str, tmp_path: Path
) -> None:
    orders = Orders(client)
    orders.publish()
    driver.start()
    await_progress(orders, driver, cluster)
    zombie = [psutil.Process(driver.process.pid), *driver.descendants()]
    for one in zombie:
        one.suspend()
    cluster.start_worker()  # the zombie keeps its executors
    cluster.start_worker()
    with Driver(f"{tmp_path}/app/desk.py", url=millstream_url, folder=tmp_path, options=driver.options) as second:
        second.start()
        orders.publish()
        await_progress(orders, second, cluster)
        wake_at_ms = server_time_ms(client) + ZOMBIE_MS
        eventually(lambda: server_time_ms(client) >= wake_at_ms, "a minute of the zombie's sleep", log=second.errors)
        for one in reversed(zombie):
            one.resume()
        assert driver.ended() != 0, "somebody newer is at work"
        orders.publish()
        finish(orders, second, cluster)


def test_of_two_live_drivers_on_one_checkpoint_one_continues_and_no_checkpoint_is_called_damaged(
    cluster: Standalone, driver: Driver, client: Client, millstream_url: str, tmp_path: Path
) -> None:
    orders = Orders(client)
    orders.publish()
    driver.start()
    await_progress(orders, driver, cluster)
    cluster.start_worker()  # the first keeps its executors
    cluster.start_worker()
    with Driver(f"{tmp_path}/app/desk.py", url=millstream_url, folder=tmp_path, options=driver.options) as second:
        second.start()
        while driver.alive and second.alive:
            orders.publish()
            time.sleep(2)
        loser, survivor = (driver, second) if second.alive else (second, driver)
        assert loser.ended() != 0, "one of them was replaced"
        assert survivor.alive, survivor.errors()
        orders.publish()
        finish(orders, survivor, cluster)
    said = (tmp_path / "stderr.log").read_text()
    assert "damaged" not in said, said
    assert "cannot resume" not in said, said


def numbers_in(folder: Path) -> list[int]:
    """The numbers in the files that Spark's file sink counts as written; it leaves those of failed tasks behind."""
    paths: set[str] = set()
    for log in (folder / "_spark_metadata").iterdir():
        if not log.name.startswith("."):
            paths |= {json.loads(line)["path"] for line in log.read_text().splitlines()[1:]}
    tables = [pq.read_table(path.removeprefix("file://")) for path in paths]
    return sorted(int(one) for table in tables for one in table["n"].to_pylist())


def test_of_two_live_drivers_with_stages_alone_the_newer_one_continues_and_each_row_is_written_once(
    cluster: Standalone, driver: Driver, client: Client, millstream_url: str, tmp_path: Path
) -> None:
    def publish() -> None:
        first = client.execute("XLEN", "orders")
        client.pipeline([("XADD", "orders", "*", "n", n) for n in range(first, first + PORTION)])

    def is_done(driver: Driver) -> bool:
        count = client.execute("XLEN", "orders")
        written = len(numbers_in(tmp_path / "files")) if (tmp_path / "files" / "_spark_metadata").exists() else 0
        return (client.execute("XLEN", "copies") >= count and written >= count) or not driver.alive

    (tmp_path / "app" / "desk.py").write_text(STAGES.format(folder=tmp_path / "files"))
    publish()
    driver.start()
    eventually(lambda: is_done(driver), "the first portion", log=driver.errors)
    cluster.start_worker()  # the first keeps its executors
    cluster.start_worker()
    with Driver(f"{tmp_path}/app/desk.py", url=millstream_url, folder=tmp_path, options=driver.options) as second:
        second.start()
        while driver.alive and second.alive:
            publish()
            time.sleep(1)
        assert driver.ended() != 0
        publish()
        eventually(lambda: is_done(second), "all of it", log=second.errors)
        assert second.alive, second.errors()
        assert second.stop() == 0
    everything = list(range(client.execute("XLEN", "orders")))
    copies = [int(text_fields(items)["n"]) for _, items in client.execute("XRANGE", "copies", "-", "+")]
    assert sorted(copies) == everything
    assert numbers_in(tmp_path / "files") == everything


def redrive_and_kill(client: Client, url: str, *, left: int) -> None:
    """Start a redrive, and kill it as soon as at most so many letters are left."""
    command = [*PROGRAM, "dlq", "redrive", "desk.follow", "--yes", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redrive:
        eventually(
            lambda: client.execute("XLEN", KEYS.dead_letters) <= left or redrive.poll() is not None,
            f"{left} letters left",
        )
        redrive.kill()


def test_orders_that_were_refused_are_each_applied_once_by_a_redrive_that_is_killed_again_and_again(
    cluster: Standalone, driver: Driver, client: Client, millstream_url: str, tmp_path: Path
) -> None:
    orders = Orders(client, refused_every=4, accepts=tmp_path / "accepts")
    orders.publish()
    driver.start()
    orders.publish()
    eventually(lambda: orders.is_done() or not driver.alive, "all refused orders in dead letters", log=driver.errors)
    orders.accepts.touch()
    orders.redriven = True
    kills = 0
    while letters := client.execute("XLEN", KEYS.dead_letters):
        redrive_and_kill(client, millstream_url, left=random.randrange(letters))
        if kills < 2 and (executors := cluster.executors()):
            kills += 1
            with suppress(psutil.NoSuchProcess):
                random.choice(executors).kill()
            orders.publish()
    await_progress(orders, driver, cluster)
    finish(orders, driver, cluster)


def test_a_run_that_is_restarted_with_other_numbers_of_cores_continues_exactly(
    cluster: Standalone, driver: Driver, client: Client
) -> None:
    cluster.start_worker()
    orders = Orders(client)
    for cores in (1, 3, 2):
        orders.publish()
        driver.start("--conf", f"spark.cores.max={cores}")
        await_progress(orders, driver, cluster)
        if cores == 3:
            driver.kill()
        else:
            assert driver.stop() == 0
    orders.publish()
    driver.start()
    finish(orders, driver, cluster)


def test_a_redis_without_memory_under_kills_loses_and_doubles_nothing(
    cluster: Standalone, driver: Driver, client: Client
) -> None:
    orders = Orders(client)
    orders.publish()
    driver.start()
    await_progress(orders, driver, cluster)
    before = refusals(client)
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        eventually(cluster.executors, "an executor", log=driver.errors)
        with suppress(psutil.NoSuchProcess):
            random.choice(cluster.executors()).kill()
        eventually(lambda: refusals(client) > before, "a write that is refused", log=driver.errors)
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    orders.publish()
    await_progress(orders, driver, cluster)
    driver.kill()
    driver.start()
    finish(orders, driver, cluster)
