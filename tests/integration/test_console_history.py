"""The history of the console: one writer at a time, one sample a minute, and what its pages show of it."""

import re
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from millstream.admin import figure_history
from millstream.admin.figure_history import STEP_MS, FigureHistory, HandlerSample, Sample
from millstream.admin.handler_sweep import SweepPolicy
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, history_key, history_writer_key
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.replies import mapping_of
from millstream.services.console import Level, history_writer
from millstream.services.console.history_writer import HistoryWriter
from tests.support.command_stats import commands_run
from tests.support.commandline import call
from tests.support.consoles import SCRIPT, Browser, authorized, fill_with
from tests.support.deployments import lent_cluster
from tests.support.keyed_fixtures import joined_by_field
from tests.support.service_process import ServiceProcess
from tests.support.sweeps import swept
from tests.support.waiting import eventually
from tests.support.workers import double, fill, make, working

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

HOUR_MS = 3_600_000
FIGURES = HandlerSample(streams=1, added=0, done=0, dead=0, lag=0, oldest_ms=None, dead_letters=0, stuck=0)


@pytest.fixture
def browser(client: Client) -> Iterator[Browser]:
    with authorized(client.url, Level.FIGURES) as opened:
        yield opened


def add(client: Client, *totals: tuple[int, int]) -> None:
    """Samples of `shop.pay`: how many minutes ago, and the total of entries added."""
    now_ms = server_time_ms(client)
    for minutes, total in totals:
        figures = HandlerSample(
            streams=1, added=total, done=total, dead=0, lag=3, oldest_ms=60_000, dead_letters=2, stuck=1
        )
        at_ms = now_ms - minutes * STEP_MS
        assert FigureHistory(client).add(Sample(at_ms=at_ms, handlers={"shop.pay": figures}))


def expire_newest(client: Client) -> None:
    """Let the newest sample be ten minutes old."""
    client.execute("DEL", history_key())
    add(client, (10, 0))


def test_a_sample_has_the_figures_of_each_handler(client: Client) -> None:
    fill_with(client, "x")
    found = swept(client, 60_000)
    assert found.step_ms == STEP_MS
    (figures,) = found.handlers.values()
    assert [*found.handlers] == ["shop.pay"]
    assert (figures.streams, figures.added, figures.lag, figures.dead_letters, figures.stuck) == (1, 4, 4, 1, 2)
    assert figures.oldest_ms is not None


def test_a_sample_has_the_first_handlers_by_name_and_of_the_others_those_that_need_attention_most(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure_history, "MOST_HANDLERS", 2)
    now_ms = server_time_ms(client)
    waiting_ms = {"a": 9_000_000, "c": 60_000, "d": 7_200_000, "e": 3_600_000}
    for name in "abcd":
        joined_by_field(client, f"s:{name}", app="shop", handler=name)
    for name, age_ms in [*waiting_ms.items()][:3]:
        client.execute("XADD", f"s:{name}", f"{now_ms - age_ms}-0", "key", "x")
    found = swept(client, now_ms)
    assert ([*found.handlers], found.is_partial) == (["shop.a", "shop.b", "shop.d", "shop.c"], False)
    for name in "efg":
        joined_by_field(client, f"s:{name}", app="shop", handler=name)
    client.execute("XADD", "s:e", f"{now_ms - waiting_ms['e']}-0", "key", "x")
    found = swept(client, now_ms)
    assert ([*found.handlers], found.is_partial) == (["shop.a", "shop.b", "shop.d", "shop.e"], True)
    client.execute("HSET", HandlerKeys("shop", "g", "s:g").parked, "ann", f"{now_ms} failed")
    found = swept(client, now_ms)
    assert ([*found.handlers], found.is_partial) == (["shop.a", "shop.b", "shop.g", "shop.d"], True)


@pytest.mark.parametrize("change", [{"lag": 1}, {"paused": 1}, {"stuck": 1}, {"dead_letters": 1}])
def test_a_handler_behind_the_first_ones_has_a_place_for_each_reason(change: dict[str, int]) -> None:
    assert not figure_history.needs_place(FIGURES)
    assert figure_history.needs_place(msgspec.structs.replace(FIGURES, **change))


