"""What each page of the console keeps for its users, whatever their window, colours, keyboard and screen reader."""

from tests.support.accessibility import Axe, unreached
from tests.support.browser import Browser

WINDOWS = tuple((width, dark) for width in (390, 1_440) for dark in (False, True))
"""Their widths in pixels, and whether the user prefers dark colours."""

_FAINT = """
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

_UNLABELLED = """
Array.from(document.querySelectorAll('input:not([type=hidden]), textarea'))
    .filter(one => !one.labels.length && !one.getAttribute('aria-label')).map(one => one.outerHTML)
"""
"""The fields of forms that a screen reader cannot name."""

_WITHOUT_BUTTON = "Array.from(document.forms).filter(one => !one.querySelector('button')).map(one => one.action)"


def is_usable(browser: Browser, axe: Axe, name: str) -> None:
    """The page keeps its policy and fits its window, and each part of it has a name, contrast and a place for Tab."""
    assert browser.run("window.reports") == [], name
    _fits(browser, name)
    assert browser.run("getComputedStyle(document.querySelector('nav ul')).listStyleType") == "none", name
    assert browser.run(_UNLABELLED) == [], name
    assert browser.run(_WITHOUT_BUTTON) == [], name
    assert unreached(browser) == [], name
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true }); 0")
    assert violations(browser, axe) == {}, name


def _fits(browser: Browser, path: str) -> None:
    """The page is no wider than its window, narrow or wide, and its text has enough contrast, light and dark."""
    for width, dark in WINDOWS:
        browser.show(width=width, dark=dark)
        assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") == dark
        assert browser.run("window.innerWidth") == width
        assert browser.run("document.documentElement.scrollWidth") <= width, path
        assert browser.run(_FAINT) == [], path


def violations(browser: Browser, axe: Axe) -> dict[str, object]:
    """What axe finds on the page, light and dark."""
    found: dict[str, object] = {}
    for width, dark in WINDOWS:
        browser.show(width=width, dark=dark)
        if one := axe.violations(browser):
            found["dark" if dark else "light"] = one
    return found
