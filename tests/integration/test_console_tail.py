"""The console follows the end of a stream without JavaScript: each reload goes on from the last id that was shown."""

import re
from collections.abc import Iterator
from html import unescape

import pytest

from millstream.redis_client.client import Client
from millstream.services.console import Level
from millstream.services.console.app import RENEWAL_HEADER
from tests.support.consoles import SCRIPT, Browser, Page, authorized
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]


@pytest.fixture
def browser(client: Client) -> Iterator[Browser]:
    client.pipeline([("XADD", "in", f"{n}-0", "n", f"old{n}") for n in range(1, 121)])
    with authorized(client.url, Level.PAYLOADS) as opened:
        yield opened


def reload(browser: Browser, page: Page) -> Page:
    """The page to which this one reloads itself after some seconds."""
    found = re.search(r'<meta http-equiv="refresh" content="5; url=([^"]+)">', page.html)
    assert found, page.html
    return browser.get(unescape(found[1]))


def test_a_tail_goes_on_from_the_last_id_and_shows_what_is_new(browser: Browser, client: Client) -> None:
    page = browser.get(next(one for one in browser.get("/stream?name=in").links if one.startswith("/tail")))
    assert "http-equiv" not in page.html
    assert ("120-0 n old120 119-0" in page.text, "old71" in page.text, "old70" in page.text) == (True, True, False)
    assert "millstream tail in --after 120-0" in page.text
    page = reload(browser, browser.get(next(one for one in page.links if "after=120-0&refresh=5" in one)))
    assert "new " not in page.text
    client.execute("XADD", "in", "121-0", "n", "<b>fresh")
    page = reload(browser, page)
    assert "New are those after 120-0." in page.text
    assert "121-0 new n <b>fresh 120-0 n old120" in page.text
    page = reload(browser, page)
    assert ("121-0 n <b>fresh" in page.text, "New are those after 121-0." in page.text) == (True, True)
    assert "http-equiv" not in browser.get(next(one for one in page.links if "after=" in one)).html


def test_an_open_tail_renews_itself_with_what_came_since_it_was_opened(browser: Browser, client: Client) -> None:
    path = "/tail?name=in&after=120-0"
    page = browser.get(path)
    assert SCRIPT in page.html
    client.execute("XADD", "in", "121-0", "n", "fresh")
    renewed = eventually(lambda: "121-0 new n fresh" in browser.get(path, **{RENEWAL_HEADER: "1"}).text, "a new read")
    assert renewed
    assert SCRIPT not in browser.get(f"{path}&refresh=5").html, "a page that reloads itself renews nothing"


def test_a_tail_that_is_behind_shows_the_end_and_leads_to_what_it_left_out(browser: Browser, client: Client) -> None:
    page = browser.get("/tail?name=in&after=60-0&refresh=5")
    assert "More came than are shown here: from 61-0 on" in page.text
    assert "/stream?name=in&from=61-0" in page.links
    assert ("old120" in page.text, "old70" in page.text) == (True, False)
    assert "More came" not in browser.get("/tail?name=in&after=70-0").text
    client.pipeline([("XADD", "large", f"{n}-0", "n", b"x" * 400_000) for n in range(1, 41)])
    page = browser.get("/tail?name=large&after=1-0")
    assert page.text.count("more characters are not shown") == 5
    assert "More came than are shown here: from 2-0 on" in page.text


def test_a_tail_of_an_empty_stream_waits_and_of_none_is_no_page(browser: Browser, client: Client) -> None:
    client.execute("XGROUP", "CREATE", "empty", "g", "$", "MKSTREAM")
    page = browser.get("/tail?name=empty&refresh=5")
    assert "The stream has no entries." in page.text
    client.execute("XADD", "empty", "5-0", "n", 1)
    assert "5-0 n 1" in reload(browser, page).text
    assert browser.get("/tail?name=nope").status == 404
    assert browser.get("/tail?name=in&after=soon").status == 400
    with authorized(client.url, Level.FIGURES) as other:
        assert other.get("/tail?name=in").status == 403
        assert [one for one in other.get("/stream?name=in").links if one.startswith("/tail")] == []


def test_what_is_hidden_is_hidden_in_a_tail(browser: Browser, client: Client) -> None:
    with authorized(client.url, Level.ADMIN, redact=lambda name, text: "(hidden)" if name == "n" else text) as other:
        page = other.get("/tail?name=in")
    assert ("n (hidden)" in page.text, "old1" in page.text) == (True, False)
