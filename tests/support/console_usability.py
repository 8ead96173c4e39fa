"""What each page of the console keeps for its users, whatever their window, colours, keyboard and screen reader."""

import os
from collections.abc import Sequence

from tests.support.accessibility import Axe, unreached
from tests.support.browser import Browser

Window = tuple[int, bool]
"""Its width in pixels, and whether the user prefers dark colours."""

WINDOWS: Sequence[Window] = ((390, False), (390, True), (1_440, True), (1_440, False))

_SHOWN = "[matchMedia('(prefers-color-scheme: dark)').matches, innerWidth, document.documentElement.scrollWidth]"

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
        if (!own && !one.placeholder) continue
        const color = getComputedStyle(one, one.placeholder ? '::placeholder' : null).color
        const sides = [light(parse(color)), light(ground(one))].sort((a, b) => b - a)
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


def opposite_windows(number: int) -> Sequence[Window]:
    """Both widths and both colours in two windows; two successive numbers have all four."""
    return WINDOWS[number % 2 :: 2]


def page_windows(number: int) -> Sequence[Window]:
    """The windows for a page as such: opposite ones, and with full counts (`make soak`) all four."""
    return WINDOWS if os.environ.get("MILLSTREAM_SOAK") else opposite_windows(number)


def one_window(number: int) -> Sequence[Window]:
    """One window, each in its turn: for what all windows show with more on it."""
    return WINDOWS[number % len(WINDOWS) :][:1]


def is_usable(browser: Browser, axe: Axe, name: str, windows: Sequence[Window] = WINDOWS) -> None:
    """The page keeps its policy and fits its window, and each part of it has a name, contrast and a place for Tab."""
    assert browser.run("window.reports") == [], name
    assert browser.run("getComputedStyle(document.querySelector('nav ul')).listStyleType") == "none", name
    assert browser.run(_UNLABELLED) == [], name
    assert browser.run(_WITHOUT_BUTTON) == [], name
    assert unreached(browser) == [], name
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true }); 0")
    is_readable(browser, axe, name, windows)


def is_readable(browser: Browser, axe: Axe, name: str, windows: Sequence[Window] = WINDOWS) -> None:
    """In these windows the page is no wider than they are, its text has enough contrast, and axe finds nothing.

    Once a width has had all rules of axe, its other colours have those of them that depend on colours.
    """
    widths: set[int] = set()
    for width, dark in windows:
        browser.show(width=width, dark=dark)
        is_dark, inner, needed = browser.run(_SHOWN)
        assert (is_dark, inner) == (dark, width)
        assert needed <= width, name
        assert browser.run(_FAINT) == [], name
        assert axe.violations(browser, only_colours=width in widths) == [], f"{name}, {width}, {dark=}"
        widths.add(width)
