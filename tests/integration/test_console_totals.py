"""The overview of more streams than it checks: totals of all streams from the history, and until then a sample."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module

import msgspec
import pytest

from millstream.admin import handler_details
from millstream.admin.attention import read_overview
from millstream.admin.figure_history import STEP_MS, FigureHistory, HandlerSample, Sample
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.pause import Pause
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, live_workers_key
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console import Level
from millstream.services.console.history_writer import HistoryWriter
from tests.support.commandline import call
from tests.support.consoles import Browser, authorized
from tests.support.keyed_fixtures import joined_by_field

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

FIGURES = HandlerSample(
    streams=7,
    added=90,
    done=40,
    dead=0,
    lag=50,
    oldest_ms=7_200_000,
    dead_letters=3,
    stuck=2,
    parked=1,
    modes=("workers",),
)


@pytest.fixture
def browser(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """The overview checks three streams, of ten that `shop.pay` has, each with an entry."""
    page = import_module("millstream.services.console.views.overview")
    monkeypatch.setattr(page, "read_overview", partial(read_overview, max_streams=3))
    monkeypatch.setattr(page, "_KEEP_MS", 0.0)
    for n in range(10):
        joined_by_field(client, f"orders{n}", app="shop", handler="pay")
        client.execute("XADD", f"orders{n}", "*", "key", "x")
    with authorized(client.url, Level.FIGURES) as opened:
        yield opened


def row_of(browser: Browser, handler: str, path: str = "/") -> list[str]:
    """The words of a handler's row."""
    text = browser.get(path).html.partition(f">{handler}</a></th>")[2].partition("</tr>")[0]
    return [one.partition("</td>")[0].partition(">")[2] for one in text.split("<td")[1:]]


def add_totals(
    client: Client, *, age_ms: int = 0, at_ms: int | None = None, is_partial: bool = False, **handlers: HandlerSample
) -> None:
    """A sample of now, or of `at_ms`."""
    figures = {f"shop.{name}": one for name, one in handlers.items()}
    at_ms = server_time_ms(client) if at_ms is None else at_ms
    assert FigureHistory(client).add(Sample(at_ms=at_ms, age_ms=age_ms, is_partial=is_partial, handlers=figures))


def test_the_overview_is_of_a_sample_until_all_streams_were_read_once_and_then_of_all(
    client: Client, browser: Browser
) -> None:
    page = browser.get("/")
    assert "these figures are of a sample of 3, until millstream console has read all streams once" in page.text
    assert row_of(browser, "shop.pay")[3:5] == ["3", "3"]
    assert HistoryWriter(client.url).write(), "another console, which collects"
    page = browser.get("/")
    assert "Figures of handlers are of all streams, as of" in page.text
    assert "older" not in page.text
    assert row_of(browser, "shop.pay")[3:5] == ["10", "10"]


def test_the_rate_of_a_handler_is_that_on_all_its_streams_between_the_last_two_samples(
    client: Client, browser: Browser
) -> None:
    now_ms = server_time_ms(client)
    add_totals(client, at_ms=now_ms - 60_000, pay=FIGURES)
    add_totals(client, at_ms=now_ms, pay=msgspec.structs.replace(FIGURES, done=40 + 60 * 33))
    assert row_of(browser, "shop.pay", "/handlers")[3] == "33.0"


