"""`millstream worker` says once which patterns match no stream, and begins with the first stream that does."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream import App
from millstream.cli import unmatched_patterns
from millstream.cli.signals import OrderlyStop, orderly_stop
from millstream.cli.unmatched_patterns import _is_matched, unmatched_patterns_shown
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.commandline import call, ended, running
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.worker]

APP = """
from millstream import App, Message

app = App("shop")

@app.handler(pattern="none:*", into="done")
def waiting(message: Message):
    return {"n": "1"}

@app.handler(pattern="some:*", into="done")
def reading(message: Message):
    return {"n": "2"}

@app.handler("named", into="done")
def named(message: Message):
    return {"n": "3"}
"""


@pytest.fixture
def app(client: Client, tmp_path: Path) -> str:
    """An app file; Redis has streams for all its handlers but one."""
    (tmp_path / "unmatched_app.py").write_text(APP)
    client.execute("XADD", "some:1", "*", "n", "1")
    client.execute("SET", "none:text", "no stream")
    return str(tmp_path / "unmatched_app.py")


def lines_in(err: str) -> list[str]:
    return [line for line in err.splitlines() if "no stream matches" in line]


def test_a_pattern_that_matches_no_stream_is_named_once_however_many_processes_look_for_streams(
    client: Client, app: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    expected = "handler shop.waiting: no stream matches 'none:*' yet; it begins with the first one"
    with (
        log.open("wb") as stderr,
        running("worker", app, "--processes", "2", "--json", url=client.url, stderr=stderr) as process,
    ):
        eventually(lambda: lines_in(log.read_text()), "the line")
        assert process.stdout is not None
        names: set[str | None] = set()
        while len(names) < 2:  # a process reports every second, and looks for streams more often
            names.add(json.loads(process.stdout.readline()).get("worker"))
            names.discard(None)
        client.execute("XADD", "none:1", "*", "n", "1")
        eventually(lambda: client.execute("XLEN", "done") == 2, "the message of the new stream")
        process.send_signal(signal.SIGINT)
        ended(process)
    assert lines_in(log.read_text()) == [expected]


def test_with_once_such_a_handler_processes_nothing_which_is_no_error(client: Client, app: str) -> None:
    done = call("worker", app, "--once", url=client.url)
    assert (done.code, lines_in(done.err)) == (
        0,
        ["handler shop.waiting: no stream matches 'none:*' yet; it processes nothing"],
    )
    assert client.execute("XLEN", "done") == 1


def waiting_handlers() -> list[Handler]:
    other = App("shop")
    other.handler(pattern="none:*", name="waiting")(lambda message: None)
    return list(other.handlers.values())


def test_with_once_the_line_is_printed_before_the_end_and_a_stop_otherwise_waits_for_no_scan(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = OrderlyStop()
    stopping.set()
    with unmatched_patterns_shown(client.url, waiting_handlers(), stopping, once=True):
        pass  # the end of the block comes before that of the scan
    assert len(lines_in(capsys.readouterr().err)) == 1
    assert not _is_matched(client, "none:*", stopping, True)
    assert _is_matched(client, "none:*", stopping, False)
    stopping.clear()
    assert not _is_matched(client, "none:*", stopping, False)


def test_with_once_a_signal_ends_the_command_though_its_scan_goes_on_and_no_line_follows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unmatched_patterns, "_TIMEOUT_MS", 1_000 * FAIL_SAFE_S)
    with EmbeddedServer() as server, orderly_stop() as stopping:
        server.pause()  # a scan that takes long
        with unmatched_patterns_shown(server.url, waiting_handlers(), stopping, once=True):
            stopping.set()  # all is processed
            signal.raise_signal(signal.SIGTERM)
        (thread,) = (one for one in threading.enumerate() if one.name == "millstream-patterns")
        server.resume()
        thread.join(FAIL_SAFE_S)
        assert not thread.is_alive()
    assert capsys.readouterr().err == ""


def test_with_once_a_signal_ends_the_scan_after_the_page_that_redis_is_reading(client: Client) -> None:
    client.pipeline([("SET", f"key:{number}", "1") for number in range(5_000)])
    stopping = OrderlyStop()

    class SignalledClient(Client):
        def scan_pages(self, pattern: str) -> Iterator[list[str]]:
            for page in super().scan_pages(pattern):
                pages.append(page)
                stopping.is_signalled = True
                yield page

    pages: list[list[str]] = []
    with SignalledClient(client.url) as scanning:
        assert _is_matched(scanning, "none:*", stopping, True)
        assert len(pages) == 1
        assert _is_matched(scanning, "other:*", stopping, True)  # nor is that of the next pattern begun
        assert len(pages) == 1


def test_no_pattern_is_named_of_a_handler_that_does_not_run_or_whose_stream_exists(client: Client, app: str) -> None:
    assert lines_in(call("worker", app, "--once", "--only", "reading", url=client.url).err) == []
    client.execute("XADD", "none:1", "*", "n", "1")
    assert lines_in(call("worker", app, "--once", url=client.url).err) == []
