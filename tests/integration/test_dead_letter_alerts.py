"""The alerts that are sent when dead letters arrive."""

import json
import logging
import os
import shlex
import signal
import socket
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.alerts import FigureAlerts
from millstream.errors import ConfigError
from millstream.observability.dead_letter_alerts import DeadLetterAlerts
from millstream.redis_client.client import Client
from tests.support.clocks import ManualClock
from tests.support.commandline import ended, reserved_port, running
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.webhooks import webhook

pytestmark = [pytest.mark.worker]

LETTER = {"app": "airline", "handler": "departure", "dead": 2}


@pytest.fixture
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other soon."""
    monkeypatch.setattr("millstream.observability.dead_letter_alerts._RETRY_WAITS_S", (0.0, 0.05, 0.1))


def close(alert_sender: DeadLetterAlerts) -> None:
    """Have all alerts sent, however long that takes here."""
    alert_sender.close(timeout_ms=FAIL_SAFE_S * 1_000)


def python(script: str, *args: object) -> str:
    """A command line that runs a Python script."""
    return shlex.join([sys.executable, "-c", script, *map(str, args)])


# --- What an alert contains ---


def test_a_webhook_receives_an_alert_as_json() -> None:
    with webhook() as hook, DeadLetterAlerts(hook.url) as alert_sender:
        alert_sender.send(LETTER)
        eventually(lambda: hook.received, "ring")
    assert hook.received == [{"events": 1, "summaries": [LETTER]}]


def test_a_command_receives_an_alert_on_its_standard_input_and_no_shell_runs(tmp_path: Path) -> None:
    output = tmp_path / "alert $(touch shell).json"
    with DeadLetterAlerts(
        command=python("import sys; open(sys.argv[1], 'w').write(sys.stdin.read())", output)
    ) as alert_sender:
        alert_sender.send(LETTER)
        close(alert_sender)
    assert json.loads(output.read_text()) == {"events": 1, "summaries": [LETTER]}
    assert not (tmp_path / "shell").exists()


def test_alerts_within_the_interval_are_summed_up_by_their_subject() -> None:
    with webhook() as hook, DeadLetterAlerts(hook.url, min_interval_s=3_600) as alert_sender:
        alert_sender.send(LETTER)
        eventually(lambda: hook.received, "first ring")
        for _ in range(100):
            alert_sender.send(LETTER)
            alert_sender.send({**LETTER, "handler": "arrival", "dead": 1.5})
        close(alert_sender)
    assert hook.received[1:] == [
        {"events": 200, "summaries": [{**LETTER, "dead": 200}, {**LETTER, "handler": "arrival", "dead": 150.0}]}
    ]


def test_alerts_are_sent_no_more_often_than_the_interval_allows() -> None:
    with webhook() as hook, DeadLetterAlerts(hook.url, min_interval_s=0.3) as alert_sender:
        for rings in (1, 2, 3):
            alert_sender.send(LETTER)
            eventually(lambda: len(hook.received) == rings, "ring")  # noqa: B023 - it is over by then
    assert min(later - earlier for earlier, later in pairwise(hook.at)) >= 0.29


def test_the_number_of_unsent_summaries_is_bounded() -> None:
    with webhook() as hook:
        with DeadLetterAlerts(hook.url, min_interval_s=3_600) as alert_sender:
            alert_sender.send(LETTER)
            eventually(lambda: hook.received, "first ring")
            for number in range(1_000):
                alert_sender.send({"error": f"number {number}", "dead": 1})
            close(alert_sender)
        last = hook.received[1]
    assert (last["events"], len(last["summaries"]), last["omitted"]) == (1_000, 100, 900)


def test_summaries_of_any_type_are_sent() -> None:
    odd = {"flag": True, "path": Path("x"), "nested": {"a": [1]}, "none": None}
    with webhook() as hook, DeadLetterAlerts(hook.url) as alert_sender:
        alert_sender.send(odd)
        eventually(lambda: hook.received, "ring")
    assert hook.received[0]["summaries"] == [{**odd, "path": "x"}]


def test_closing_sends_the_remaining_alerts_at_once() -> None:
    with webhook() as hook:
        alert_sender = DeadLetterAlerts(hook.url, min_interval_s=3_600)
        alert_sender.send(LETTER)
        eventually(lambda: hook.received, "first ring")
        alert_sender.send(LETTER)
        close(alert_sender)
        assert len(hook.received) == 2
        alert_sender.send(LETTER)
        alert_sender.close()
        assert len(hook.received) == 2


def test_an_alert_sender_without_a_webhook_or_command_sends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with DeadLetterAlerts() as alert_sender:
        alert_sender.send(LETTER)
    with DeadLetterAlerts("", "") as alert_sender:
        alert_sender.send(LETTER)
    assert not caplog.records, "an attempt to send would have failed"


# --- What goes wrong ---


@pytest.mark.usefixtures("quick_tries")
def test_a_webhook_that_fails_is_called_up_to_three_times(caplog: pytest.LogCaptureFixture) -> None:
    with webhook(500, 429) as hook:
        with DeadLetterAlerts(hook.url) as alert_sender:
            alert_sender.send(LETTER)
            eventually(lambda: hook.received, "third try")
        assert len(hook.at) == 3
        assert hook.at[1] - hook.at[0] >= 0.045
        assert hook.at[2] - hook.at[1] >= 0.095
    assert not caplog.records


@pytest.mark.usefixtures("quick_tries")
@pytest.mark.parametrize(("statuses", "tries"), [((500,) * 9, 3), ((404,) * 9, 1), ((302,) * 9, 1)])
def test_a_webhook_that_keeps_failing_is_warned_of_without_its_path(
    statuses: tuple[int, ...], tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with webhook(*statuses) as hook:
        with DeadLetterAlerts(hook.url) as alert_sender:
            alert_sender.send(LETTER)
            eventually(lambda: caplog.records, "complaint")
        assert len(hook.at) == tries
    assert f"cannot call the dead-letter webhook at 127.0.0.1: it answers {statuses[0]}" in caplog.text
    assert "secret" not in caplog.text


def test_a_failing_webhook_is_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(1e6)
    with webhook(*(404,) * 9) as hook, DeadLetterAlerts(hook.url, min_interval_s=0, clock=clock) as alert_sender:
        for tries, complaints in ((1, 1), (2, 1), (3, 1)):
            alert_sender.send(LETTER)
            eventually(lambda: len(hook.at) == tries, "try")  # noqa: B023 - it is over by then
            eventually(lambda: len(caplog.records) == complaints)  # noqa: B023 - it is over by then
        clock.now_ms += 60_000
        alert_sender.send(LETTER)
        eventually(lambda: len(caplog.records) == 2, "complaint")


def test_sending_an_alert_never_waits_for_the_webhook(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        alert_sender = DeadLetterAlerts(f"http://127.0.0.1:{deaf.getsockname()[1]}/", timeout_s=10 * FAIL_SAFE_S)
        for _ in range(10_000):
            alert_sender.send(LETTER)
        alert_sender.close(timeout_ms=300)
        assert alert_sender._thread is not None
        assert alert_sender._thread.is_alive(), "it waits for the answer yet"
        assert not caplog.records
    alert_sender._thread.join(FAIL_SAFE_S)  # it warns that the connection broke, and in no later test


@pytest.mark.usefixtures("quick_tries")
def test_an_unreachable_webhook_is_warned_of_and_the_next_alert_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    with reserved_port() as port, DeadLetterAlerts(f"http://127.0.0.1:{port}/", min_interval_s=0) as alert_sender:
        alert_sender.send(LETTER)
        eventually(lambda: caplog.records, "complaint")
    assert "ConnectError" in caplog.text


@pytest.mark.parametrize(
    ("command", "timeout_s", "complaint"),
    [
        (
            "/no/such/program",
            FAIL_SAFE_S,
            "cannot run the dead-letter command /no/such/program: No such file or directory",
        ),
        (
            python("import sys; print('no paper', file=sys.stderr); sys.exit(7)"),
            FAIL_SAFE_S,
            "failed with exit code 7: no paper",
        ),
        (python("import time; time.sleep(600)"), 0.5, "was killed: it took longer than 0.5 s"),
    ],
)
def test_a_command_that_fails_is_warned_of(
    command: str, timeout_s: float, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with DeadLetterAlerts(command=command, timeout_s=timeout_s) as alert_sender:
        alert_sender.send(LETTER)
        eventually(lambda: caplog.records, "complaint")
    assert complaint in caplog.text


def test_a_command_that_ends_without_reading_its_input_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with DeadLetterAlerts(command="true", timeout_s=FAIL_SAFE_S) as alert_sender:
        alert_sender.send({"text": "x" * 1_000_000})
        close(alert_sender)
    assert not caplog.records


def test_closing_ends_a_command_that_hangs_with_its_child_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid} .')\n"
        "time.sleep(600)"
    )
    alert_sender = DeadLetterAlerts(command=python(script, pids), timeout_s=600)
    alert_sender.send(LETTER)
    eventually(lambda: pids.exists() and pids.read_text().endswith("."), "process")
    alert_sender.close(timeout_ms=100)
    for pid in pids.read_text().split()[:2]:
        eventually(lambda: not _lives(int(pid)), "end of the command")  # noqa: B023 - it is over by then


@pytest.mark.parametrize(
    ("url", "command", "complaint"),
    [
        ("ftp://example.org/", None, "http:// or https://"),
        ("http://", None, "http:// or https://"),
        ("http://host:port/", None, "URL"),
        (None, "say 'hello", "cannot split the dead-letter command"),
        (None, " ", "is empty"),
    ],
)
def test_an_invalid_webhook_or_command_is_refused_at_once(url: str | None, command: str | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DeadLetterAlerts(url, command)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_an_interrupt_of_the_terminal_does_not_reach_the_command(tmp_path: Path) -> None:
    output = tmp_path / "output"
    before = signal.getsignal(signal.SIGINT)
    script = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpgid(0)))"
    with DeadLetterAlerts(command=python(script, output)) as alert_sender:
        alert_sender.send(LETTER)
        eventually(lambda: output.exists() and output.read_text(), "process")
    assert int(output.read_text()) != os.getpgid(0)
    assert signal.getsignal(signal.SIGINT) is before


# --- On workers ---

WORKER_APP = """
from millstream import App, Reject

