"""`millstream run` and its Spark session: what ends it, and what is reported before there is one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from millstream.spark.run.session import FIRST_COMPILER
from millstream.spark.versions import HAS_LIMITS
from tests.support.commandline import environment
from tests.support.drivers import Driver
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark, pytest.mark.drivers]

ENDS = 10 if os.environ.get("MILLSTREAM_SOAK") else 1

APP = """
import threading, time
from pathlib import Path
from millstream import App, Message, Rows, State

app = App("app")

@app.handler("in", key="k", into="out")
def count(message: Message, state: State) -> dict:
    if message.text("k") == "long":
        Path("in-a-batch").touch()
        time.sleep(3_600)
    state["n"] = state.get("n", 0) + 1
    return {"k": message.text("k"), "n": state["n"]}

@app.stage(Rows("in", "k string"))
def copy(rows):
    context = rows.sparkSession.sparkContext

    def stop_when_told():
        order = Path("stop-the-session")
        while not order.exists():
            time.sleep(0.05)
        order.unlink()
        context._jsc.sc().stop()

    def note(rows, batch):
        if rows.where("k = 'long'").count():
            Path("in-a-batch-of-the-stage").touch()
            try:
                context._jvm.java.lang.Thread.sleep(3_600_000)
            except Exception as error:  # as long as the errors of jobs are, which a stop interrupts as well
                text = str(error).replace("\\n", " " * 15_000 + "\\n", 1)
                raise RuntimeError(f"py4j.protocol.Py4JJavaError: {text}")
        count = rows.where("k <> 'long'").count()
        with open("copied", "a") as copied:
            copied.write(f"{batch} {count}\\n")

    threading.Thread(target=stop_when_told, daemon=True).start()
    return rows.writeStream.foreachBatch(note)
"""


def copied(folder: Path) -> int:
    """How many rows the stage has had; a batch that is repeated in the next session counts once."""
    noted = folder / "copied"
    lines = noted.read_text().splitlines() if noted.exists() else []
    return sum({int(batch): int(rows) for batch, rows in map(str.split, lines)}.values())


MOST_DAEMONS = 1 if HAS_LIMITS else 2
"""Since Spark 4.2 one forks all workers: those that read and those that run the handler."""


def daemons(driver: Driver) -> set[int]:
    """The parents of its Python workers, busy or idle."""
    found = set()
    for worker in driver.workers():
        with suppress(psutil.NoSuchProcess):
            parent = worker.parent()
            if parent is not None and "daemon pyspark." in " ".join(parent.cmdline()):  # else its daemon has just ended
                found.add(parent.pid)
    return found


def test_a_run_continues_in_a_new_session_when_its_session_ends_and_ctrl_c_within_a_batch_is_quick_and_quiet(
    millstream_url: str, tmp_path: Path
) -> None:
    (tmp_path / "ending.py").write_text(APP)
    # Two cores: the long task of the handler holds one, and the stage needs one to come to its long batch.
    options = ("--spark-master", "local[2,4]", "--conf", "spark.sql.shuffle.partitions=1")

    def publish(client: Client) -> None:
        client.pipeline([("XADD", "in", "*", "k", n % 5) for n in range(50)])

    with Client(millstream_url) as client:
        publish(client)
        with Driver(str(tmp_path / "ending.py"), url=millstream_url, folder=tmp_path, options=options) as driver:

            def wait_for(condition: Callable[[], bool], what: str) -> None:
                def holds() -> bool:
                    assert driver.alive, driver.errors()
                    return condition()

                eventually(holds, what, log=driver.errors)

            driver.start()
            earlier: set[int] = set()
            for round_ in range(ENDS + 1):
                count = 50 * (round_ + 1)
                wait_for(lambda: client.execute("XLEN", "out") >= count, f"{count} out")  # noqa: B023
                wait_for(lambda: copied(tmp_path) >= count, f"{count} copied")  # noqa: B023
                forking = daemons(driver) - earlier  # those of the last session may not have ended yet
                assert len(forking) <= MOST_DAEMONS
                earlier |= forking
                if round_ < ENDS:
                    (tmp_path / "stop-the-session").touch()
                    publish(client)
            assert FIRST_COMPILER not in driver.java().cmdline()  # a stage may need the second one
            client.execute("XADD", "in", "*", "k", "long")
            wait_for((tmp_path / "in-a-batch").exists, "a long batch")
            wait_for((tmp_path / "in-a-batch-of-the-stage").exists, "a long batch of the stage")
            said = (tmp_path / "stderr.log").read_text()
            assert driver.stop(signal.SIGINT) == 130
            assert (tmp_path / "stderr.log").read_text() == said
        assert driver.events[-1]["event"] == "stopped"
        rows = [mapping_of(items) for _, items in client.execute("XRANGE", "out", "-", "+")]
    assert copied(tmp_path) == 50 * (ENDS + 1)
    assert sorted((row[b"k"], int(row[b"n"])) for row in rows) == [
        (b"%d" % k, n) for k in range(5) for n in range(1, 10 * (ENDS + 1) + 1)
    ]
    assert said.count("the Spark session has ended") == ENDS


STAGE = """
from millstream import App, Rows

app = App("app")

@app.stage(Rows("in", "{schema}", options={options}), into="out")
def copy(rows):
    return rows
"""


CALLER = """
import json, sys
from tests.support.commandline import call

outcomes = [call(*args) for args in json.load(sys.stdin)]
print(json.dumps([(outcome.code, outcome.err) for outcome in outcomes]))
"""
WRONG: list[tuple[str, dict[str, str], str, str]] = [
    ("n strng", {}, "", "column n has the type 'strng', which Spark does not know; did you mean 'string'?"),
    ("n long, `a b` duble", {}, "", "did you mean 'double'?"),
    ("n string", {"minPartitions": "two"}, "", "app.copy cannot be built: option minPartitions='two' must be a whole"),
    ("n string", {}, "redis:/nowhere", "the URL must begin with redis://"),
    ("n string", {}, "redis://127.0.0.1:{port}/99", "has no database of this number"),
    ("n string", {}, "redis://nobody:wrong@127.0.0.1:{port}/0", "refuses the credentials"),
]


def test_an_error_in_the_url_or_in_a_stage_is_reported_before_java_is_started(
    millstream_url: str, tmp_path: Path
) -> None:
    port = millstream_url.rpartition(":")[2].partition("/")[0]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    commands = []
    for number, (schema, options, url, _) in enumerate(WRONG):
        app = tmp_path / f"wrong{number}.py"
        app.write_text(STAGE.format(schema=schema, options=options))
        commands.append(["run", str(app), "--url", url.format(port=port) or millstream_url])
    done = subprocess.run(
        [sys.executable, "-c", CALLER],
        input=json.dumps(commands),
        env=environment(None, {"JAVA_HOME": "/nonexistent", "PYTHONPATH": path}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    refusals = json.loads(done.stdout)
    for (code, said), (*_, message) in zip(refusals, WRONG, strict=True):
        assert code != 0, message
        assert said.count("\n") == 1, said
        assert message in said
        assert "Java" not in said
