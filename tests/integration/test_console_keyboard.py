"""The console without a mouse, and without JavaScript, in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.admin.key_queues import count_parked
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.accessibility import press_key
from tests.support.browser import Browser, Chromium
from tests.support.console_browsing import (
    await_login,
    await_text,
    follow,
    log_in,
    press_at,
    reach,
    type_into,
    visit,
)
from tests.support.console_pages import PAGES, fill_pages
from tests.support.console_threads import ConsoleThread
from tests.support.consoles import TOKENS, write_tokens
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

KEYS = HandlerKeys("shop", "pay", "orders")
HOUR_MS = 3_600_000.0
LETTERS = "/letters?handler=shop.pay"
FAILING = "/key?handler=shop.pay&stream=orders&key=failing+x"
IS_RUN = "!(document.getElementById('renewal') ?? {hidden: true}).hidden"
"""Whether the script of the page has run, which shows the button that holds its figures."""


@pytest.fixture
def console(client: Client, tmp_path: Path) -> Iterator[ConsoleThread]:
    fill_pages(client)
    with ConsoleThread(client.url, write_tokens(tmp_path), renew_ms=HOUR_MS) as started:
        yield started


def actions(client: Client) -> list[str]:
    """The actions of the console, the oldest first."""
    return [one.action for one in reversed(AuditLog(client).read()) if one.by != "ann"]


def test_an_operator_does_an_action_of_each_kind_by_keyboard_alone(
    console: ConsoleThread, client: Client, chromium: Chromium
) -> None:
    with Browser(f"{console.url}/", chromium) as browser:
        await_login(browser)
        reach(browser, "#token")
        browser.command("Input.insertText", text=TOKENS["admin"])
        press_key(browser, "Enter")
        await_text(browser, "Attention")
        # a link, a field, and a form that Enter sends from its field
        press_at(browser, "main a[href='/handler?name=shop.pay']", "Enter", until="Settings in force")
        reach(browser, "#rate")
        browser.command("Input.insertText", text="60/m")
        press_key(browser, "Enter")
        await_text(browser, "The rate is set")
        # a button of a form without fields
        press_at(browser, "form[action='/handler/rate/clear'] button", "Enter", until="The rate in code holds again.")
        # rows that are ticked
        press_at(browser, "nav a[href='/stuck']", "Enter", until="Unpark the selected")
        reach(browser, "input[type=checkbox]")
        press_key(browser, "Space")
        assert browser.run("document.activeElement.checked") is True
        press_at(browser, "form[action='/stuck/unpark'] button", "Space", until="The selected keys go on.")
        assert count_parked(client, [KEYS])[0] == 0
        # a question
        visit(browser, f"{console.url}{FAILING}")
        press_at(browser, "form[action='/key/skip'] button", "Space", until="becomes a dead letter")
        press_at(browser, "main button.grave", "Enter", until="The first message is a dead letter now.")
        # a page of fields, and its question
        visit(browser, f"{console.url}{LETTERS}")
        press_at(browser, "td a[href*='id=2-0']", "Enter", until="Edit and redrive it")
        press_at(browser, "a[href^='/letter/edit']", "Enter", until="A copy with these fields")
        reach(browser, "textarea")
        browser.command("Input.insertText", text="put right")
        press_at(browser, "main form button", "Space", until="Yes, do it")
        press_at(browser, "main button.grave", "Enter", until="redriven")
        # a question that has to be answered in writing
        visit(browser, f"{console.url}{LETTERS}")
        press_at(browser, "form[action='/letters/purge'] button", "Enter", until="Yes, do it")
        reach(browser, "#confirm")
        browser.command("Input.insertText", text="2")  # that of the copy stays until the copy is committed
        press_key(browser, "Enter")
        await_text(browser, "2 dead letters purged.")
        # what opens and closes
        visit(browser, f"{console.url}/")
        reach(browser, "summary")
        press_key(browser, "Space")
        assert browser.run("document.querySelector('details').open") is True
    assert actions(client) == ["rate set", "rate clear", "key unpark", "key skip", "dlq edit", "dlq purge"]
    ((_, added),) = client.execute("XREVRANGE", "orders", "+", "-", "COUNT", 1)
    assert b"put rightx" in added


def test_each_page_opens_and_an_action_works_while_the_browser_runs_no_script(
    console: ConsoleThread, client: Client, chromium: Chromium
) -> None:
    with Browser(f"{console.url}/", chromium) as browser:
        browser.command("Emulation.setScriptExecutionDisabled", value=True)
        log_in(browser, "admin")
        for path in PAGES:
            visit(browser, f"{console.url}{path}")
            assert browser.run("document.querySelector('main h1').checkVisibility()"), path
            assert browser.run(IS_RUN) is False, path
        visit(browser, f"{console.url}/handler?name=shop.pay")
        type_into(browser, "#rate", "60/m")
        follow(browser, "form[action='/handler/rate'] button")
        assert actions(client) == ["rate set"]
        follow(browser, "form[action='/handler/rate/clear'] button")
        assert "The rate in code holds again." in browser.run("document.querySelector('main').innerText")
        browser.command("Emulation.setScriptExecutionDisabled", value=False)
        visit(browser, f"{console.url}/")
        eventually(lambda: browser.run(IS_RUN), "the script, which is run again")
