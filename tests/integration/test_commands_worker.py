"""`millstream worker`, as processes of its own, on a real Redis."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from millstream.admin.liveness import find_workers
from millstream.delivery.reliable_stream import NACK_IDLE_MS
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys, worker_name_key
from millstream.redis_client.replies import mapping_of
from millstream.worker.process.supervisor import STUCK_CODE
from millstream.worker.static_membership import StaticMembership
from tests.support.clocks import ManualClock
from tests.support.commandline import PROGRAM, Outcome, call, ended, environment, running
from tests.support.processes import lives
from tests.support.running_codes import CODE
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.worker]

ENDLESS_S = "1000000"

APP = """
import glob, os, time
from millstream import App, Message

app = App("shop")

@app.handler("orders", into="done", time_limit_ms=10_000_000)
def handle(message: Message):
    print("a handler may print")
    print('{"event": "figures"}')
    if b"wait" in message.pairs:
        open(os.environ["MARKER"] + "-waits", "w").close()
        time.sleep(float(message.fields["wait"]))
    if b"meet" in message.pairs:
        open(f"{os.environ['MARKER']}-met-{os.getpid()}", "w").close()
        while len(glob.glob(os.environ["MARKER"] + "-met-*")) < 2:
            time.sleep(0.01)
    if b"die" in message.pairs and not os.path.exists(os.environ["MARKER"]):
        open(os.environ["MARKER"], "w").close()
        os._exit(9)
    return {"n": message.fields["n"], "pid": os.getpid()}

@app.stage("orders", into="copies")
def copy(orders):
    return orders
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "shop_app.py"
    path.write_text(APP)
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # what is called in this process leaves no trace of the app
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # nor for the processes of later tests
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return f"{path}:app"


@pytest.fixture
def waits(tmp_path: Path) -> Path:
    """It exists once a message with a wait is being worked on."""
    return tmp_path / "marker-waits"


def fill(client: Client, count: int, *more: str) -> None:
    client.pipeline([("XADD", "orders", "*", "n", n, *more) for n in range(count)])


def done(client: Client) -> list[dict[bytes, bytes]]:
    entries = client.execute("XRANGE", "done", "-", "+")
    return [mapping_of(pairs) for _, pairs in entries]


def names_in_use(client: Client) -> set[str]:
    return {key.decode().rpartition(":")[2] for key in client.execute("KEYS", "millstream:worker:shop:*-[0-9]")}


def end(worker: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> Outcome:
    worker.send_signal(number)
    return ended(worker)


def test_processes_share_the_work_report_their_figures_and_end_in_order(client: Client, app: str) -> None:
    fill(client, 200, "x", "meet")  # a process goes on once another has begun as well
    options = ("--processes", "2", "--threads", "1", "--prefetch", "10", "--json")
    with running("worker", app, *options, url=client.url) as worker:
        eventually(lambda: len(done(client)) == 200, "all messages to be done")
        assert len(names_in_use(client)) == 2
        outcome = end(worker)
    events = outcome.json_lines()
    assert (outcome.code, events[0]["event"], events[-1]) == (0, "started", {"event": "stopped"})
    last = {event["worker"]: event["handlers"]["handle"] for event in events if event["event"] == "figures"}
    assert sum(figures["processed"] for figures in last.values()) == 200
    assert len({entry[b"pid"] for entry in done(client)}) == 2
    assert outcome.err.startswith("not run: the stages copy need Spark; use `millstream run`\n")
    assert outcome.err.count("a handler may print") == outcome.err.count('{"event": "figures"}') == 200
    assert client.execute("XPENDING", "orders", "millstream:shop.handle")[0] == 0
    assert call("info", "shop", "--json", url=client.url).json()["restarts"] == [], "an orderly stop is no restart"


def test_a_process_that_dies_is_restarted_under_its_name_and_continues(client: Client, app: str) -> None:
    fill(client, 20)
    client.execute("XADD", "orders", "*", "n", 20, "x", "die")
    with running("worker", app, "--name", "till", url=client.url) as worker:
        eventually(lambda: len(done(client)) == 21, "all messages to be done")
        outcome = end(worker)
    assert outcome.code == 0
    assert "worker till-0 ended with code 9; restarting in 0.1 s" in outcome.err
    seen = call("info", "shop", url=client.url)
    assert re.search(
        r"shop: 1 restart of worker processes within 10 min; the last .+ ago: till-0 ended with code 9", seen.out
    )
    assert sorted(int(entry[b"n"]) for entry in done(client)) == list(range(21))


def test_a_process_that_is_started_while_its_supervisor_dies_ends_quietly() -> None:
    command = (sys.executable, "-m", "millstream.cli.child", "worker_child", "till-0")
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=FAIL_SAFE_S)
    assert (found.returncode, found.stdout, found.stderr) == (STUCK_CODE, b"", b"")


