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

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.versions import HAS_LIMITS
from tests.support.commandline import free_port, run
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stop_within_a_batch_is_quick_and_quiet(asleep: Driver, number: int, code: int) -> None:
    assert asleep.stop(number) == code
    assert asleep.errors() == ""
    assert asleep.events[-1]["event"] == "stopped"


def stop_process_group(driver: Driver) -> None:
    """Send SIGTERM to each process of its group, as a service manager does."""
    group = os.getpgid(driver.process.pid)
    for pid in [*(one.pid for one in driver.descendants()), driver.process.pid]:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                os.kill(pid, signal.SIGTERM)


def test_a_run_serves_its_metrics_and_a_stop_of_its_whole_process_group_is_quiet(
    millstream_url: str, tmp_path: Path
) -> None:
    (tmp_path / "teller.py").write_text(TELLER)
    port = free_port()
    options = ("--metrics-address", str(port))
    driver = Driver(str(tmp_path / "teller.py"), url=millstream_url, folder=tmp_path, options=options)
    with Client(millstream_url) as client:
        client.pipeline([("XADD", "in", "*", "k", n) for n in range(10)])

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=FAIL_SAFE_S) as answer:
            text: str = answer.read().decode()
            return text

    with driver:
        driver.start()
        eventually(lambda: driver.has_emitted("batch"), "a batch", log=driver.errors)
        eventually(lambda: 'spark_rows_total{query="app.tell"} 10.0' in page(), "Spark has reported", log=driver.errors)
        text = page()
        stop_process_group(driver)
        assert driver.ended() == 0
    behind = (
        'millstream_spark_behind_messages{of="max",query="app.tell"} 0.0',
        'millstream_spark_stream_behind_messages{query="app.tell",stream="in"} 0.0',
    )
    for line in (
        'millstream_messages_read_total{handler="app.tell"} 10.0',
        'millstream_messages_committed_total{handler="app.tell"} 10.0',
        'millstream_messages_dead_lettered_total{handler="app.tell",reason=""} 1.0',
        'millstream_spark_rows_total{query="app.tell"} 10.0',
        *(behind if HAS_LIMITS else ()),
    ):
        assert line in text, text
    (said,) = (tmp_path / "stderr.log").read_text().splitlines()
    assert "WARNING app.tell: dead letter (rejected): message " in said


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
        ((), {"JAVA_HOME": "/nonexistent"}, "install Java 17 or later, or set JAVA_HOME"),
        ((), {"SPARK_REMOTE": "sc://127.0.0.1"}, "the variable SPARK_REMOTE is set"),
    ],
)
def test_the_error_names_settings_that_spark_cannot_start_with(
    options: tuple[str, ...], environment: dict[str, str], message: str, millstream_url: str, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    refused = run("run", str(tmp_path / "sleeper.py"), "--url", millstream_url, *options, env=environment)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert message in refused.err


def test_a_run_alerts_of_dead_letters_and_neither_debug_nor_a_logger_shows_a_password_or_a_token(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    """py4j logs every call that it makes, with the options of sources and the word by which it logs in to Java.

    A message without its key becomes a dead letter, of which the run alerts; the URL of the webhook is a secret, too.
    """
    (tmp_path / "talker.py").write_text(
        SLEEPER + "import logging\nlogging.getLogger('py4j').setLevel(logging.DEBUG)\n"
        "for name in ('java_gateway', 'clientserver'):\n    logging.getLogger(f'py4j.{name}').setLevel(logging.DEBUG)\n"
    )
    millstream_fresh_server.call("XADD", "in", "*", "k", "1")
    millstream_fresh_server.call("XADD", "in", "*", "without", "a key")
    millstream_fresh_server.call("CONFIG", "SET", "requirepass", PASSWORD)
    url = millstream_fresh_server.url.replace("://", f"://:{PASSWORD}@")
    given = tmp_path / "alert.json"
    with webhook() as hook:
        ended = run(
            "--debug",
            "run",
            str(tmp_path / "talker.py"),
            "--once",
            "--checkpoint",
            str(tmp_path / "cp"),
            "--alert-url",
            hook.url,
            "--alert-command",
            shlex.join(["tee", str(given)]),
            url=url,
        )
    assert ended.code == 0, ended.err
    assert hook.received == [{"events": 1, "summaries": [{"app": "app", "handler": "nap", "dead": 1}]}]
    assert json.loads(given.read_text()) == hook.received[0]
    assert "stopped: 1 processed, 1 dead letter" in ended.err
    assert "token=secret" not in ended.err
    assert "Command to send: A\\n***" in ended.err  # it has been logged, so there was something to hide
    assert re.search(r"option\\nsurl\\nsredis://:\*\*\*@127\.0\.0\.1", ended.err)
    assert not contains_password(ended.out + ended.err)