def test_the_page_of_a_handler_on_more_streams_than_it_reads_has_the_totals_of_all(
    client: Client, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_totals(client, pay=FIGURES)
    path = "/handler?name=shop.pay"
    assert "On all its" not in browser.get(path).text
    monkeypatch.setattr(handler_details, "_MOST_STREAMS", 4)
    page = browser.get(path)
    assert "On all its 7 streams, as of" in page.text
    assert "50 wait, the oldest for 2 h; 3 dead letters, 2 stuck keys." in page.text


def test_the_overview_says_how_old_the_oldest_part_of_the_totals_is(client: Client, browser: Browser) -> None:
    add_totals(client, age_ms=300_000, pay=FIGURES)
    assert ", some up to 5 min older. All else is of a sample of 3 streams" in browser.get("/").text


def test_the_overview_says_that_handlers_that_the_history_leaves_out_have_no_totals(
    client: Client, browser: Browser
) -> None:
    add_totals(client, is_partial=True, pay=FIGURES)
    told = "All else is of a sample of 3 streams, and so are handlers that the history leaves out."
    assert told in browser.get("/").text


def test_totals_that_nothing_renews_are_not_shown(client: Client, browser: Browser) -> None:
    add_totals(client, at_ms=server_time_ms(client) - 700_000, pay=FIGURES)
    assert "these figures are of a sample of 3" in browser.get("/").text


def test_a_handler_on_no_stream_of_the_sample_has_a_row_and_is_in_the_attention_list_if_its_entries_wait(
    client: Client, browser: Browser
) -> None:
    add_totals(client, pay=msgspec.structs.replace(FIGURES, oldest_ms=0), rare=FIGURES)
    page = browser.get("/")
    told = "shop.rare: 50 entries wait on 7 streams, the oldest for 2 h, and no worker or run is alive: nothing"
    assert told in page.text
    assert row_of(browser, "shop.rare") == ["not running", "workers", "0", "7", "50", "2 h", "0", "1", "1", "3"]
    assert "shop.pay: 50 entries wait" not in page.text
    assert row_of(browser, "shop.rare", "/handlers")[:2] == ["not running", "workers"]


def test_a_handler_on_no_stream_of_the_sample_whose_workers_are_alive_does_not_keep_up(
    client: Client, browser: Browser
) -> None:
    client.execute("ZADD", live_workers_key("shop", "rare"), server_time_ms(client) + 3_600_000, "w-1")
    add_totals(client, rare=msgspec.structs.replace(FIGURES, paused=1))
    told = (
        "shop.rare: 50 entries wait on 7 streams, the oldest for 2 h: it is paused on some of them, its workers do not"
    )
    assert told in browser.get("/").text
    assert row_of(browser, "shop.rare")[:3] == ["partly paused", "workers", "1"]


def add_rising(client: Client, handler: str, **changes: int) -> None:
    """Five samples in which the lag of a handler rises, whose worker is alive."""
    client.execute("ZADD", live_workers_key("shop", handler), server_time_ms(client) + 3_600_000, "w-1")
    now_ms = server_time_ms(client)
    for step in range(5):
        figures = msgspec.structs.replace(FIGURES, lag=100 * step, **changes)
        at_ms = now_ms - (4 - step) * STEP_MS
        assert FigureHistory(client).add(Sample(at_ms=at_ms, handlers={f"shop.{handler}": figures}))


def test_a_lag_that_rises_on_no_stream_of_the_sample_is_in_the_attention_list(client: Client, browser: Browser) -> None:
    add_rising(client, "rare", oldest_ms=0)
    assert browser.get("/").text.count("shop.rare: its lag has risen from 0 to 400 entries in 4 min") == 1


def test_a_lag_that_rises_and_whose_entries_are_old_by_the_totals_is_one_item(client: Client, browser: Browser) -> None:
    add_rising(client, "pay")
    page = browser.get("/")
    assert "shop.pay: 400 entries wait on 7 streams, the oldest for 2 h: its workers do not" in page.text
    assert "its lag has risen" not in page.text


def test_a_lag_that_rises_during_a_pause_on_all_streams_is_one_item(client: Client, browser: Browser) -> None:
    add_rising(client, "rare", paused=7)
    page = browser.get("/")
    assert "shop.rare: paused on 7 of its 7 streams." in page.text
    assert "its lag has risen" not in page.text


def test_old_entries_that_another_item_explains_are_no_second_item(client: Client, browser: Browser) -> None:
    assert call("pause", "shop.pay", url=client.url).code == 0
    add_totals(client, pay=msgspec.structs.replace(FIGURES, paused=3))
    page = browser.get("/")
    assert "shop.pay: paused" in page.text
    assert "shop.pay: 50 entries wait" not in page.text


def found_by(client: Client, check: str) -> list[tuple[str, int | None]]:
    """The facts of a check in the attention list, with their starts."""
    return [(one.what, one.since_ms) for one in read_overview(client, max_streams=3).attention if one.check == check]


def test_what_is_stuck_on_no_stream_of_the_sample_is_in_the_attention_list(client: Client, browser: Browser) -> None:
    now_ms = server_time_ms(client)
    for minutes, dead in ((3, 1), (2, 1), (1, 2), (0, 3)):
        figures = msgspec.structs.replace(FIGURES, dead=dead, paused=2)
        add_totals(client, at_ms=now_ms - minutes * STEP_MS, rare=figures)
    page = browser.get("/")
    assert "shop.rare: 1 parked key: its messages wait" in page.text
    assert "shop.rare: paused on 2 of its 7 streams. " in page.text
    for command in ("resume shop.rare", "key unpark shop.rare KEY", "dlq redrive shop.rare"):
        assert f"millstream {command}" in page.text
    told = "shop.rare: 3 dead letters, 2 of them new within 15 min"
    assert found_by(client, "dead-letters") == [(told, now_ms - STEP_MS)]
    assert found_by(client, "parked") == [("shop.rare: 1 parked key", None)]


def test_of_what_is_stuck_within_and_outside_of_the_sample_one_item_has_the_number(
    client: Client, browser: Browser
) -> None:
    now_ms = server_time_ms(client)
    keys = HandlerKeys("shop", "pay", "orders0")
    client.execute("HSET", keys.parked, "ann", f"{now_ms} failed")
    client.execute("XADD", keys.dead_letters, f"{now_ms}-0", "n", 1)
    why = Pause(by="breaker", at_ms=now_ms, cause="failed", count=9, of=9)
    CommitStore(client, app="shop", handler="pay").set_paused(["orders0"], paused=True, why=why)
    assert [found_by(client, check) for check in ("parked", "dead-letters", "paused")] == [
        [("shop.pay: 1 parked key", now_ms)],
        [("shop.pay: 1 dead letter, 1 of them new within 15 min", now_ms)],
        [("shop.pay: paused on orders0", now_ms)],
    ]
    for minutes, dead in ((1, 5), (0, 9)):
        figures = msgspec.structs.replace(FIGURES, streams=12, parked=4, paused=6, dead_letters=5, dead=dead)
        add_totals(client, at_ms=now_ms - minutes * STEP_MS, pay=figures)
    assert [found_by(client, check) for check in ("parked", "dead-letters", "paused")] == [
        [("shop.pay: 4 parked keys", None)],
        [("shop.pay: 5 dead letters, 4 of them new within 15 min", now_ms)],
        [("shop.pay: paused on 6 of its 12 streams", now_ms)],
    ]
    (paused,) = (one for one in read_overview(client, max_streams=3).attention if one.check == "paused")
    assert "paused by its breaker: 9 of 9 messages" in paused.why


def test_what_has_ended_on_all_streams_of_a_handler_is_not_listed_until_the_next_totals(
    client: Client, browser: Browser
) -> None:
    now_ms = server_time_ms(client)
    for minutes in (1, 0):
        figures = msgspec.structs.replace(FIGURES, streams=3, paused=1, dead=4 - minutes)
        add_totals(client, at_ms=now_ms - minutes * STEP_MS, pay=figures)
    assert not any(found_by(client, check) for check in ("parked", "dead-letters", "paused"))


def test_dead_letters_that_do_not_grow_are_in_the_table_alone(client: Client, browser: Browser) -> None:
    now_ms = server_time_ms(client)
    for minutes in (1, 0):
        add_totals(client, at_ms=now_ms - minutes * STEP_MS, rare=msgspec.structs.replace(FIGURES, dead=3))
    assert found_by(client, "dead-letters") == []
    assert row_of(browser, "shop.rare")[-1] == "3"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"paused": 7}, "paused"),
        ({"paused": 1}, "not running"),
        ({"paused": 1, "lag": 0}, "partly paused"),
        ({"done": None}, "unreadable"),
        ({"lag": 0}, "idle"),
    ],
)
def test_the_status_of_a_handler_is_that_on_all_its_streams(
    client: Client, browser: Browser, change: dict[str, int | None], status: str
) -> None:
    add_totals(client, rare=msgspec.structs.replace(FIGURES, **change))
    assert row_of(browser, "shop.rare")[0] == status
