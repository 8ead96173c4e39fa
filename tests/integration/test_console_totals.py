"""The overview of more streams than it checks: totals of all streams from the history, and until then a sample."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module

import msgspec
import pytest

from millstream.admin import handler_details
from millstream.admin.attention import read_overview
from millstream.admin.figure_history import STEP_MS, FigureHistory, HandlerSample, Sample
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import live_workers_key
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


def test_the_overview_says_that_handlers_behind_the_first_hundred_have_no_totals(
    client: Client, browser: Browser
) -> None:
    add_totals(client, is_partial=True, pay=FIGURES)
    told = "All else is of a sample of 3 streams, and so are the handlers behind the first 1 by name."
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


def test_old_entries_that_another_item_explains_are_no_second_item(client: Client, browser: Browser) -> None:
    assert call("pause", "shop.pay", url=client.url).code == 0
    add_totals(client, pay=msgspec.structs.replace(FIGURES, paused=3))
    page = browser.get("/")
    assert "shop.pay: paused" in page.text
    assert "shop.pay: 50 entries wait" not in page.text


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
