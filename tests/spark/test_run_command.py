"""`millstream run` as a process: however it ends, one line says why and the exit code fits."""

import json
import os
import re
import shlex
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.versions import HAS_LIMITS
from tests.support.commandline import ended, reserved_port, run, running
from tests.support.drivers import Driver
from tests.support.urls import PASSWORD, contains_password
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.webhooks import webhook

pytestmark = [pytest.mark.spark, pytest.mark.drivers]

SLEEPER = """
import time
from millstream import App, Message

app = App("app")

@app.handler("in", key="k")
def nap(message: Message) -> None:
    time.sleep(0.2)
"""
TELLER = """
from millstream import App, Message, Reject

app = App("app")

@app.handler("in", key="k")
def tell(message: Message) -> None:
    if message.fields["k"] == b"7":
        raise Reject("no sevens")
"""


@pytest.fixture
def asleep(millstream_url: str, tmp_path: Path) -> Iterator[Driver]:
    """A run in the middle of a batch that takes minutes."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with (
        Client(millstream_url) as client,
        Driver(str(tmp_path / "sleeper.py"), url=millstream_url, folder=tmp_path) as driver,
    ):
        client.pipeline([("XADD", "in", "*", "k", n) for n in range(5_000)])
        driver.start()
        meta = "millstream:{in}:in:app.nap:meta"
        eventually(lambda: client.execute("HEXISTS", meta, "epoch"), "a batch", log=driver.errors)
        eventually(driver.workers, "a worker", log=driver.errors)
        yield driver


def stop_process_group(driver: Driver) -> int:
    """Send SIGTERM to each process of its group, as a service manager does; return its exit code.

    Java and its Python workers have a group of their own: the driver gets it as if it were sent to it alone.
    """
    group = os.getpgid(driver.process.pid)
    for pid in [*(one.pid for one in driver.descendants()), driver.process.pid]:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                os.kill(pid, signal.SIGTERM)
    return driver.ended()


def test_a_stop_of_the_whole_process_group_within_a_batch_is_quick_and_quiet(asleep: Driver) -> None:
    """Ctrl-C within a batch is in `test_sessions.py`."""
    assert stop_process_group(asleep) == 0
    assert asleep.errors() == ""
    assert asleep.events[-1]["event"] == "stopped"


@pytest.mark.parametrize("is_connected", [False, True], ids=["before it answers", "while it answers"])
def test_a_java_process_that_is_killed_while_it_starts_ends_the_run_with_one_line_and_not_as_a_wrong_setting(
    millstream_url: str, tmp_path: Path, is_connected: bool
) -> None:
    """Where a supervisor starts the run again, as `millstream auto` does, it does so after code 1."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)

    def kill_java() -> bool:
        for one in driver.descendants():
            with suppress(psutil.NoSuchProcess):
                if "java" in one.name() and (not is_connected or is_used(one)):
                    one.kill()
                    return True
        return False

    with Driver(str(tmp_path / "sleeper.py"), url=millstream_url, folder=tmp_path) as driver:
        driver.start()
        eventually(kill_java, "a Java process that starts", log=driver.errors)
        assert driver.ended() == 1
        assert driver.errors().startswith("error: Spark's Java process has ended")
        assert driver.errors().count("\n") == 1


def is_used(java: psutil.Process) -> bool:
    """Whether Python has a connection to it."""
    return any(one.status == psutil.CONN_ESTABLISHED for one in java.net_connections("tcp"))