def test_a_scan_of_one_handler_reads_a_page_at_a_time_and_leaves_the_others_out(client: Client) -> None:
    for minute in range(1, 301):
        handlers = {"shop.pay": FIGURES, "shop.bill": FIGURES} if minute > 1 else {"shop.bill": FIGURES}
        assert FigureHistory(client).add(Sample(at_ms=minute * STEP_MS, handlers=handlers))
    before = commands_run(client.execute)
    found = FigureHistory(client).scan(0, "shop.pay")
    assert next(found) == Sample(at_ms=2 * STEP_MS, handlers={"shop.pay": FIGURES}), "the first that has it"
    assert (commands_run(client.execute) - before)["xrange"] == 1
    assert [one.at_ms for one in found] == [minute * STEP_MS for minute in range(3, 301)]
    assert (commands_run(client.execute) - before)["xrange"] == 2


def test_of_several_consoles_one_writes_and_another_goes_on_after_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "_HELD_MS", HOUR_MS)  # none loses the name within the test
    fill_with(client, "x")
    writers = [HistoryWriter(client.url) for _ in range(3)]
    assert [one.write() for one in writers] == [True, False, False]
    expire_newest(client)
    assert [one.write() for one in reversed(writers)] == [False, False, True]
    expire_newest(client)
    writers[0].release()
    assert [one.write() for one in reversed(writers)] == [True, False, False]


def test_two_samples_of_one_minute_are_one_even_from_two_writers(client: Client) -> None:
    sample = Sample(at_ms=90_000, handlers={"shop.pay": FIGURES})
    assert FigureHistory(client).add(sample)
    client.execute("DEL", history_writer_key())
    assert not FigureHistory(client).add(Sample(at_ms=119_999, handlers={"shop.pay": FIGURES}))
    assert FigureHistory(client).read(0) == [sample]


def test_no_sample_is_added_before_the_step_of_the_newest_is_over(client: Client) -> None:
    history = FigureHistory(client)
    history.add(Sample(at_ms=10 * STEP_MS + 30_000, step_ms=5 * STEP_MS, handlers={"shop.pay": FIGURES}))
    assert [history.is_due(n * STEP_MS) for n in (10, 14, 15)] == [False, False, True]


def test_the_writer_awaits_the_step_that_the_newest_sample_announces(client: Client) -> None:
    fill_with(client, "x")
    for minutes, is_written in ((3, False), (10, True)):
        client.execute("DEL", history_key())
        at_ms = server_time_ms(client) - minutes * STEP_MS
        FigureHistory(client).add(Sample(at_ms=at_ms, step_ms=10 * STEP_MS, handlers={"shop.pay": FIGURES}))
        writer = HistoryWriter(client.url)
        assert writer.write() == is_written
        writer.release()


def test_on_a_cluster_the_history_is_written_and_shown(request: pytest.FixtureRequest) -> None:
    deployed = lent_cluster(request)
    with Client(deployed.url) as client, authorized(deployed.url, Level.FIGURES) as browser:
        fill_with(client, "x")
        assert HistoryWriter(deployed.url).write()
        assert "svg" in browser.get("/").tags


def test_the_history_is_capped_at_a_day(client: Client) -> None:
    for n in range(1, 1_700):
        FigureHistory(client).add(Sample(at_ms=n * STEP_MS, handlers={"shop.pay": FIGURES}))
    assert 1_440 <= client.execute("XLEN", history_key()) <= 1_600


def test_nothing_is_written_until_all_streams_were_read_once_however_few_a_step_reads(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "_POLL_S", 0.0)
    for n in range(5):
        joined_by_field(client, f"orders{n}", app="shop", handler="pay")
        client.execute("XADD", f"orders{n}", "*", "key", "x")
    writer = HistoryWriter(client.url, SweepPolicy(at_once=2))
    assert [writer.write() for _ in range(3)] == [False, False, True]
    found = FigureHistory(client).newest()
    assert found is not None
    assert (found.handlers["shop.pay"].streams, found.handlers["shop.pay"].lag) == (5, 5)


def test_a_console_that_has_lost_the_name_reads_all_anew_before_it_writes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "_POLL_S", 0.0)
    monkeypatch.setattr(history_writer, "_HELD_MS", HOUR_MS)
    for n in range(2):
        joined_by_field(client, f"orders{n}", app="shop", handler="pay")
    writer = HistoryWriter(client.url, SweepPolicy(at_once=1))
    assert [writer.write() for _ in range(2)] == [False, True]
    client.execute("SET", history_writer_key(), "another", "PX", HOUR_MS)
    assert not writer.write()
    client.execute("DEL", history_writer_key(), history_key())
    assert [writer.write() for _ in range(2)] == [False, True]