def test_a_process_has_no_url_of_redis_among_its_arguments_and_ends_with_a_supervisor_that_is_killed(
    client: Client, app: str
) -> None:
    fill(client, 1)
    with running("worker", app, "--name", "till", "--url", client.url):
        eventually(lambda: len(done(client)) == 1, "the message to be done")
        child = int(done(client)[0][b"pid"])
        arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
    assert "till-0" in arguments
    assert not any(client.url in argument for argument in arguments)
    eventually(lambda: not lives(child), "the process to end with its supervisor")


def test_a_process_whose_supervisor_was_killed_ends_before_its_name_is_free(
    client: Client, app: str, waits: Path
) -> None:
    fill(client, 1)

    def has_ended() -> bool:
        names = client.execute("KEYS", "millstream:worker:shop:*")
        living = lives(child)
        assert names or not living, "another may have its name while it lives"
        return not living

    with running("worker", app, "--stop-timeout", ENDLESS_S, url=client.url):
        eventually(lambda: len(done(client)) == 1, "the message to be done")
        child = int(done(client)[0][b"pid"])
        fill(client, 1, "wait", ENDLESS_S)
        eventually(waits.exists, "a message to be worked on")
    eventually(has_ended, "the process to end, whatever it does")


def test_a_worker_ends_when_the_reader_of_its_figures_has_closed_the_pipe(client: Client, app: str) -> None:
    fill(client, 1)
    with running("worker", app, "--json", url=client.url) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.readline()
        worker.stdout.close()
        log = worker.stderr.read().decode()
        assert worker.wait(FAIL_SAFE_S) == 141
    assert "restarting" not in log


def test_ctrl_c_stops_a_worker_and_a_second_signal_does_not_wait(client: Client, app: str, waits: Path) -> None:
    fill(client, 2, "wait", ENDLESS_S)
    with running("worker", app, "--threads", "1", "--stop-timeout", ENDLESS_S, url=client.url) as worker:
        eventually(
            lambda: waits.exists() and _pending(client) == 2, "one message to be worked on, one to wait for that"
        )
        worker.send_signal(signal.SIGINT)
        eventually(lambda: _released(client) == 1, "the stop to begin")
        assert worker.stderr is not None
        shown = b""
        while b"stopping: worker processes have " not in shown:
            shown = worker.stderr.readline()
            assert shown, "the worker to say that it waits, and for how long"
        assert worker.poll() is None
        result = end(worker, signal.SIGINT)
        assert result.code == 130
        assert (
            "worker processes killed: second signal; other workers process their running messages again" in result.err
        )
    assert (_pending(client), _released(client)) == (2, 1)


def _pending(client: Client) -> int:
    if not client.execute("EXISTS", "millstream:{orders}:orders:shop.handle:meta"):
        return 0
    return int(client.execute("XPENDING", "orders", "millstream:shop.handle")[0])


def _released(client: Client) -> int:
    """How many messages a worker had, and left to any other."""
    arguments = ("IDLE", NACK_IDLE_MS, "-", "+", 10)
    return len(client.execute("XPENDING", "orders", "millstream:shop.handle", *arguments))


def test_one_port_serves_health_and_metrics_of_all_processes_even_when_one_of_them_dies(
    client: Client, app: str
) -> None:
    restarts = "millstream_worker_restarts_total"
    with running(
        "worker", app, "--processes", "2", "--name", "till", "--metrics-address", "0.0.0.0:0", "--json", url=client.url
    ) as worker:
        assert worker.stdout is not None
        where = json.loads(worker.stdout.readline())["metrics"].replace("0.0.0.0", "127.0.0.1")

        def page(path: str) -> httpx.Response:
            return httpx.get(where.replace("/metrics", path), timeout=FAIL_SAFE_S, trust_env=False)

        def figures() -> dict[str, float]:
            lines = (one.rpartition(" ") for one in page("/metrics").text.splitlines() if not one.startswith("#"))
            return {name: float(value) for name, _, value in lines}

        def committed() -> float:
            return sum(figures()[f'{committed_total}{{handler="shop.handle",worker="till-{n}"}}'] for n in (0, 1))

        committed_total = "millstream_messages_committed_total"
        assert committed() == 0, "the counters of all processes are there from the beginning"
        fill(client, 5)
        eventually(lambda: committed() == 5, "the figures of both processes")
        eventually(lambda: page("/readyz").status_code == 200, "both processes to be ready")
        assert page("/healthz").json()["status"] == "ok"
        eventually(lambda: page("/scale?handler=shop.handle").json().get("waiting") == 0, "what an autoscaler reads")
        first = int(done(client)[0][b"pid"])
        os.kill(first, signal.SIGKILL)
        eventually(lambda: sum(figures()[f'{restarts}{{worker="till-{n}"}}'] for n in (0, 1)) == 1, "the restart")
        assert committed() == 5, "what a dead process has counted stays"
        eventually(lambda: page("/readyz").status_code == 200, "its successor to be ready")
        assert committed() == 5
        assert end(worker).code == 0


