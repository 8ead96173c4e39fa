"""The page of all handlers: what each does now, the same figures as those of the commands."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.run_times import report_run_times
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, stage_group
from millstream.services.console import Level
from millstream.services.console.handler_rates import HandlerRates
from millstream.services.console.views import handler_list
from tests.support.clocks import ManualClock
from tests.support.commandline import call
from tests.support.console_parts import console_with
from tests.support.consoles import Browser, authorized
from tests.support.keyed_fixtures import keys_in_each_state
from tests.support.running_codes import RUNS

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

PAY = HandlerKeys("shop", "pay", "orders")


@pytest.fixture
def filled(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A handler with a key in each state, runs on two workers, and a dead letter; one on Spark, and a stage."""
    monkeypatch.setattr("millstream.delivery.run_times.HELD_MS", 3_600_000)  # the test repeats no report
    keys_in_each_state(client)
    client.execute("XADD", PAY.dead_letters, "*", "n", 1)
    report_run_times(client, "shop", "pay", RUNS)
    slower = msgspec.structs.replace(RUNS, worker="w-1", p50_ms=100, p99_ms=400, retried=7)
    report_run_times(client, "shop", "pay", slower)
    client.execute("XADD", "bills", "*", "n", 1)
    CommitStore(client, app="shop", handler="bill", token=1).begin_run(["bills"])
    client.execute("HSET", HandlerKeys("shop", "bill", "bills").meta, "committed_id", "0-1")
    client.execute("XGROUP", "CREATE", "bills", stage_group("shop", "minutes"), "0")
    return client


@pytest.fixture
def browser(filled: Client) -> Iterator[Browser]:
    with authorized(filled.url, Level.FIGURES) as opened:
        yield opened


def test_a_row_for_each_handler_has_what_it_does_now_and_what_waits(browser: Browser) -> None:
    page = browser.get("/handlers")
    found = re.search(r"shop\.pay (.*) shop|shop\.pay (.*) The commands", page.text)
    assert found, page.text
    row = re.sub(r"11 \S+ s", "11 AGE", found[1] or found[2])
    assert row == "running workers by key 1 - 100 ms 400 ms 1.0 11 AGE 2 1 1 0 1"
    assert re.search(r"shop\.bill not running spark 0 - - - 0\.0 1 \S+ s 0 0 0 0 0 ", page.text), page.text
    assert "shop.minutes" not in page.text, "the page Spark has stages"
    assert {"/handler?name=shop.pay", "/handler?name=shop.bill"} <= set(page.links)
    assert "/handlers" in browser.get("/").links


def test_the_commands_have_the_same_figures(filled: Client, browser: Browser) -> None:
    text = browser.get("/handlers").text
    (line,) = call("top", "--once", "--interval", "100ms", "--json", url=filled.url).json_lines()
    pay = next(one for one in line["handlers"] if one["handler"] == "shop.pay")
    assert [pay[name] for name in ("p50_ms", "p99_ms", "retried_per_s")] == [100, 400, 1.0]
    names = ("waiting", "in_flight", "parked", "backing_off", "blocked", "dead_letters")
    waiting, *others = (str(pay[name]) for name in names)
    assert re.search(rf"shop\.pay .* {waiting} \S+ s {' '.join(others)} ", text), text
    (reader,) = [
        one for one in call("info", "shop", "--json", url=filled.url).json()["readers"] if one["name"] == "shop.pay"
    ]
    assert {reader[name] for name in ("status", "alive", "in_flight")} == {"running", 1, 2}


def test_the_rate_is_that_of_commits_since_the_console_read_them_before(filled: Client, tmp_path: Path) -> None:
    clock = ManualClock()
    with console_with(filled.url, tmp_path, handler_rates=HandlerRates(clock)) as (parts, browser):
        assert "known at the next renewal" in browser.get("/handlers").text
        filled.execute("HINCRBY", PAY.meta, "committed", 50)
        clock.now_ms += 5_000
        parts.shared.clear()
        page = browser.get("/handlers")
    assert "shop.pay running workers by key 1 10.0 100 ms" in page.text
    assert "known at the next renewal" not in page.text


def test_the_rate_of_a_handler_is_of_its_streams_that_were_read_twice(client: Client) -> None:
    first, second = PAY, HandlerKeys("shop", "pay", "returns")
    clock = ManualClock()
    rates = HandlerRates(clock)
    client.execute("HSET", first.meta, "committed", 100)
    assert rates.update(client, [first]) == {"shop.pay": None}
    client.execute("HSET", first.meta, "committed", 124, "skipped", 4)
    client.execute("HSET", second.meta, "committed", 7_000)
    clock.now_ms += 2_000
    assert rates.update(client, [first, second]) == {"shop.pay": 10.0}
    client.execute("HSET", first.meta, "committed", 3)
    client.execute("HSET", second.meta, "committed", 7_010)
    clock.now_ms += 2_000
    assert rates.update(client, [first, second]) == {"shop.pay": 5.0}, "the first one was forgotten, and began anew"
    client.execute("DEL", second.meta)
    client.execute("SET", second.meta, "of another program")
    clock.now_ms += 2_000
    assert rates.update(client, [first, second]) == {"shop.pay": 0.0}


def test_more_handlers_than_a_page_shows_are_counted(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_list, "_MOST_HANDLERS", 1)
    page = browser.get("/handlers")
    assert "1 more are not shown" in page.text
    assert ("shop.bill" in page.text, "shop.pay" in page.text) == (True, False)