def test_a_console_that_runs_writes_a_sample_and_releases_the_name_at_its_end(client: Client) -> None:
    fill_with(client, "x")
    with ServiceProcess(("console",), (), client.url) as console:
        eventually(lambda: client.execute("XLEN", history_key()), "a sample")  # a second one, if a minute ends just now
        assert client.execute("GET", history_writer_key()) is not None
        console.process.terminate()
        console.process.wait()
        assert client.execute("GET", history_writer_key()) is None
    with authorized(client.url, Level.FIGURES) as browser:
        assert "svg" in browser.get("/").tags


def test_pages_show_charts_without_styles_and_scripts_of_their_own_and_all_figures_as_a_table(
    client: Client, browser: Browser
) -> None:
    fill_with(client, "x")
    add(client, (30, 0), (29, 120), (28, 60), (10, 600), (9, 1_200))
    for path in ("/", "/handler?name=shop.pay"):
        page = browser.get(path)
        assert page.html.count("<svg") == 5
        assert page.html.replace(SCRIPT, "").count("<script") == 0
        assert "style" not in page.tags
        assert " style=" not in page.html
        described_by = re.findall(r'aria-labelledby="([\w-]+) ([\w-]+)"', page.html)
        assert len(described_by) == 5
        for one in described_by:
            assert all(page.html.count(f'id="{each}"') == 1 for each in one)
        assert "solid: added, last 10.0, largest 10.0 dashed: committed, last 10.0, largest 10.0" in page.text
        assert page.text.count("nothing recorded until") == 3, "before, between and after the samples"
        assert page.html.count('<th scope="row"><time>') == 5 + 3
        assert "-1" not in "".join(re.findall(r'points="([^"]*)"', page.html)), "no rate is negative"
        rates = page.html.partition("<svg")[2].partition("</svg>")[0]
        assert rates.count("<polyline") == 4, "two curves, each before and after the gap"


def add_lags(client: Client, lags: Iterable[int | None]) -> None:
    """Samples of `app.handle`, one a minute up to now, with these lags."""
    known = [*lags]
    now_ms = server_time_ms(client)
    for minutes, lag in enumerate(known):
        at_ms = now_ms - (len(known) - 1 - minutes) * STEP_MS
        sample = Sample(at_ms=at_ms, handlers={"app.handle": msgspec.structs.replace(FIGURES, lag=lag)})
        assert FigureHistory(client).add(sample)


@pytest.mark.parametrize(
    ("lags", "told"),
    [
        ([900, 20, 120, 230, 340, 1_450], "from 20 to 1,450 entries in 4 min"),
        ([0, 100, None, 200, 300, 400, 500], "from 0 to 500 entries in 6 min"),
        ([0, 100, 200, 300], None),
        ([0, 1, 2, 3, 4, 5], None),
        ([0, 100, 200, 300, 400, 390], None),
        ([], None),
    ],
    ids=["rises", "a gap", "for too short a time", "by too little", "falls", "no history"],
)
def test_the_overview_says_that_the_lag_of_a_running_handler_rises(
    client: Client, browser: Browser, lags: list[int | None], told: str | None
) -> None:
    add_lags(client, lags)
    sentence = "app.handle: its lag has risen"
    fill(client, 1)
    assert sentence not in browser.get("/").text, "no worker is alive"
    with working(client, make(double)):
        page = eventually(lambda: "app.handle running" in (one := browser.get("/")).text and one, "a new overview")
        assert page
        assert (sentence in page.text) == (told is not None)
        if told is not None:
            assert f"{sentence} {told}: more entries come" in page.text
            assert "All handlers keep up" not in page.text


def test_the_history_says_by_how_much_its_figures_are_older_than_their_time(client: Client, browser: Browser) -> None:
    now_ms = server_time_ms(client)
    for minutes, age_ms in ((120, 3_600_000), (2, 59_000), (1, 300_000)):
        sample = Sample(at_ms=now_ms - minutes * STEP_MS, age_ms=age_ms, handlers={"shop.pay": FIGURES})
        assert FigureHistory(client).add(sample)
    assert "Some of these figures are up to 5 min older than their time: more streams change" in browser.get("/").text
    client.execute("DEL", history_key())
    assert FigureHistory(client).add(Sample(at_ms=now_ms, age_ms=59_000, handlers={"shop.pay": FIGURES}))
    assert "older than their time" not in browser.get("/?hours=6").text


def test_a_range_is_a_link_that_keeps_the_page(client: Client, browser: Browser) -> None:
    fill_with(client, "x")
    add(client, (300, 0), (299, 60))
    page = browser.get("/handler?name=shop.pay")
    assert "svg" not in page.tags
    longer = [one for one in page.links if "hours=" in one]
    assert longer == [f"/handler?name=shop.pay&hours={one}" for one in (1, 6, 24)]
    assert "svg" in browser.get(longer[1]).tags
    assert "svg" in browser.get("/?hours=24").tags


