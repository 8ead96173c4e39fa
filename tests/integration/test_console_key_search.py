"""The page of a key finds it on whichever stream of the handler it is, and says where it has not looked."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from millstream.admin.key_places import find_key_places
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.services.console.views import keys
from tests.support.consoles import Browser, console
from tests.support.dead_letters import add_dead_letter
from tests.support.keyed_fixtures import joined_by_field

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

PAGE = "/key?handler=shop.pay&key="


def place(n: int) -> HandlerKeys:
    return HandlerKeys("shop", "pay", f"in:{n:03}")


def add_streams(client: Client, count: int) -> None:
    """A handler with a key on so many streams, none of which has an entry yet."""
    places = [place(n) for n in range(count)]
    client.pipeline([("XGROUP", "CREATE", one.stream, one.group, "0", "MKSTREAM") for one in places])


def add_message(client: Client, n: int, key: str) -> None:
    stream = joined_by_field(client, place(n).stream, app="shop", handler="pay")
    client.execute("XADD", place(n).stream, "*", "key", key)
    stream.enqueue_new(count=10, max_pending=100)


@pytest.fixture
def browser(client: Client, tmp_path: Path) -> Iterator[Browser]:
    with console(client.url, tmp_path, "operate") as opened:
        yield opened


def test_a_key_on_the_last_of_more_streams_than_are_shown_is_found(client: Client, browser: Browser) -> None:
    add_streams(client, 21)
    add_message(client, 20, "ann")
    add_message(client, 3, "bob")
    add_dead_letter(client, [b"key", b"ann"], keys=place(19))
    page = browser.get(f"{PAGE}ann")
    assert "It has something on 2 of 21 streams of shop.pay" in page.text
    assert [name in page.text for name in ("On in:019", "On in:020", "On in:003", "On in:000")] == [
        True,
        True,
        False,
        False,
    ]
    assert "There may be more" not in page.text
    assert "On in:003" in browser.get(f"{PAGE}bob").text
    nothing = browser.get(f"{PAGE}cid").text
    assert "It has nothing on 21 streams of shop.pay: no message that waits, no state and no dead letter." in nothing


def test_a_command_for_a_key_names_its_stream_where_the_handler_has_several(client: Client, browser: Browser) -> None:
    add_streams(client, 21)
    add_message(client, 20, "ann")
    assert "The key is parked" in browser.send(browser.get(f"{PAGE}ann"), "/key/park").text
    for address in (f"{PAGE}ann", f"{PAGE}ann&stream=in:020"):
        assert "millstream key unpark shop.pay ann --stream in:020" in browser.get(address).text, address


def test_the_form_of_the_page_shows_the_key_on_one_stream(client: Client, browser: Browser) -> None:
    add_streams(client, 2)
    add_message(client, 1, "a b\\")
    page = browser.get(f"{PAGE}a+b%5C%5C")
    fields = page.form("/key")
    assert fields == {"handler": ["shop.pay"], "key": ["a b\\\\"], "stream": [""]}
    shown = browser.http.get("/key", params={**{name: one for name, (one,) in fields.items()}, "stream": "in:001"}).text
    assert (">in:001</a>" in shown, ">in:000</a>" in shown) == (True, False)


def test_what_was_not_searched_in_time_is_said_and_found_by_the_name_of_the_stream(
    client: Client, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_streams(client, 60)
    add_message(client, 59, "ann")
    monkeypatch.setattr(keys, "find_key_places", partial(find_key_places, budget_ms=0))
    page = browser.get(f"{PAGE}ann")
    assert "It has nothing on 50 streams of shop.pay" in page.text
    assert (
        "There may be more: the handler has 60 streams, too many to search in a second. Name the stream." in page.text
    )
    assert "On in:059" in browser.get(f"{PAGE}ann&stream=in:059").text


def test_a_search_without_time_for_dead_letters_says_so(client: Client) -> None:
    places = [place(n) for n in range(21)]
    add_streams(client, 21)
    add_dead_letter(client, [b"key", b"ann"], keys=places[20])
    found = find_key_places(client, places, b"ann", budget_ms=0)
    assert (found.found, found.searched, found.is_partial) == ([], 21, True)
    found = find_key_places(client, places, b"ann", budget_ms=3_600_000)
    assert (found.found, found.is_partial) == ([places[20]], False)
