"""Writes build/screenshots: every page of the console as a picture, narrow and wide, light and dark.

    python -m scripts.console_screenshots

The pages are those of the tests, with the same data, in a Redis of its own. It requires Chromium, as those tests do.
`make screenshots` installs what is missing. Look at the pictures after a change to a page or to the stylesheet.
"""

import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.browser import Browser, Chromium
from tests.support.console_browsing import await_login, follow, log_in, visit
from tests.support.console_pages import EMPTY_PAGES, PAGES, fill_pages
from tests.support.console_threads import ConsoleThread
from tests.support.console_usability import WINDOWS
from tests.support.consoles import write_tokens

FOLDER = Path(__file__).parents[1] / "build/screenshots"
HOUR_MS = 3_600_000.0
QUESTIONS = (
    ("/letters?handler=shop.pay", "/letters/purge"),
    ("/letters?handler=shop.pay", "/letters/redrive"),
    ("/key?handler=shop.pay&key=parked+x", "/key/skip"),
)
"""A page, and the form on it that asks before it acts."""


def take(browser: Browser, folder: Path, name: str) -> None:
    """Write what the browser shows, in each window."""
    for width, dark in WINDOWS:
        browser.show(width=width, dark=dark)
        (folder / f"{name}-{width}-{'dark' if dark else 'light'}.png").write_bytes(browser.picture())


def name_of(path: str) -> str:
    """The name of the pictures of a page."""
    return re.sub(r"\W+", "-", path).strip("-") or "overview"


def take_empty(browser: Browser, url: str, folder: Path) -> None:
    """Write the login form, and the pages of a Redis without data."""
    await_login(browser)
    take(browser, folder, "login")
    log_in(browser, "admin")
    for path in EMPTY_PAGES:
        visit(browser, f"{url}{path}")
        take(browser, folder, f"empty-{name_of(path)}")


def take_filled(browser: Browser, url: str, folder: Path) -> None:
    """Write every page, some questions, and a page that is not there."""
    log_in(browser, "admin")
    for path in PAGES:
        visit(browser, f"{url}{path}")
        take(browser, folder, name_of(path))
    for path, form in QUESTIONS:
        visit(browser, f"{url}{path}")
        follow(browser, f"form[action='{form}'] button")
        take(browser, folder, f"question-{name_of(form)}")
    visit(browser, f"{url}/handler?name=none.none", shows="main")
    take(browser, folder, "problem")


def take_all(folder: Path) -> None:
    """Write all pictures."""
    with (
        TemporaryDirectory() as scratch,
        EmbeddedServer(extra={"appendonly": "no"}) as server,
        Client(server.url) as client,
        Chromium(Path(scratch) / "chromium") as chromium,
    ):
        tokens = write_tokens(Path(scratch))
        for fill, write in ((None, take_empty), (fill_pages, take_filled)):
            if fill:
                fill(client)
            with (
                ConsoleThread(server.url, tokens, renew_ms=HOUR_MS) as console,
                Browser(f"{console.url}/", chromium) as browser,
            ):
                write(browser, console.url, folder)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    take_all(FOLDER)
    sys.stdout.write(f"{len([*FOLDER.iterdir()])} pictures are in {FOLDER}\n")
