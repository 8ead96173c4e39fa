"""The console in a real browser: it logs in and acts by forms, and is readable at each width, light and dark."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.admin.figure_history import STEP_MS, FigureHistory, read_sample
from millstream.admin.key_queues import count_parked
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console import views
from tests.support.accessibility import Axe, press_key, unreached
from tests.support.browser import Browser, Chromium
from tests.support.console_browsing import await_login, await_text, log_in, press, reach, record_reports, visit
from tests.support.console_threads import ConsoleThread
from tests.support.consoles import TOKENS, add_output, fill_with, write_tokens
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

KEYS = HandlerKeys("shop", "pay", "orders")
HOUR_MS = 3_600_000.0
PAGES = (
    *(
        "/",
        "/stuck",
        "/handlers",
        "/handler?name=shop.pay",
        "/key?handler=shop.pay&key=parked+x",
        "/letters?handler=shop.pay",
        "/streams",
    ),
    *("/stream?name=orders", "/workers", "/queries", "/delayed", "/delayed?stream=orders", "/redis", "/audit"),
    *(
        "/tail?name=orders",
        "/find?q=o",
        "/group?stream=orders&group=readers",
        "/letter?handler=shop.pay&stream=orders&id=2-0",
        "/letter/edit?handler=shop.pay&stream=orders&id=2-0",
    ),
)

FAINT = """
(() => {
    const parse = text => text.match(/[\\d.]+/g).map(Number)
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(one => one / 255).map(one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4)
        return .2126 * x + .7152 * y + .0722 * z
    }
    const ground = one => {
        for (; one; one = one.parentElement) {
            const color = parse(getComputedStyle(one).backgroundColor)
            if (color.length < 4 || color[3] > 0) return color
        }
        return parse(getComputedStyle(document.body).backgroundColor)
    }
    const found = []
    for (const one of document.querySelectorAll('body *')) {
        const own = Array.from(one.childNodes).some(node => node.nodeType === 3 && node.textContent.trim())
        if (!own) continue
        const sides = [light(parse(getComputedStyle(one).color)), light(ground(one))].sort((a, b) => b - a)
        if ((sides[0] + .05) / (sides[1] + .05) < 4.5) found.push(one.outerHTML.slice(0, 100))
    }
    return found
})()
"""
"""The elements whose text has less than the contrast that WCAG AA asks for, 4.5:1."""


UNLABELLED = """
Array.from(document.querySelectorAll('input:not([type=hidden]), textarea'))
    .filter(one => !one.labels.length && !one.getAttribute('aria-label')).map(one => one.outerHTML)
"""
"""The fields of forms that a screen reader cannot name."""

WITHOUT_BUTTON = "Array.from(document.forms).filter(one => !one.querySelector('button')).map(one => one.action)"

WINDOWS = ((390, False), (1_440, True))
"""Their widths in pixels, and whether the user prefers dark colours."""


@pytest.fixture
def console(client: Client, tmp_path: Path) -> Iterator[ConsoleThread]:
    fill_with(client, "x")
    add_output(client, "x")
    Group(client, "orders", "readers").create()
    ((_, letter),) = client.execute("XRANGE", KEYS.dead_letters, "-", "+")
    client.execute("DEL", KEYS.dead_letters)
    client.execute("XADD", KEYS.dead_letters, "2-0", *letter)
    for minutes in (40, 3, 2):
        at_ms = server_time_ms(client) - minutes * STEP_MS
        FigureHistory(client).add(read_sample(client, at_ms))
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
        assert violations(browser, axe) == {}
        record_reports(browser)
        log_in(browser, "admin")
        for path in PAGES:
            visit(browser, f"{console.url}{path}")
            is_usable(browser, axe, path)
        visit(browser, f"{console.url}/handler?name=none.none", shows="main")
        assert violations(browser, axe) == {}, "a page that is not there"
        visit(browser, f"{console.url}{PAGES[4]}")
        press(browser, "form[action='/key/reset'] button", "Yes, do it")
        is_usable(browser, axe, "a confirmation")
        visit(browser, f"{console.url}/letters?handler=shop.pay")
        visit(browser, browser.run("document.querySelector('tbody th a').href"), shows="input[name=letter]")
        is_usable(browser, axe, "a group of dead letters")
        press(browser, ".actions button:not([name])", "Yes, do it")
        is_usable(browser, axe, "the question of a redrive, with a field for a rate")
        press(browser, "form[action='/letters/redrive'] button", "1 dead letter redriven.")
        is_usable(browser, axe, "the page after a redrive")


def is_usable(browser: Browser, axe: Axe, name: str) -> None:
    """The page keeps its policy and fits its window, and each part of it has a name, contrast and a place for Tab."""
    assert browser.run("window.reports") == [], name
    fits(browser, name)
    assert browser.run("getComputedStyle(document.querySelector('nav ul')).listStyleType") == "none", name
    assert browser.run(UNLABELLED) == [], name
    assert browser.run(WITHOUT_BUTTON) == [], name
    assert unreached(browser) == [], name
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true }); 0")
    assert violations(browser, axe) == {}, name


def fits(browser: Browser, path: str) -> None:
    """The page is no wider than its window, narrow or wide, and its text has enough contrast, light and dark."""
    for width, dark in WINDOWS:
        browser.show(width=width, dark=dark)
        assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") == dark
        assert browser.run("window.innerWidth") == width
        assert browser.run("document.documentElement.scrollWidth") <= width, path
        assert browser.run(FAINT) == [], path


def violations(browser: Browser, axe: Axe) -> dict[str, object]:
    """What axe finds on the page, light and dark."""
    found: dict[str, object] = {}
    for width, dark in WINDOWS:
        browser.show(width=width, dark=dark)
        if one := axe.violations(browser):
            found["dark" if dark else "light"] = one
    return found


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


def test_an_operator_logs_in_and_unparks_a_key_by_keyboard(
    console: ConsoleThread, client: Client, chromium: Chromium
) -> None:
    with Browser(f"{console.url}/", chromium) as browser:
        await_login(browser)
        reach(browser, "#token")
        browser.command("Input.insertText", text=TOKENS["operate"])
        press_key(browser, "Enter")
        await_text(browser, "Attention")
        visit(browser, f"{console.url}/key?handler=shop.pay&stream=orders&key=parked+x")
        reach(browser, "form[action='/key/unpark'] button")
        press_key(browser, "Enter")
        await_text(browser, "The key goes on.")
        assert count_parked(client, [KEYS])[0] == 0