app = App("shop")

@app.handler("orders")
def refuse(message):
    raise Reject("no")

@app.handler("orders", key="n")
def fail(message):
    if message.text("n") == "0":
        raise Reject("no")
"""


def test_a_worker_alerts_by_webhook_and_command_of_each_dead_letter_once(client: Client, tmp_path: Path) -> None:
    (tmp_path / "alerting_app.py").write_text(WORKER_APP)
    output = tmp_path / "output"
    command = python("import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))", output)

    def dead(alerts: list[dict[str, Any]], handler: str) -> int:
        return sum(one["dead"] for alert in alerts for one in alert["summaries"] if one["handler"] == handler)

    def given() -> list[dict[str, Any]]:
        lines = output.read_text().splitlines(keepends=True) if output.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    client.pipeline([("XADD", "orders", "*", "n", n) for n in range(5)])
    with webhook() as hook:
        options = ("--processes", "2", "--alert-url", hook.url, "--alert-command", command)
        with running("worker", str(tmp_path / "alerting_app.py"), *options, url=client.url) as worker:
            eventually(lambda: (dead(hook.received, "refuse"), dead(hook.received, "fail")) == (5, 1), "the alerts")
            client.pipeline([("XADD", "orders", "*", "n", n) for n in range(5, 7)])
            eventually(lambda: dead(hook.received, "refuse") == 7, "the alerts of the new ones")
            eventually(
                lambda: dead(given(), "refuse") == 7, "the command to be given them"
            )  # a stop ends it after a while
            worker.terminate()
            assert ended(worker).code == 0
        assert (dead(hook.received, "refuse"), dead(hook.received, "fail")) == (7, 1)
    assert {one["app"] for alert in hook.received for one in alert["summaries"]} == {"shop"}
    assert (dead(given(), "refuse"), dead(given(), "fail")) == (7, 1)


def test_a_process_that_was_restarted_counts_from_0_again() -> None:
    with webhook() as hook, DeadLetterAlerts(hook.url, min_interval_s=0) as alert_sender:
        alerts = FigureAlerts("shop", alert_sender)
        for pid, dead in ((1, 2), (1, 2), (1, 3), (2, 0), (2, 1), (2, 1)):
            alerts.add("w-0", pid, {"bill": {"dead": dead}})
        alerts.add("w-1", 3, {"bill": {"dead": 4}})
        close(alert_sender)
    assert sum(one["dead"] for alert in hook.received for one in alert["summaries"]) == 2 + 1 + 1 + 4