def test_two_supervisors_on_one_host_use_different_names(client: Client, app: str) -> None:
    keys = HandlerKeys("shop", "handle", "orders")
    with running("worker", app, url=client.url) as one, running("worker", app, url=client.url) as other:
        eventually(lambda: len(names_in_use(client)) == 2, "both to have names")
        eventually(lambda: find_workers(client, [keys])[keys] == names_in_use(client), "both to be alive")
        assert [end(one).code, end(other).code] == [0, 0]
    assert client.execute("KEYS", "millstream:worker:shop:*") == []


@pytest.fixture
def long_name_lease(monkeypatch: pytest.MonkeyPatch) -> int:
    """Supervisors hold names for ten minutes: no name is free because this process stood still."""
    monkeypatch.setattr("millstream.worker.static_membership.NAME_LEASE_MS", 600_000)
    return 600_000


@pytest.mark.usefixtures("long_name_lease")
def test_a_given_name_that_another_supervisor_has_is_refused(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    kept, other = (
        StaticMembership(client, "shop", "till"),
        StaticMembership(client, "shop", "till", clock=ManualClock()),
    )
    kept.acquire(1)
    with pytest.raises(ConfigError, match="a worker called 'till-0' is running; give this one another --name"):
        other.acquire(1)
    (line,) = (one.getMessage() for one in caplog.records)
    assert line.startswith(
        "the worker name till-0 is held, by another worker or for one that was killed; waiting for up "
    )
    kept.renew()
    kept.release()
    assert client.execute("KEYS", "millstream:worker:shop:*") == []


def test_a_name_lease_is_no_longer_than_usual_after_the_clock_of_redis_went_back(
    client: Client, long_name_lease: int
) -> None:
    gone, other = (
        StaticMembership(client, "shop", "till"),
        StaticMembership(client, "shop", "till", clock=ManualClock()),
    )
    (name,) = gone.acquire(1)
    client.execute("PEXPIRE", worker_name_key("shop", name), 3_600_000)
    with pytest.raises(ConfigError, match="is running"):
        other.acquire(1)
    assert 0 < client.execute("PTTL", worker_name_key("shop", name)) <= long_name_lease


def test_a_worker_warns_once_of_a_redis_that_evicts_keys(millstream_fresh_server: EmbeddedServer, app: str) -> None:
    with Client(millstream_fresh_server.url) as client:
        client.execute("CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru")
        fill(client, 1)
        with running("worker", app, "--processes", "2", url=client.url) as worker:
            eventually(lambda: done(client) or worker.poll() is not None, "the message")
            outcome = end(worker)
    assert (outcome.code, outcome.err.count("evicts keys at maxmemory")) == (0, 1)


def test_the_processes_find_the_modules_that_their_supervisor_finds(
    client: Client, app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_this_test.py").write_text(Path(app.partition(":")[0]).read_text())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shop_of_this_test.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    fill(client, 1)
    safely = [sys.executable, "-P", *PROGRAM[1:]]  # as the program `millstream` finds them
    with subprocess.Popen(
        [*safely, "worker", str(tmp_path / "shop_of_this_test.py")], env=environment(client.url), stderr=subprocess.PIPE
    ) as worker:
        try:
            eventually(lambda: done(client) or worker.poll() is not None, "the message")
            worker.terminate()
            log = worker.communicate(timeout=FAIL_SAFE_S)[1]
        finally:
            worker.kill()
    assert (worker.returncode, len(done(client))) == (0, 1), log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "none"), "app 'shop' has no handler 'none'; it has handle"),
        (("--url", "redis://127.0.0.1:1/abc"), "database"),
    ],
)
def test_a_worker_that_cannot_start_fails_with_one_line(app: str, arguments: tuple[str, ...], words: str) -> None:
    refused = call("worker", app, *arguments)
    assert refused.code == 2
    assert words in refused.err
    assert len(refused.err.splitlines()) == 1


