"""The console in a real browser: it logs in and acts by forms, and is readable at each width, light and dark."""

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.admin.key_queues import count_parked
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.services.console import views
from scripts.console_screenshots import name_of, take
from tests.support.accessibility import Axe
from tests.support.browser import Browser, Chromium
from tests.support.console_browsing import await_login, log_in, press, record_reports, visit
from tests.support.console_pages import EMPTY_PAGES, PAGES, fill_pages
from tests.support.console_threads import ConsoleThread
from tests.support.console_usability import is_readable, is_usable, one_window, page_windows
from tests.support.consoles import TOKENS, write_tokens
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

KEYS = HandlerKeys("shop", "pay", "orders")
HOUR_MS = 3_600_000.0


@pytest.fixture
def console(client: Client, tmp_path: Path) -> Iterator[ConsoleThread]:
    fill_pages(client)
    with ConsoleThread(client.url, write_tokens(tmp_path), renew_ms=HOUR_MS) as started:
        yield started


def test_an_operator_logs_in_and_unparks_a_key_by_forms(
    console: ConsoleThread, client: Client, chromium: Chromium
) -> None:
    with Browser(f"{console.url}/", chromium) as browser:
        log_in(browser, "operate")
        visit(browser, f"{console.url}/key?handler=shop.pay&stream=orders&key=parked+x")
        press(browser, "form[action='/key/unpark'] button", "The key goes on.")
        assert count_parked(client, [KEYS])[0] == 0
        assert AuditLog(client).read()[0].action == "key unpark"
        assert browser.run("document.cookie") == "", "no script can read a cookie"
        press(browser, "form[action='/logout'] button", "Token")


@contextmanager
def other_site(html: str) -> Iterator[str]:
    """The address of a page of another site: to a browser, `localhost` is another one than 127.0.0.1."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(FAIL_SAFE_S)


def test_a_link_of_another_site_shows_its_page_and_a_form_of_one_changes_nothing(
    console: ConsoleThread, client: Client, chromium: Chromium
) -> None:
    page = f"{console.url}/key?handler=shop.pay&amp;stream=orders&amp;key=parked+x"
    fields = {"handler": "shop.pay", "stream": "orders", "key": "parked x"}
    inputs = "".join(f'<input name="{name}" value="{value}">' for name, value in fields.items())
    html = f'<a href="{page}">the key</a><form method="post" action="{console.url}/key/unpark">{inputs}<button>Go</button></form>'
    with other_site(html) as site, Browser(f"{console.url}/", chromium) as browser:
        log_in(browser, "operate")
        there = f"document.readyState === 'complete' && location.href === {site!r} && document.links.length"
        for selector, until in (("a", "Key parked x of shop.pay"), ("button", "pages of other origins may not")):
            browser.run(f"window.location.href = {site!r}; 0")
            eventually(lambda: browser.run(f"Boolean({there})"), "the page of the other site")
            press(browser, selector, until)
            if selector == "button":
                assert count_parked(client, [KEYS])[0] == 1
        visit(browser, page.replace("&amp;", "&"))
        press(browser, "form[action='/key/unpark'] button", "The key goes on.")


def test_each_page_keeps_its_policy_fits_its_window_has_contrast_and_labels_passes_axe_and_is_reached_by_tab(
    console: ConsoleThread, chromium: Chromium
) -> None:
    assert {urlsplit(path).path for path in PAGES} == {one.path for one in views.PAGES if one.method == "GET"}
    axe = Axe()
    with Browser(f"{console.url}/", chromium) as browser:
        await_login(browser)
        is_readable(browser, axe, "the login")
        record_reports(browser)
        log_in(browser, "admin")
        for number, path in enumerate(PAGES):
            visit(browser, f"{console.url}{path}")
            is_usable(browser, axe, path, page_windows(number))
        visit(browser, f"{console.url}/handler?name=none.none", shows="main")
        is_readable(browser, axe, "a page that is not there")
        visit(browser, f"{console.url}/letters?handler=shop.pay")
        visit(browser, browser.run("document.querySelector('tbody th a').href"), shows="input[name=letter]")
        is_usable(browser, axe, "a group of dead letters")
        press(browser, ".actions button:not([name])", "Yes, do it")
        press(browser, "form[action='/letters/redrive'] button", "1 dead letter redriven.")
        is_usable(browser, axe, "the page after a redrive")


@pytest.mark.skipif(
    not os.environ.get("MILLSTREAM_SOAK"), reason="the pages of an admin have more of the same on them: make soak"
)
@pytest.mark.parametrize("level", ["figures", "payloads"])
def test_each_page_is_as_usable_at_its_lowest_level(level: str, console: ConsoleThread, chromium: Chromium) -> None:
    lowest = {one.path: one.level.word for one in views.PAGES if one.method == "GET"}
    shown = [path for path in PAGES if lowest[urlsplit(path).path] == level]
    assert len(shown) >= 6
    axe = Axe()
    with Browser(f"{console.url}/", chromium) as browser:
        record_reports(browser)
        log_in(browser, level)
        for number, path in enumerate(shown):
            visit(browser, f"{console.url}{path}")
            is_usable(browser, axe, path, one_window(number))


def test_each_page_is_as_usable_while_redis_is_empty_and_its_viewer_has_the_longest_name(
    client: Client, tmp_path: Path, chromium: Chromium
) -> None:
    axe, tokens = Axe(), tmp_path / "tokens"
    tokens.write_text(f"{TOKENS['admin']} admin name={'x' * 64}\n")
    with (
        ConsoleThread(client.url, tokens, renew_ms=HOUR_MS) as console,
        Browser(f"{console.url}/", chromium) as browser,
    ):
        record_reports(browser)
        log_in(browser, "admin")
        for number, path in enumerate(EMPTY_PAGES):
            visit(browser, f"{console.url}{path}")
            is_usable(browser, axe, path, one_window(number))


def test_the_keyboard_reaches_the_content_first_and_its_place_is_visible(
    console: ConsoleThread, chromium: Chromium
) -> None:
    with Browser(f"{console.url}/", chromium) as browser:
        log_in(browser, "payloads")
        first = browser.run("document.querySelector('a, button, input').className")
        assert first == "skip"
        browser.run("document.querySelector('nav a').focus({focusVisible: true}); 0")
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_axe_finds_a_field_without_a_name_and_text_that_is_faint(console: ConsoleThread, chromium: Chromium) -> None:
    axe = Axe()
    with Browser(f"{console.url}/", chromium) as browser:
        log_in(browser, "figures")
        spoil = "document.querySelector('.find input').removeAttribute({!r}); 0"
        for name in ("aria-label", "placeholder"):
            browser.run(spoil.format(name))
        browser.run("document.querySelector('h1').style.color = '#ccc'; 0")
        rules = {one.partition(":")[0] for one in axe.violations(browser)}
        assert rules == {"label", "color-contrast"}


def test_a_page_is_written_as_a_picture_for_each_window(
    console: ConsoleThread, chromium: Chromium, tmp_path: Path
) -> None:
    (folder := tmp_path / "pictures").mkdir()
    with Browser(f"{console.url}/", chromium) as browser:
        await_login(browser)
        take(browser, folder, name_of("/delayed?stream=orders"))
    sizes = {one.name: struct.unpack(">II", one.read_bytes()[16:24]) for one in folder.iterdir()}
    assert {name: width for name, (width, _) in sizes.items()} == {
        f"delayed-stream-orders-{width}-{colours}.png": width for width in (390, 1_440) for colours in ("light", "dark")
    }
    assert all(height >= 900 for _, height in sizes.values()), "the window at least"
