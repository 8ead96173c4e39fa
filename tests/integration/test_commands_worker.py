"""`millstream worker`, as processes of its own, on a real Redis."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from millstream.client import Client
from tests.support.commandline import free_port, run, start
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.worker]

APP = """
import os, time
from millstream import App, Message

app = App("shop")

@app.handler("orders", into="done", time_limit_ms=60_000)
def handle(message: Message):
    print("a handler may print")
    print('{"event": "figures"}')
    time.sleep(float(message.fields.get("wait", b"0")))
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
    return f"{path}:app"


def fill(client: Client, count: int, *more: str) -> None:
    client.pipeline([("XADD", "orders", "*", "n", n, *more) for n in range(count)])


def done(client: Client) -> list[dict[bytes, bytes]]:
    entries = client.execute("XRANGE", "done", "-", "+")
    return [dict(zip(pairs[::2], pairs[1::2], strict=True)) for _, pairs in entries]


def end(worker: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> tuple[int, str, str]:
    worker.send_signal(number)
    out, err = worker.communicate(timeout=40)
    return worker.returncode, out.decode(), err.decode()


def test_processes_share_the_work_say_what_they_did_and_end_in_order(client: Client, app: str) -> None:
    worker = start("worker", app, "--processes", "2", "--threads", "1", "--json", url=client.url)
    eventually(lambda: len(client.execute("KEYS", "millstream:worker:shop:*")) == 2)
    fill(client, 200, "wait", "0.02")
    eventually(lambda: len(done(client)) == 200)
    code, out, err = end(worker)
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, events[0]["event"], events[-1]) == (0, "started", {"event": "stopped"})
    last = {event["worker"]: event["handlers"]["handle"] for event in events if event["event"] == "figures"}
    assert sum(figures["committed"] for figures in last.values()) == 200
    assert len({entry[b"pid"] for entry in done(client)}) == 2
    assert err.startswith("left out, as they need Spark: the stages copy; `millstream run` runs them\n")
    assert err.count("a handler may print") == err.count('{"event": "figures"}') == 200
    assert client.execute("XPENDING", "orders", "millstream:shop.handle")[0] == 0


def test_a_process_that_dies_is_started_again_under_its_name_and_goes_on(client: Client, app: str) -> None:
    fill(client, 20)
    client.execute("XADD", "orders", "*", "n", 20, "x", "die")
    worker = start("worker", app, "--name", "till", url=client.url)
    eventually(lambda: len(done(client)) == 21)
    code, _, err = end(worker)
    assert code == 0
    assert "worker till-0 ended with code 9 and starts again in 0.1 s" in err
    assert sorted(int(entry[b"n"]) for entry in done(client)) == list(range(21))


def test_the_processes_end_with_their_supervisor_even_if_it_is_killed(client: Client, app: str) -> None:
    fill(client, 1)
    worker = start("worker", app, url=client.url)
    eventually(lambda: len(done(client)) == 1)
    child = int(done(client)[0][b"pid"])
    worker.kill()
    worker.communicate(timeout=10)
    eventually(lambda: not _lives(child))


def test_a_process_whose_supervisor_was_killed_ends_before_another_may_have_its_name(client: Client, app: str) -> None:
    fill(client, 1)
    worker = start("worker", app, "--stop-s", "60", url=client.url)
    eventually(lambda: len(done(client)) == 1)
    child = int(done(client)[0][b"pid"])
    fill(client, 1, "wait", "50")
    eventually(lambda: _pending(client) == 1)
    worker.kill()
    worker.communicate(timeout=10)
    eventually(lambda: not _lives(child))  # a name is free after 10 to 15


def test_it_ends_when_nobody_reads_its_figures_any_more(client: Client, app: str) -> None:
    fill(client, 1)
    worker = start("worker", app, "--json", url=client.url)
    assert worker.stdout is not None
    assert worker.stderr is not None
    worker.stdout.readline()
    worker.stdout.close()
    said = worker.stderr.read().decode()
    assert worker.wait(timeout=20) == 141
    assert "starts again" not in said
    worker.stderr.close()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_ctrl_c_stops_and_a_second_signal_does_not_wait(client: Client, app: str) -> None:
    fill(client, 1, "wait", "30")
    worker = start("worker", app, url=client.url)
    eventually(lambda: _pending(client) == 1)
    time.sleep(0.3)
    worker.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert worker.poll() is None
    began = time.monotonic()
    assert end(worker, signal.SIGINT)[0] == 130
    assert time.monotonic() - began < 5
    assert _pending(client) == 1


def _pending(client: Client) -> int:
    if not client.execute("EXISTS", "millstream:{orders}:orders:shop.handle:meta"):
        return 0
    return int(client.execute("XPENDING", "orders", "millstream:shop.handle")[0])


def test_health_is_progress_and_metrics_are_served(client: Client, app: str) -> None:
    fill(client, 5)
    port = free_port()
    worker = start("worker", app, "--health-port", str(port), url=client.url)
    try:
        eventually(lambda: len(done(client)) == 5)
        at = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{at}/healthz").json()["status"] == "ok"
        assert httpx.get(f"{at}/readyz").status_code == 200
        eventually(
            lambda: 'millstream_messages_committed_total{handler="shop.handle"} 5.0' in httpx.get(f"{at}/metrics").text
        )
    finally:
        assert end(worker)[0] == 0


def test_two_supervisors_of_one_host_take_different_names_and_a_given_name_is_refused_twice(
    client: Client, app: str
) -> None:
    workers = [start("worker", app, *options, url=client.url) for options in ((), (), ("--name", "till"))]
    eventually(lambda: len(client.execute("KEYS", "millstream:worker:shop:*")) == 3)
    late = start("worker", app, "--name", "till", url=client.url)
    _, err = late.communicate(timeout=40)
    assert late.returncode == 2
    assert "a worker called 'till-0' is running; give this one another --name" in err.decode()
    assert [end(worker)[0] for worker in workers] == [0, 0, 0]
    assert client.execute("KEYS", "millstream:worker:shop:*") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--handler", "none"), "app 'shop' has no handler 'none'; it has handle"),
        (("--url", "redis://127.0.0.1:1/abc"), "database"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(app: str, arguments: tuple[str, ...], words: str) -> None:
    refused = run("worker", app, *arguments)
    assert refused.code == 2
    assert words in refused.err
    assert len(refused.err.splitlines()) == 1