def test_the_limits_of_a_worker_can_be_set(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "limits_app.py"
    path.write_text(
        "from millstream import App, Message\napp = App('limits')\n"
        "@app.handler('orders', key='n')\ndef handle(message: Message):\n    pass\n"
    )
    meta = HandlerKeys("limits", "handle", "orders").meta
    client.execute("XADD", "orders", "*", "n", 1)
    with running("worker", f"{path}:app", "--look-ahead", "12", "--prefetch-mb", "0.5", url=client.url) as worker:
        eventually(lambda: client.execute("HGET", meta, "look_ahead") == b"12")
        assert end(worker).code == 0


def test_a_drained_worker_finishes_its_message_releases_the_others_and_ends_with_0(
    client: Client, app: str, tmp_path: Path
) -> None:
    fill(client, 2, "x", "meet")
    with running("worker", app, "--name", "till", "--threads", "1", "--stop-timeout", ENDLESS_S, url=client.url) as one:
        eventually(
            lambda: [*tmp_path.glob("marker-met-*")] and _pending(client) == 2, "one message to run, one to wait for it"
        )
        assert call("drain", "till-0", "--dry-run", "--json", url=client.url).json()["at_ms"] is None
        asked = call("drain", "till-0", "--yes", "--json", url=client.url).json()
        again = call("drain", "till-0", "--yes", "--json", url=client.url).json()
        assert (asked["app"], asked["worker"], asked["repeated"]) == ("shop", "till-0", False)
        assert again == {**asked, "repeated": True}
        assert "has not ended yet" in call("drain", "till-0", url=client.url).out
        eventually(lambda: _released(client) == 1, "the waiting message to be released")
        assert (one.poll(), done(client)) == (None, [])
        (tmp_path / "marker-met-another").touch()
        outcome = ended(one)
    assert outcome.code == 0, outcome.err
    assert "restarting" not in outcome.err
    assert (len(done(client)), _pending(client)) == (1, 1)
    assert client.execute("KEYS", "millstream:worker:shop:*") == []


def test_the_other_processes_of_the_supervisor_of_a_drained_worker_continue(client: Client, app: str) -> None:
    fill(client, 2, "x", "meet")
    options = ("--processes", "2", "--threads", "1", "--prefetch", "1", "--name", "till")
    with running("worker", app, *options, url=client.url) as worker:
        eventually(lambda: len(done(client)) == 2, "both processes to work")
        assert call("drain", "till-0", "--app", "shop", "--yes", url=client.url).code == 0
        eventually(lambda: names_in_use(client) == {"till-1"}, "the name to be free")
        fill(client, 20)
        eventually(lambda: len(done(client)) == 22, "the other process to do the rest")
        assert len({entry[b"pid"] for entry in done(client)[2:]}) == 1
        assert call("drain", "till-1", "--yes", url=client.url).code == 0
        outcome = ended(worker)
    assert (outcome.code, "restarting" in outcome.err) == (0, False)


def test_the_error_for_a_worker_that_does_not_run_names_those_that_do(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NAME_LEASE_MS", "HELD_MS"):  # the test renews nothing
        monkeypatch.setattr(f"millstream.worker.static_membership.{name}", 3_600_000)
    for app in ("shop", "bank"):
        client.execute("XGROUP", "CREATE", "orders", HandlerKeys(app, "handle", "orders").group, "0", "MKSTREAM")
    client.execute("XGROUP", "CREATECONSUMER", "orders", HandlerKeys("shop", "handle", "orders").group, "gone-0")
    refused = call("drain", "nope", "--yes", url=client.url)
    assert (refused.code, "there is no worker 'nope'; no worker runs" in refused.err) == (1, True)
    for app in ("shop", "bank"):
        StaticMembership(client, app, "till", handlers={"handle": CODE}).acquire(1)
    refused = call("drain", "nope", "--yes", url=client.url)
    assert (refused.code, "there is no worker 'nope'; these run: till-0" in refused.err) == (1, True)
    refused = call("drain", "gone-0", "--yes", url=client.url)
    assert (refused.code, "is not running under a supervisor: its last call was " in refused.err) == (1, True)
    refused = call("drain", "till-0", "--yes", url=client.url)
    assert (refused.code, "add --app and one of bank, shop" in refused.err) == (2, True)
    refused = call("drain", "spark:handle", "--yes", url=client.url)
    assert refused.code == 2
    assert call("drain", "till-0", "--app", "bank", "--yes", url=client.url).code == 0
