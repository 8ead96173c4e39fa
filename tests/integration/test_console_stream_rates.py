"""The list of streams shows how many entries a second each gets, the busiest first if that is asked for."""

import re
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_rates import StreamRates
from tests.support.clocks import ManualClock
from tests.support.console_parts import HOUR_MS, console_with
from tests.support.consoles import Browser, Page
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

UNKNOWN = "it is known at the next renewal"


def add(client: Client, **counts: int) -> None:
    client.pipeline([("XADD", f"calls:{name}", "*", "n", n) for name, count in counts.items() for n in range(count)])


def rates(page: Page) -> list[tuple[str, str]]:
    """The names after `calls:`, and the rates, of a list of streams."""
    row = r'name=calls%3A(\w+)".*?<td class="n">[\d,]+</td>\s*<td class="n">([^<]*)</td>'
    return re.findall(row, page.html, re.DOTALL)


def test_the_busiest_streams_come_first_once_the_console_has_read_them_twice(client: Client, tmp_path: Path) -> None:
    add(client, a=30, b=20, c=10)
    clock = ManualClock()

    def read(browser: Browser, path: str) -> Page:
        """The page, some seconds after the one before."""
        clock.now_ms += 5_000
        parts.shared.clear()
        return browser.get(path)

    names = StreamNames(client.url, keep_ms=0, wait_ms=HOUR_MS)
    with console_with(client.url, tmp_path, names=names, rates=StreamRates(clock)) as (parts, browser):
        page = read(browser, "/streams?prefix=calls:")
        assert rates(page) == [("a", "-"), ("b", "-"), ("c", "-")]
        assert UNKNOWN in page.text
        add(client, b=5, c=500, Z=1)
        eventually(lambda: (found := parts.names.find("calls:")) and len(found.names) == 4, "the new name")
        page = read(browser, next(one for one in page.links if "order=rate" in one))
        assert rates(page) == [("c", "100"), ("b", "1.0"), ("a", "0.0"), ("Z", "-")]
        assert UNKNOWN in page.text
        client.execute("XTRIM", "calls:c", "MAXLEN", 1)
        add(client, b=10_000)
        page = read(browser, "/streams?prefix=calls:&order=rate")
        assert rates(page) == [("b", "2,000"), ("Z", "0.0"), ("a", "0.0"), ("c", "0.0")]
        assert UNKNOWN not in page.text


def test_a_rate_is_by_the_time_at_which_the_read_began(client: Client, tmp_path: Path) -> None:
    class Adding(ManualClock):
        """Each look at it is followed by an entry, which a read that begins then has, and one that is over has not."""

        def monotonic_ms(self) -> float:
            add(client, a=1)
            return super().monotonic_ms()

    add(client, a=1)
    with console_with(client.url, tmp_path, rates=StreamRates(Adding())) as (_, browser):
        assert re.search(r'calls%3Aa".*?<td class="n">2</td>', browser.get("/streams?prefix=calls:").html, re.DOTALL)
