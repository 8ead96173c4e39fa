"""Handlers, streams, keys, entries and dead letters are found by name or id, by the command and by the console."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from millstream.admin.search import MOST_HITS, search
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.services.console import Level
from tests.support.clocks import ManualClock
from tests.support.commandline import call
from tests.support.consoles import Browser, Page, authorized, console, fill_with

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]


@pytest.fixture
def browser(client: Client, tmp_path: Path) -> Iterator[Browser]:
    """A viewer of payloads; `shop.pay` on `orders`, and two more streams."""
    fill_with(client, "x")
    client.execute("XADD", "orders:eu", "7-7", "n", 1)
    client.execute("XADD", b"in\xff", "7-7", "n", 1)
    with console(client.url, tmp_path, "payloads") as opened:
        yield opened


def find(browser: Browser, text: str) -> Page:
    """The page after the form in the head is sent."""
    return browser.get(f"/find?q={quote(text)}")


def test_what_is_found_alone_leads_to_its_page(browser: Browser, client: Client) -> None:
    letters = HandlerKeys("shop", "pay", "orders").dead_letters
    ((first_id, pairs),) = client.execute("XRANGE", letters, "-", "+")
    no_entry_has = f"{first_id.decode().partition('-')[0]}-1000000"  # as one of the same millisecond may have the first
    letter_id = client.execute("XADD", letters, no_entry_has, *pairs).decode()
    for text, path in {
        "shop.pay": "/handler?name=shop.pay",
        "shop": "/handler?name=shop.pay",
        "orders": "/stream?name=orders",
        "orders:": "/stream?name=orders%3Aeu",
        "in\\xff": "/stream?name=in%5Cxff",
        "parked x": "/key?handler=shop.pay&stream=orders&key=parked+x",
        "failing x": "/key?handler=shop.pay&stream=orders&key=failing+x",
        letter_id: f"/letter?handler=shop.pay&stream=orders&id={letter_id}",
    }.items():
        page = find(browser, text)
        assert (page.status, page.url.removeprefix("http://127.0.0.1")) == (200, path), text


def test_several_hits_are_a_list_and_none_is_a_sentence(browser: Browser) -> None:
    page = find(browser, "7-7")
    assert r"entry 7-7 - in\xff" in page.text
    assert {one for one in page.links if "from=7-7" in one} == {
        "/stream?name=orders%3Aeu&from=7-7",
        "/stream?name=in%5Cxff&from=7-7",
    }
    assert "millstream find 7-7" in page.text
    assert "Nothing is found." in find(browser, "nothing").text
    page = find(browser, " ")
    assert (page.status, "A handler, the beginning of a stream" in page.text) == (200, True)
    assert find(browser, "\\x").status == 400


def test_a_key_that_has_only_dead_letters_is_found(browser: Browser, client: Client) -> None:
    keys = HandlerKeys("shop", "pay", "orders")
    client.execute("DEL", keys.state, keys.parked, keys.queue(b"kparked x"))
    assert find(browser, "parked x").url.endswith("/key?handler=shop.pay&stream=orders&key=parked+x")


def test_a_key_that_looks_like_an_id_and_is_none_is_found(client: Client) -> None:
    keys, key = HandlerKeys("shop", "pay", "orders"), b"20240131120000123456-1"
    fill_with(client, "x")
    client.execute("HSET", keys.state, key, b"\x80")
    assert [(one.kind, one.key) for one in search(client, key).hits] == [("key", key)]


def test_a_viewer_of_figures_finds_names_and_nothing_that_messages_contain(
    browser: Browser, client: Client, tmp_path: Path
) -> None:
    with console(client.url, tmp_path, "figures") as other:
        assert find(other, "shop").url.endswith("/handler?name=shop.pay")
        for text in ("parked x", "7-7"):
            page = find(other, text)
            assert "Nothing is found. Keys, entries and dead letters take the level payloads." in page.text


def test_hidden_keys_are_not_found(browser: Browser, client: Client) -> None:
    with authorized(client.url, Level.ADMIN, redact=lambda name, text: "(hidden)" if name == "key" else text) as other:
        page = find(other, "parked x")
        assert "Nothing is found." in page.text
        assert "Keys are hidden here, and not looked for." in page.text


def test_a_search_ends_in_time_and_says_that_there_may_be_more(client: Client) -> None:
    client.pipeline([("XADD", f"device:{n}", "*", "n", n) for n in range(MOST_HITS + 1)])
    found = search(client, b"device:")
    assert (len(found.hits), found.is_partial) == (MOST_HITS, True)
    assert "there may be more" in call("find", "device:", url=client.url).err
    fill_with(client, "x")
    assert search(client, b"parked x", budget_ms=0).is_partial
    assert not search(client, b"parked x", clock=ManualClock()).is_partial, "no time passes"
    with authorized(client.url, Level.ADMIN) as browser:
        assert "There may be more" in find(browser, "device:").text


def test_the_command_prints_a_row_for_each_hit(browser: Browser, client: Client) -> None:
    assert call("find", "orders", "--json", url=client.url).json_lines() == [
        {"kind": "stream", "exact": True, "handler": None, "stream": "orders", "key": None, "id": None},
        {"kind": "stream", "exact": False, "handler": None, "stream": "orders:eu", "key": None, "id": None},
    ]
    assert call("find", "parked x", "--json", url=client.url).json() == {
        "kind": "key",
        "exact": True,
        "handler": "shop.pay",
        "stream": "orders",
        "key": "parked x",
        "id": None,
    }
    assert r"in\xff" in call("find", "7-7", url=client.url).out
    nothing = call("find", "nothing", url=client.url)
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "nothing is found\n")
    assert call("find", "", url=client.url).code == 2