def test_each_page_has_the_history_of_its_handler_and_a_longer_range_has_fewer_points(
    client: Client, browser: Browser
) -> None:
    fill_with(client, "x")
    now_ms = server_time_ms(client)
    figures = {f"shop.{name}": msgspec.structs.replace(FIGURES, lag=lag) for name, lag in (("pay", 3), ("bill", 4))}
    for minutes in range(24, 0, -1):
        sample = Sample(at_ms=now_ms - minutes * STEP_MS, is_partial=True, handlers=figures)
        assert FigureHistory(client).add(sample)
    pages = {hours: browser.get(f"/?hours={hours}") for hours in (1, 6, 24)}
    own = browser.get("/handler?name=shop.pay&hours=24")
    assert ["Lag last 7, largest 7" in one.text for one in (*pages.values(), own)] == [True, True, True, False]
    assert "Lag last 3, largest 3" in own.text
    assert "The history has the first 100 handlers by name, and up to 100 others where entries wait" in own.text
    points = [one.html.count('<th scope="row"><time>') for one in pages.values()]
    assert points[0] > points[1] > points[2]


def test_a_damaged_history_leaves_the_page_readable(client: Client, browser: Browser) -> None:
    fill_with(client, "x")
    client.execute("XADD", history_key(), "1-0", "sample", "x")
    assert browser.get("/?hours=24").status == 200
    client.execute("DEL", history_key())
    client.execute("SET", history_key(), "x")
    page = browser.get("/?hours=6")
    assert page.status == 200
    assert "Another program has written to the key of the history" in page.text


@pytest.fixture
def without_rights(client: Client) -> Iterator[str]:
    """The URL of a user of Redis that may use the keys of handlers, and not those of the history."""
    keys = ("~orders", "~millstream:{*", "~millstream:worker:*")
    client.execute("ACL", "LOG", "RESET")
    client.execute("ACL", "SETUSER", "no-history", "on", ">secret", *keys, "+@all")
    yield client.url.replace("redis://", "redis://no-history:secret@", 1)
    client.execute("ACL", "DELUSER", "no-history")


def test_a_page_without_the_right_to_the_history_says_so_and_shows_the_rest(
    client: Client, without_rights: str
) -> None:
    fill_with(client, "x")
    with authorized(without_rights, Level.FIGURES) as browser:
        page = browser.get("/handler?name=shop.pay")
    assert page.status == 200
    assert "Redis refuses to show the history" in page.text


def refusals(client: Client) -> int:
    """How often Redis has refused the user without rights."""
    found = [mapping_of(one) for one in client.execute("ACL", "LOG")]
    return sum(int(one[b"count"]) for one in found if one[b"username"] == b"no-history")


def test_a_writer_that_redis_refuses_warns_once_and_writes_once_it_may(
    client: Client, without_rights: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "_POLL_S", 0.01)
    fill_with(client, "x")
    with HistoryWriter(without_rights):
        eventually(lambda: refusals(client) >= 3, "three refused attempts")
        client.execute("ACL", "SETUSER", "no-history", "~*")
        eventually(lambda: client.execute("XLEN", history_key()), "a sample")  # a second one, if a minute ends just now
    assert caplog.text.count("history not written") == 1


def test_a_console_without_the_name_asks_for_it_once_in_each_poll(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "_POLL_S", 3_600.0)
    client.execute("SET", history_writer_key(), "another", "PX", HOUR_MS)
    before = commands_run(client.execute)["evalsha"]
    with HistoryWriter(client.url):
        eventually(lambda: commands_run(client.execute)["evalsha"] > before, "the writer to ask")
    assert commands_run(client.execute)["evalsha"] - before <= 3, (
        "once, with and without the text of the script, and its end"
    )


def test_a_forgotten_handler_has_no_page_and_the_others_keep_their_history(client: Client, browser: Browser) -> None:
    figures = {f"shop.{name}": FIGURES for name in ("pay", "bill")}
    for name, stream in (("pay", "orders"), ("bill", "bills")):
        joined_by_field(client, stream, app="shop", handler=name)
        client.execute("XADD", stream, "*", "key", "x")
    FigureHistory(client).add(Sample(at_ms=server_time_ms(client) - STEP_MS, handlers=figures))
    assert call("forget", "shop.pay", "--yes", url=client.url).code == 0
    assert browser.get("/handler?name=shop.pay").status == 404
    assert "svg" in browser.get("/handler?name=shop.bill").tags
    assert "svg" in browser.get("/").tags
