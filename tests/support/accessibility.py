"""axe-core in the browser of the tests: what it finds on a page against WCAG 2, and what the keyboard reaches there."""

import json
from importlib import resources
from importlib.util import find_spec
from typing import Any

from tests.support.browser import Browser
from tests.support.requirements import skip_without

_PACKAGE = "axe_core_python"

_FOUND = """
axe.run(document, {{runOnly: {rules}}}).then(found =>
    found.violations.flatMap(one => one.nodes.map(node => `${{one.id}}: ${{node.html.slice(0, 200)}} ${{node.failureSummary}}`)))
"""
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
_OF_COLOURS = ["color-contrast", "link-in-text-block"]

_FOCUSABLE = """
(() => {
    const all = 'a[href], button, summary, textarea, select, input:not([type=hidden]), [tabindex="0"]'
    const shown = Array.from(document.querySelectorAll(all)).filter(one => one.checkVisibility())
    shown.forEach((one, at) => one.dataset.place = at)
    return shown.map(one => one.outerHTML.slice(0, 200))
})()
"""
"""The elements that a page has for its users, each with its number."""


class Axe:
    """The rules of axe-core for WCAG 2.1, levels A and AA, and its best practices. Requires axe-core-python."""

    def __init__(self) -> None:
        skip_without(find_spec(_PACKAGE), "axe-core-python is not installed: make setup")
        self._script = resources.files(_PACKAGE).joinpath("axe.min.js").read_text("utf-8")

    def violations(self, browser: Browser, *, only_colours: bool = False) -> Any:
        """What the rules find on the page that the browser shows; `only_colours`: those that depend on its colours."""
        if not browser.run("Boolean(window.axe)"):
            browser.run(f"{self._script}; 0")
        return browser.run(_FOUND.format(rules=json.dumps(_OF_COLOURS if only_colours else _RULES)))


def press_key(browser: Browser, name: str) -> None:
    """Press a key: Tab, Enter or Space."""
    key, code, text = {"Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), "Space": (" ", 32, " ")}[name]
    for kind in ("keyDown", "keyUp"):
        browser.command("Input.dispatchKeyEvent", type=kind, key=key, code=name, text=text, windowsVirtualKeyCode=code)


def unreached(browser: Browser) -> list[str]:
    """The elements of the page for its users that Tab does not reach, however often it is pressed."""
    browser.command("Emulation.setFocusEmulationEnabled", enabled=True)
    elements = browser.run(_FOCUSABLE)
    left = {str(at): one for at, one in enumerate(elements)}
    browser.run(
        "window.reached = []; addEventListener('focusin', one => window.reached.push(one.target.dataset.place)); 0"
    )
    for _ in range(2):
        for _ in range(len(elements) + 5):
            press_key(browser, "Tab")
        for place in browser.run("window.reached.splice(0)"):
            left.pop(place, None)
        if not left:
            break
    return [*left.values()]