def test_a_java_process_that_is_killed_ends_the_run_with_one_line(asleep: Driver) -> None:
    java = next(process for process in asleep.descendants() if "java" in process.name())
    java.kill()
    assert asleep.ended() == 1
    assert asleep.errors().startswith("error: Spark's Java process has ended")
    assert asleep.errors().count("\n") == 1


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (
            ("--spark-master", "bogus"),
            {},
            "Master must either be yarn or start with spark, k8s, or local; check --spark-master",
        ),
        (("--conf", "spark.driver.memory=abc"), {}, "Invalid maximum heap size: -Xmxabc"),
        (("--conf", "spark.scheduler.mode=abc"), {}, "Spark refuses its settings"),
        (
            (
                "--spark-master",
                "local-cluster[0,1,1024]",
                "--conf",
                "spark.driver.extraJavaOptions=-DZstdTempFolder=/nonexistent",
            ),
            {},
            "cannot load Spark's library zstd",
        ),
        (
            (),
            {"JAVA_HOME": "/nonexistent"},
            "error: JAVA_HOME is '/nonexistent', which has no bin/java: correct or unset it",
        ),
        ((), {"SPARK_REMOTE": "sc://127.0.0.1"}, "the variable SPARK_REMOTE is set"),
    ],
)
def test_the_error_names_settings_that_spark_cannot_start_with(
    options: tuple[str, ...], environment: dict[str, str], message: str, millstream_url: str, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    refused = run("run", str(tmp_path / "sleeper.py"), "--url", millstream_url, *options, env=environment)
    assert refused.code == 2
    started, error = refused.err.splitlines()
    assert started == "starting Spark"
    assert message in error


def test_a_run_says_which_handler_has_a_pattern_that_matches_no_stream(millstream_url: str, tmp_path: Path) -> None:
    (tmp_path / "matcher.py").write_text(SLEEPER.replace('"in", key="k"', 'pattern="none:*"'))
    done = run(
        "run", str(tmp_path / "matcher.py"), "--once", "--url", millstream_url, "--checkpoint", str(tmp_path / "c")
    )
    assert done.code == 0, done.err
    line = "handler app.nap: no stream matches 'none:*' yet; it processes nothing"
    assert [line for line in done.err.splitlines() if "matches" in line] == [line]


def lacking(page: str) -> list[str]:
    """What the run has done, and its page of metrics does not have."""
    behind = (
        'millstream_spark_behind_messages{of="max",query="app.tell"} 0.0',
        'millstream_spark_stream_behind_messages{query="app.tell",stream="in"} 0.0',
    )
    figures = (
        'millstream_messages_read_total{handler="app.tell"} 11.0',
        'millstream_messages_committed_total{handler="app.tell"} 11.0',
        'millstream_messages_dead_lettered_total{handler="app.tell",reason=""} 2.0',
        'millstream_spark_rows_total{query="app.tell"} 11.0',
        *(behind if HAS_LIMITS else ()),
    )
    return [line for line in figures if line not in page]


def test_a_run_serves_its_metrics_and_alerts_and_neither_debug_nor_a_logger_shows_a_password_or_a_token(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    """py4j logs every call that it makes, with the options of sources and the word by which it logs in to Java.

    A message that is rejected and one without its key become dead letters, of which the run alerts; the URL of the
    webhook is a secret, too.
    """
    (tmp_path / "talker.py").write_text(
        TELLER + "import logging\nlogging.getLogger('py4j').setLevel(logging.DEBUG)\n"
        "for name in ('java_gateway', 'clientserver'):\n    logging.getLogger(f'py4j.{name}').setLevel(logging.DEBUG)\n"
    )
    for n in range(10):
        millstream_fresh_server.call("XADD", "in", "*", "k", str(n))
    millstream_fresh_server.call("XADD", "in", "*", "without", "a key")
    millstream_fresh_server.call("CONFIG", "SET", "requirepass", PASSWORD)
    url = millstream_fresh_server.url.replace("://", f"://:{PASSWORD}@")
    given, log = tmp_path / "alert.json", tmp_path / "stderr.log"
    command = ["--debug", "run", str(tmp_path / "talker.py"), "--checkpoint", str(tmp_path / "cp")]
    command += ["--alert-command", shlex.join(["tee", str(given)])]

    def page() -> str:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=FAIL_SAFE_S) as got:
            text: str = got.read().decode()
            return text
        return ""

    def has_reported() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return not lacking(page())

    with (
        reserved_port() as port,
        webhook() as hook,
        log.open("wb") as errors,
        running(*command, "--metrics-address", str(port), "--alert-url", hook.url, url=url, stderr=errors) as process,
    ):
        eventually(has_reported, "Spark's report", log=log.read_text)
        eventually(lambda: given.exists() and given.read_text(), "the second alert", log=log.read_text)
        text = page()
        process.terminate()
        done = ended(process)
    said = log.read_text()
    assert done.code == 0, said
    assert lacking(text) == []
    assert hook.received == [{"events": 1, "summaries": [{"app": "app", "handler": "tell", "dead": 2}]}]
    assert json.loads(given.read_text()) == hook.received[0]
    assert said.count("WARNING app.tell: dead letter (rejected): message ") == 1
    assert "stopped: 9 processed, 2 dead letters" in said
    assert "token=secret" not in said
    assert "Command to send: A\\n***" in said  # it has been logged, so there was something to hide
    assert re.search(r"option\\nsurl\\nsredis://:\*\*\*@127\.0\.0\.1", said)
    assert not contains_password(done.out + said + text)
