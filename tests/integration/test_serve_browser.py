"""The example page, in a real browser: it follows a stream live, comes back by itself, and shows what is missing."""

from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.browser import Browser, Chromium
from tests.support.commandline import free_port
from tests.support.gateways import Server, publish
from tests.support.waiting import eventually

PAGE = Path(__file__).parents[2] / "examples/follow"
TOKEN = "0123456789abcdef-page"

pytestmark = [pytest.mark.router]


def lines(browser: Browser) -> list[str]:
    """What the page shows, the oldest first."""
    found: list[str] = browser.run("Array.from(document.querySelectorAll('#log li'), one => one.textContent).reverse()")
    return found


def state(browser: Browser) -> str:
    """What the page says of its connection."""
    found: str = browser.run("document.getElementById('state').className")
    return found


def fill(browser: Browser, **values: str) -> None:
    """Fill in the form, and send it."""
    for name, value in values.items():
        browser.run(f"document.getElementById('{name}').value = '{value}'")
    browser.run("document.querySelector('button').click()")


def test_the_example_page_follows_a_stream_through_restarts_and_shows_gaps(
    millstream_url: str, tmp_path: Path, chromium: Chromium
) -> None:
    (tmp_path / "tokens").write_text(f"{TOKEN} entity:*\n")
    # With tickets this short, none is good any more when the page comes back.
    # It is to come back to the port that it knows, which no client may use meanwhile.
    options = (
        "--port",
        str(free_port()),
        "--token-file",
        str(tmp_path / "tokens"),
        "--ticket",
        "1",
        "--page",
        str(PAGE),
    )
    with Client(millstream_url) as client:
        ids = publish(client, "entity:1", range(2))
        with Server(millstream_url, *options) as server, Browser(f"{server.url}/", chromium) as browser:
            eventually(lambda: browser.run("document.readyState === 'complete' && document.forms.length"), "the page")
            fill(browser, stream="entity:1", token=TOKEN, after="earliest")
            eventually(lambda: len(lines(browser)) == 2, "the history")
            eventually(lambda: state(browser) == "live", "the page to say that it is live")
            client.execute("XADD", "entity:1", "*", "n", "<b>2</b>")
            eventually(lambda: len(lines(browser)) == 3, "a live message")
            assert (lines(browser)[2].endswith('{"n":"<b>2</b>"}'), browser.run("document.querySelector('b')")) == (
                True,
                None,
            )

            assert server.stop() == 0
            eventually(lambda: state(browser) == "", "the page to say that it is live no more")
            ids += publish(client, "entity:1", range(3, 6))
            client.execute("XTRIM", "entity:1", "MINID", ids[3])
            with Server(millstream_url, *options):
                eventually(lambda: len(lines(browser)) >= 6, "what was missed, and that there is a gap")
                ids += publish(client, "entity:1", [6])
                eventually(lambda: len(lines(browser)) >= 7, "the next message")
            shown = [line.split()[0] for line in lines(browser)]
            assert shown[:2] + shown[3:] == [*ids[:2], "gap:", *ids[3:]]
