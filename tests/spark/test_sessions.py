"""`millstream run` and its Spark session: what ends it, and what is reported before there is one."""

import os
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from tests.support.commandline import run
from tests.support.drivers import Driver
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.drivers]

ENDS = 10 if os.environ.get("MILLSTREAM_SOAK") else 1

APP = """
import threading, time
from pathlib import Path
from millstream import App, Message, Rows, State

app = App("app")

@app.handler("in", key="k", into="out")
def count(message: Message, state: State) -> dict:
    state["n"] = state.get("n", 0) + 1
    return {"k": message.text("k"), "n": state["n"]}

@app.stage(Rows("in", "k string"), into="copies")
def copy(rows):
    context = rows.sparkSession.sparkContext

    def stop_when_told():
        order = Path("stop-the-session")
        while not order.exists():
            time.sleep(0.05)
        order.unlink()
        context._jsc.sc().stop()

    threading.Thread(target=stop_when_told, daemon=True).start()
    return rows
"""


def test_a_run_continues_in_a_new_session_when_its_session_ends(millstream_url: str, tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(APP)
    options = ("--spark-master", "local[2,4]")

    def publish(client: Client) -> None:
        client.pipeline([("XADD", "in", "*", "k", n % 5) for n in range(50)])

    with Client(millstream_url) as client:
        publish(client)
        with Driver(str(tmp_path / "ending.py"), url=millstream_url, folder=tmp_path, options=options) as driver:
            driver.start()
            for round_ in range(ENDS + 1):
                count = 50 * (round_ + 1)
                for stream in ("out", "copies"):
                    eventually(lambda: client.execute("XLEN", stream) >= count, f"{count} {stream}", log=driver.errors)  # noqa: B023
                if round_ < ENDS:
                    (tmp_path / "stop-the-session").touch()
                    publish(client)
            assert driver.stop() == 0
        rows = [mapping_of(items) for _, items in client.execute("XRANGE", "out", "-", "+")]
        assert client.execute("XLEN", "copies") == 50 * (ENDS + 1)
    assert sorted((row[b"k"], int(row[b"n"])) for row in rows) == [
        (b"%d" % k, n) for k in range(5) for n in range(1, 10 * (ENDS + 1) + 1)
    ]
    assert (tmp_path / "stderr.log").read_text().count("the Spark session has ended") == ENDS


STAGE = """
from millstream import App, Rows

app = App("app")

@app.stage(Rows("in", "{schema}", options={options}), into="out")
def copy(rows):
    return rows
"""


@pytest.mark.parametrize(
    ("schema", "options", "url", "message"),
    [
        ("n strng", {}, "", "column n has the type 'strng', which Spark does not know; did you mean 'string'?"),
        ("n long, `a b` duble", {}, "", "did you mean 'double'?"),
        (
            "n string",
            {"minPartitions": "two"},
            "",
            "app.copy cannot be built: option minPartitions='two' must be a whole",
        ),
        ("n string", {}, "redis:/nowhere", "is not a Redis URL"),
        ("n string", {}, "redis://127.0.0.1:{port}/99", "has no database of this number"),
        ("n string", {}, "redis://nobody:wrong@127.0.0.1:{port}/0", "refuses the credentials"),
    ],
)
def test_an_error_in_the_url_or_in_a_stage_is_reported_before_java_is_started(
    schema: str, options: dict[str, str], url: str, message: str, millstream_url: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(STAGE.format(schema=schema, options=options))
    port = millstream_url.rpartition(":")[2].partition("/")[0]
    command = ("run", str(tmp_path / "wrong.py"), "--url", url.format(port=port) or millstream_url)
    refused = run(*command, env={"JAVA_HOME": "/nonexistent"})
    assert refused.code != 0
    assert refused.err.count("\n") == 1
    assert message in refused.err
    assert "Java" not in refused.err
