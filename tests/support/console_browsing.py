"""What a user does in a browser on the pages of a console: visits them, logs in, types, presses buttons and keys."""

from collections.abc import Callable

from tests.support.accessibility import press_key
from tests.support.browser import Browser
from tests.support.console_forms import Form
from tests.support.consoles import TOKENS
from tests.support.waiting import eventually

_PLACE = """
(() => {{
    const one = document.querySelector({selector})
    one.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})
    const box = one.getClientRects()[0], x = box.x + box.width / 2, y = box.y + box.height / 2
    return one.contains(document.elementFromPoint(x, y)) ? {{x, y}} : null
}})()
"""
"""Where the middle of an element is in the window; null if something covers it."""

_IS_QUESTION = "document.querySelector('main form button.grave')?.innerText === 'Yes, do it'"

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


def press_at(browser: Browser, selector: str, key: str, *, until: str) -> None:
    """Press Tab until this element has the focus, then the key, and wait for a page that contains a text."""
    reach(browser, selector)
    press_key(browser, key)
    await_text(browser, until)


def click(browser: Browser, selector: str) -> None:
    """Press the button of the mouse in the middle of an element, which nothing may cover."""
    place = browser.run(_PLACE.format(selector=repr(selector)))
    assert place, f"{selector} is covered"
    for kind in ("mousePressed", "mouseReleased"):
        browser.command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)


def follow(browser: Browser, selector: str) -> None:
    """Click on a link or a button, and wait for the page to which it leads."""
    browser.run("window.isLeft = true; 0")
    click(browser, selector)
    there = "!window.isLeft && document.readyState === 'complete' && document.querySelector('main')"
    eventually(lambda: browser.run(f"Boolean({there})"), f"the page after {selector}", log=lambda: shown(browser))


def type_into(browser: Browser, selector: str, text: str) -> None:
    """Type a text into a field, in place of what it has."""
    click(browser, selector)
    browser.run(f"document.querySelector({selector!r}).select(); 0")
    browser.command("Input.insertText", text=text)


def send_form(browser: Browser, url: str, path: str, form: Form, on_question: Callable[[], None]) -> None:
    """What `Form.send` does in a browser without a window, by mouse: at a question `on_question` is called first."""
    visit(browser, f"{url}{form.page}")
    for beginning in form.then:
        follow(browser, f"main a[href^='{beginning}']")
    for name, text in form.fields.items():
        field = f"form[action='{path}'] [name='{name}']"
        if browser.run(f"document.querySelector({field!r}).type") == "checkbox":
            click(browser, f"{field}[value='{text}']")
        else:
            type_into(browser, field, text)
    button = f"form[action='{path}'] button"
    if form.reads_only:  # the browser keeps what it gets, and the page stays
        click(browser, button)
        return
    follow(browser, button)
    if browser.run(_IS_QUESTION):
        on_question()
        if form.typed:
            type_into(browser, "#confirm", form.typed)
        follow(browser, "main button.grave")
