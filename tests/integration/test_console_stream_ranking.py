"""The list of more than 1,000 streams in an order: ranked by reads at a bounded rate, while viewers have the list open."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import MOST_PER_S, StreamRanking
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.console_parts import HOUR_MS, console_with
from tests.support.consoles import Browser, Page
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

STREAMS = 1_100


@pytest.fixture
def filled(fresh_client: Client) -> Client:
    """So many streams with an entry each, and three with more, which are older and whose groups are behind."""
    fresh_client.pipeline([("XADD", f"calls:{n:04}", "*", "n", n) for n in range(STREAMS - 3)])
    for name, length, behind in (("x", 30, 2), ("y", 10, 9), ("z", 20, 5)):
        fresh_client.pipeline([("XADD", f"calls:{name}", f"{n}-0", "n", n) for n in range(length, 2 * length)])
        fresh_client.execute(
            "XGROUP", "CREATE", f"calls:{name}", "g", f"{2 * length - 1 - behind}-0", "ENTRIESREAD", length - behind
        )
    return fresh_client


@contextmanager
def opened(client: Client, folder: Path, clock: ManualClock, wait_ms: float = HOUR_MS) -> Iterator[Browser]:
    """A browser at a console whose ranking has this clock, and therefore ends soon after the last page."""
    names = StreamNames(client.url, wait_ms=HOUR_MS, clock=ManualClock())
    ranking = StreamRanking(client.url, names, wait_ms=wait_ms, clock=clock)
    with console_with(client.url, folder, names=names, ranking=ranking) as (_, browser):
        yield browser
    eventually(lambda: not reading_threads(), "the end of the thread")


def names(page: Page) -> list[str]:
    return re.findall(r"/stream\?name=calls%3A(\w+)", page.html)


def reading_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "millstream-ranking"]


def test_more_than_a_thousand_streams_are_listed_in_each_order_a_hundred_at_a_time(
    filled: Client, tmp_path: Path
) -> None:
    with opened(filled, tmp_path, ManualClock()) as browser:
        for order, first in (("entries", "xzy"), ("oldest", "yzx"), ("lag", "yzx")):
            page = browser.get(f"/streams?order={order}")
            assert "".join(names(page)[:3]) == first, order
            assert "The order is that of 1,100 of 1,100 streams, as they were since 20" in page.text
            assert "these are 1 to 100" in page.text
            assert "goes on to read" not in page.text
        following = browser.get("/streams?order=entries")
        seen = names(following)
        while path := next((one for one in following.links if "from=" in one and "refresh" not in one), None):
            following = browser.get(path)
            seen += names(following)
        assert (len(seen), len(set(seen))) == (1_000, 1_000)
        assert "these are 901 to 1,000" in following.text
        assert names(browser.get("/streams?order=entries&from=nonsense"))[0] == "x"


def test_the_rate_is_ranked_once_each_stream_was_read_twice(filled: Client, tmp_path: Path) -> None:
    with opened(filled, tmp_path, ManualClock()) as browser:
        page = eventually(lambda: is_ranked(one := browser.get("/streams?order=rate")) and one, "all rates")
    assert page
    assert len(names(page)) == 100


def is_ranked(page: Page) -> bool:
    return "The order is that of 1,100 of 1,100 streams" in page.text


class StoppedClock(ManualClock):
    """A thread that rests by this clock goes on when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait, and then move on at once."""
        assert self.go_on.wait(FAIL_SAFE_S)
        super().sleep_ms(duration_ms)


def test_the_page_says_how_far_the_ranking_is(filled: Client, tmp_path: Path) -> None:
    clock = StoppedClock()
    with opened(filled, tmp_path, clock, wait_ms=0) as browser:
        wanted = "The order is that of 100 of 1,100 streams"
        page = eventually(lambda: wanted in (one := browser.get("/streams?order=entries")).text and one, "a hundred")
        assert page
        assert "The console goes on to read the others: see the next renewal, or reload." in page.text
        assert len(names(page)) == 100
        page = browser.get("/streams?order=rate")
        assert "goes on to read rates, for which it reads each stream twice" in page.text
        assert names(page) == []
        clock.go_on.set()


class RestingClock(ManualClock):
    """It records how long a thread rests."""

    def __init__(self) -> None:
        super().__init__()
        self.rests_ms: list[float] = []

    def sleep_ms(self, duration_ms: float) -> None:
        """Move on at once."""
        self.rests_ms.append(duration_ms)
        super().sleep_ms(duration_ms)


def test_at_most_so_many_streams_a_second_are_read_and_none_once_no_page_asks(filled: Client) -> None:
    clock = RestingClock()
    ranking = StreamRanking(
        filled.url, StreamNames(filled.url, wait_ms=HOUR_MS, clock=ManualClock()), wait_ms=HOUR_MS, clock=clock
    )
    before = commands_run(filled.execute)["xinfo|stream"]
    assert ranking.find("calls:", "entries").names[0] == "calls:x"
    eventually(lambda: not reading_threads(), "the end of the thread, as no page asks")
    read = commands_run(filled.execute)["xinfo|stream"] - before
    assert read >= STREAMS
    assert read <= MOST_PER_S * sum(one for one in clock.rests_ms if one < 1_000) / 1_000, "also within a round"
    assert clock.now_ms >= 15_000, "for so long the list counts as open"
    assert read <= STREAMS * (clock.now_ms / 5_000 + 1), "none more often than every five seconds"


def test_the_thread_rests_four_times_as_long_as_it_reads(filled: Client) -> None:
    clock = RestingClock()
    clock.step_ms = 30
    ranking = StreamRanking(
        filled.url, StreamNames(filled.url, wait_ms=HOUR_MS, clock=ManualClock()), wait_ms=HOUR_MS, clock=clock
    )
    ranking.find("calls:00", "entries")
    eventually(lambda: not reading_threads(), "the end of the thread")
    assert clock.rests_ms[0] >= 4 * 30


def test_only_the_streams_of_the_prefix_are_read(filled: Client) -> None:
    ranking = StreamRanking(
        filled.url, StreamNames(filled.url, wait_ms=HOUR_MS, clock=ManualClock()), wait_ms=HOUR_MS, clock=ManualClock()
    )
    before = commands_run(filled.execute)["xinfo|stream"]
    found = ranking.find("calls:00", "entries")
    assert found.ranked == 100
    eventually(lambda: not reading_threads(), "the end of the thread")
    read = commands_run(filled.execute)["xinfo|stream"] - before
    assert 100 <= read <= 400


def test_a_ranking_that_redis_has_ended_goes_on_when_a_page_asks_again() -> None:
    with EmbeddedServer() as server:
        with Client(server.url) as client:
            client.execute("XADD", "a", "*", "n", 1)
        names = StreamNames(server.url, keep_ms=0, wait_ms=HOUR_MS)
        ranking = StreamRanking(server.url, names, wait_ms=HOUR_MS, clock=ManualClock())
        assert ranking.find("", "entries").names == ["a"]
        eventually(lambda: not reading_threads(), "the end of the thread")
        server.stop()
        assert ranking.find("", "entries").names == ["a"], "as it was read before"
        eventually(lambda: not reading_threads(), "its end, for want of Redis")
        server.start()
        with Client(server.url) as client:
            client.pipeline([("XADD", name, "*", "n", 1) for name in "abc"])
        eventually(lambda: set(ranking.find("", "entries").names) == {"a", "b", "c"}, "the other streams")
