"""Operators see how long the runs of a handler take on each worker, without a metrics backend."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from millstream.delivery.run_times import HELD_MS, RunTimes, read_run_times, report_run_times
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import run_times_key
from millstream.redis_client.replies import mapping_of
from millstream.services.console import Level
from tests.support.commandline import running
from tests.support.consoles import authorized, fill_with
from tests.support.running_codes import RUNS
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.cli]

APP = """
import time
from millstream import App, Message
from millstream.worker.settling import run_time_report

run_time_report._TIMEOUT_MS = 60_000  # what a worker cannot report in time, it does not report later
app = App("shop")

@app.handler("orders", name="pay", {options})
def pay(message: Message):
    if message.fields["text"] == b"slow":
        time.sleep(0.3)
    if message.fields["text"] == b"failing" and message.attempt == 1:
        raise ValueError("no")
"""


def reports(client: Client) -> Sequence[RunTimes]:
    return read_run_times(client, [("shop", "pay")])["shop", "pay"]


@pytest.mark.parametrize("options", ["", "key='text'"])
def test_a_worker_reports_the_runs_of_its_handler_and_removes_the_report_when_it_ends(
    options: str, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "shop_of_runs.py").write_text(APP.format(options=options))
    for text in ["quick"] * 20 + ["slow", "failing"]:
        client.execute("XADD", "orders", "*", "text", text)
    seen: set[RunTimes] = set()

    def all_seen() -> bool:
        seen.update(reports(client))
        return sum(one.committed for one in seen) == 22

    with running("worker", f"{tmp_path}/shop_of_runs.py:app", "--name", "w", url=client.url) as worker:
        eventually(all_seen, "reports of all runs", log=lambda: str(seen))
        assert {one.worker for one in seen} == {"w-0"}
        assert sum(one.retried for one in seen) == 1
        assert max(one.longest_ms or 0 for one in seen) >= 300
        assert min(one.p50_ms for one in seen if one.p50_ms is not None) < 300
        worker.terminate()
        worker.wait()
    assert reports(client) == []


def test_the_page_of_a_handler_shows_the_runs_of_each_worker(client: Client) -> None:
    fill_with(client, "x")
    with authorized(client.url, Level.FIGURES) as browser:
        assert "No run ended on a worker in the last minute." in browser.get("/handler?name=shop.pay").text
        report_run_times(client, "shop", "pay", RUNS)
        slower = msgspec.structs.replace(RUNS, worker="w-1", p50_ms=345.678)
        report_run_times(client, "shop", "pay", slower)
        page = browser.get("/handler?name=shop.pay").text
        assert "w-0 4.2 0.25 ms 12.5 ms 2.0 s 3 w-1 4.2 346 ms 12.5 ms 2.0 s 3" in page
        report_run_times(client, "shop", "pay", None, earlier=slower)
        assert [one.worker for one in reports(client)] == ["w-0"]


def test_reports_end_by_themselves_and_those_of_another_program_are_left_out(client: Client) -> None:
    report_run_times(client, "shop", "pay", RUNS)
    assert 0 < client.execute("PTTL", run_times_key("shop", "pay")) <= HELD_MS
    client.execute("ZADD", run_times_key("shop", "pay"), 10**13, b"\xff of another program")
    assert reports(client) == [RUNS]
    client.execute("SET", run_times_key("shop", "pay"), "of another program")
    assert reports(client) == []


def test_of_two_reports_of_a_worker_the_later_one_is_read(client: Client) -> None:
    report_run_times(client, "shop", "pay", RUNS)
    later = msgspec.structs.replace(RUNS, committed=7)
    eventually(lambda: client.execute("PTTL", run_times_key("shop", "pay")) < HELD_MS, "a later time")
    report_run_times(client, "shop", "pay", later)  # the earlier one was not removed: Redis was away
    assert reports(client) == [later]


def test_a_worker_goes_on_where_its_report_is_refused(client: Client, tmp_path: Path) -> None:
    (tmp_path / "shop_of_runs.py").write_text(APP.format(options=""))
    client.execute("SET", run_times_key("shop", "pay"), "of another program")
    with running("worker", f"{tmp_path}/shop_of_runs.py:app", url=client.url):
        for text in ("first", "second"):
            client.execute("XADD", "orders", "*", "text", text)
            eventually(lambda: is_processed(client), f"the {text} message")
    assert reports(client) == []


def is_processed(client: Client) -> bool:
    groups = client.execute("XINFO", "GROUPS", "orders")
    return all(mapping_of(one)[b"pending"] == 0 and mapping_of(one)[b"lag"] == 0 for one in groups) and bool(groups)
