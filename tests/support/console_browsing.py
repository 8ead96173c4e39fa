"""What a user does in a browser on the pages of a console: visits them, logs in, presses buttons and keys."""

from tests.support.accessibility import press_key
from tests.support.browser import Browser
from tests.support.consoles import TOKENS
from tests.support.waiting import eventually

_REPORTS = """
window.reports = []
addEventListener('securitypolicyviolation', one => window.reports.push(one.violatedDirective + ' ' + one.blockedURI))
"""


def record_reports(browser: Browser) -> None:
    """Let each page that is loaded from now on keep what its content security policy forbids, in `window.reports`."""
    browser.command("Page.enable")
    browser.command("Page.addScriptToEvaluateOnNewDocument", source=_REPORTS)


def visit(browser: Browser, url: str, shows: str = "nav") -> None:
    """Go to a page, and wait until it is loaded and shows an element."""
    browser.run(f"window.isLeft = true; window.location.href = {url!r}; 0")  # it may have this address, too
    there = f"!window.isLeft && document.readyState === 'complete' && window.location.href === {url!r}"
    there += f" && document.querySelector({shows!r})"
    eventually(lambda: browser.run(f"Boolean({there})"), f"the page {url}", log=lambda: shown(browser))


def shown(browser: Browser) -> object:
    """The text that the browser shows."""
    return browser.run("document.body.innerText")


def press(browser: Browser, selector: str, until: str) -> None:
    """Press a button, and wait for a page that contains a text."""
    browser.run(f"document.querySelector({selector!r}).click(); 0")
    await_text(browser, until)


def await_text(browser: Browser, until: str) -> None:
    """Wait for a page that contains a text."""
    eventually(
        lambda: browser.run(f"document.readyState === 'complete' && document.body.innerText.includes({until!r})"),
        f"a page with {until!r}",
    )


def await_login(browser: Browser) -> None:
    """Wait for the login form."""
    eventually(lambda: browser.run("document.readyState === 'complete' && document.forms.length"), "the login form")


def log_in(browser: Browser, level: str) -> None:
    """Log in with the token of a level."""
    await_login(browser)
    browser.run(f"document.getElementById('token').value = {TOKENS[level]!r}; 0")
    press(browser, "button", "Attention")


def reach(browser: Browser, selector: str) -> None:
    """Press Tab until this element has the focus."""
    browser.command("Emulation.setFocusEmulationEnabled", enabled=True)
    for _ in range(100):
        if browser.run(f"document.activeElement.matches({selector!r})"):
            return
        press_key(browser, "Tab")
    raise AssertionError(f"Tab does not reach {selector}")
