"""`millstream auto` and its children on workers: refusals, deaths and stops. Changes: `tests/spark/test_auto_command.py`."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from millstream import App, Message
from millstream.cli.auto import check_served_by_both
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.automatic import Automatic
from tests.support.commandline import call
from tests.support.processes import await_end, descendants
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.worker]

ON_WORKERS = ("--spark-above", "1000000")
MIXED = """
from millstream import App, Message

app = App("mixed")

@app.handler("in")
def plain(message: Message) -> None: ...
"""


def test_stages_are_refused_by_name_and_only_leaves_them_out_and_lists_of_one_key_run_on_both(
    millstream_url: str,
) -> None:
    app = App("app")
    app.stage("in", into="copies", name="copy")(lambda rows: rows)

    @app.handler("in")
    def plain(message: Message) -> None: ...

    @app.handler("in", key="k", batch_size=10)
    def listed(messages: list[Message]) -> None: ...

    with pytest.raises(ConfigError, match="only Spark runs the stages copy: run them with `millstream run --only`"):
        check_served_by_both(app, millstream_url)
    check_served_by_both(app.only(["plain", "listed"]), millstream_url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--spark-above", "5", "--workers-below", "5"), "--spark-above 5 must be greater than --workers-below 5"),
        (("--worker-options", "--threads 3 --once"), "--worker-options must not have --once"),
        (("--run-options", "--checkpoint=here"), "--run-options must not have --checkpoint"),
        (("--run-options", "'"), "No closing quotation"),
    ],
)
def test_limits_and_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], message: str, millstream_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # what is called in this process leaves no trace of the app
    (tmp_path / "mixed_app.py").write_text(MIXED)
    refused = call("auto", str(tmp_path / "mixed_app.py"), "--only", "plain", *options, url=millstream_url)
    assert refused.code == 2
    assert message in refused.err


def test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost(client: Client, tmp_path: Path) -> None:
    with Automatic(client, tmp_path, *ON_WORKERS) as app:
        app.publish(200)
        app.start()
        eventually(app.done, "a worker at work", log=app.errors)
        killed = app.child()
        killed.kill()
        eventually(lambda: app.child().pid != killed.pid, "another child", log=app.errors)
        app.publish(200)
        app.ends()
        assert app.stop() == 0
        app.check()
        (restarted,) = [one for one in app.events if one["event"] == "restarting"]
        assert (restarted["engine"], restarted["reason"]) == ("workers", "was ended by SIGKILL")
        assert app.events[-1]["changes"] == 0


def test_the_engines_run_the_handlers_that_count_whatever_their_own_settings_say_and_read_the_file_of_the_command(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text('[worker]\nname = "from-the-file"\n')
    variables = {"MILLSTREAM_WORKER_ONLY": "another", "MILLSTREAM_WORKER_ONCE": "true"}
    options = (*ON_WORKERS, "--config", str(tmp_path / "settings.toml"))
    with Automatic(client, tmp_path, *options, environment=variables) as app:
        app.publish(20)
        app.start()
        app.ends()
        assert app.child().environ()["MILLSTREAM_WORKER_ONCE"] == "false"
        consumers = client.execute("XINFO", "CONSUMERS", "in", HandlerKeys("app", "count", "in").group)
        assert b"from-the-file-0" in {row[1] for row in consumers}
        assert app.stop() == 0


def test_a_killed_command_leaves_no_engine_behind(client: Client, tmp_path: Path) -> None:
    with Automatic(client, tmp_path, *ON_WORKERS) as app:
        app.publish(20)
        app.start()
        app.ends()
        family = descendants(app.process)
        assert len(family) >= 2
        app.process.kill()
        await_end(family)


def test_an_engine_that_an_operator_stops_in_order_ends_the_command(client: Client, tmp_path: Path) -> None:
    with Automatic(client, tmp_path, *ON_WORKERS) as app:
        app.publish(20)
        app.start()
        app.ends()
        app.child().send_signal(signal.SIGTERM)
        assert app.process.wait(FAIL_SAFE_S) == 0
        assert "the workers: its command has ended in order" in app.errors()


def test_an_engine_that_its_options_keep_from_starting_ends_the_command_with_the_code_of_configuration(
    client: Client, tmp_path: Path
) -> None:
    with Automatic(client, tmp_path, *ON_WORKERS, "--worker-options", "--no-such-option") as app:
        app.start()
        assert app.process.wait(FAIL_SAFE_S) == 2
        assert "the workers cannot run with these settings" in app.errors()


@pytest.mark.waits
def test_an_engine_that_does_not_stop_in_time_is_killed(client: Client, tmp_path: Path) -> None:
    with Automatic(client, tmp_path, *ON_WORKERS, "--stop-timeout", "500ms") as app:
        app.publish(20)
        app.start()
        app.ends()
        client.execute("XADD", "in", "*", "k", 0, "n", 20, "endless", 1)
        eventually((tmp_path / "endless").exists, "a message that never ends", log=app.errors)
        child = app.child()
        assert app.stop() == 0
        assert not psutil.pid_exists(child.pid)
        assert f"process {child.pid} did not stop within 0.5 s; killing it" in app.errors()
