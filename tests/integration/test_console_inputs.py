"""Any parameters and any fields: each page of the console answers with a page, and as text what it was sent."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.services.console import Level
from millstream.services.console.views import PAGES
from tests.support.commandline import call
from tests.support.console_forms import FORMS
from tests.support.consoles import SCRIPT, Browser, authorized, fill_with, pages_reached

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

VIEWS = Path(__file__).parents[2] / "src/millstream/services/console"
SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
EXAMPLES = 600 if SOAK else 40
PARAMETERS = sorted(
    {
        found[1]
        for file in VIEWS.rglob("*.py")
        for found in re.finditer(
            r'page\.(?:wanted|name|wanted_name|field|(?:query|form)\.get)\(\s*"(\w+)"', file.read_text()
        )
    }
    | {"key"}  # by `wanted_key`
)
"""The name of each parameter and each field that a view reads."""
MARK = "<b onx=1>'\""
VALUES = st.one_of(
    st.sampled_from(
        (
            "0",
            "-1",
            "1-0",
            f"{2**64 - 1}-{2**64 - 1}",
            str(2**64 - 1),
            "0-0",
            "+",
            "-",
            "$",
            "1-",
            "9" * 30,
            "1e999",
            "nan",
            "60/m",
            "-1/s",
            "2026-02-30",
        )
    ),
    st.sampled_from((r"\x00", r"\xff", r"\x", r"\u{1}", "\x00", "\x7f", "\ud800", "\u202e", "a" * 5_000, MARK, "")),
    st.text(max_size=20),
)
Fields = tuple[tuple[str, str], ...]
CODES = {200, 303, 400, 403, 404, 405, 409, 413}
"""The answers that a page can have. An error within the console is 500."""


def is_sound(answer: httpx.Response) -> int:
    """A page with its policy, in which nothing that was sent is an element. Returns its code."""
    assert answer.status_code in CODES, (answer.request.url, answer.request.content, answer.text[-2_000:])
    assert answer.headers["content-security-policy"].startswith("default-src 'none'"), answer.request.url
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert "<b onx" not in answer.text, answer.request.url
        assert answer.text.count("<script") == answer.text.count(SCRIPT), answer.request.url
    return answer.status_code


def encoded(fields: Fields) -> str:
    return urlencode(fields, errors="surrogatepass")


def changed(usual: Sequence[Fields]) -> st.SearchStrategy[Fields]:
    """One of the usual requests in which some fields are others, or there twice, or missing."""
    odd = st.lists(st.tuples(st.sampled_from(PARAMETERS), VALUES), max_size=2)

    def change(fields: Fields, odd: Sequence[tuple[str, str]], values: Sequence[str | None]) -> Fields:
        kept = [
            (name, value if new is None else new) for (name, value), new in zip(fields, values, strict=False)
        ] + list(fields[len(values) :])
        return (*kept, *odd)

    return st.builds(change, st.sampled_from(usual), odd, st.lists(st.one_of(st.none(), st.none(), VALUES), max_size=4))


@pytest.fixture
def browser(client: Client) -> Iterator[Browser]:
    fill_with(client, "x")
    Group(client, "orders", "readers").create()
    with authorized(client.url, Level.ADMIN) as browser:
        yield browser


@pytest.mark.parametrize("path", [one.path for one in PAGES if one.method == "GET"])
def test_a_page_answers_whatever_its_parameters_are(path: str, browser: Browser) -> None:
    links = {link for page in pages_reached(browser, most=80).values() for link in page.links}
    usual = [tuple(parse_qsl(urlsplit(link).query)) for link in links if urlsplit(link).path == path]
    answered = Counter[int]()

    @settings(max_examples=EXAMPLES)
    @given(changed(usual or [()]))
    def answers(parameters: Fields) -> None:
        answered[is_sound(browser.http.get(f"{path}?{encoded(parameters)}"))] += 1

    answers()
    assert answered[200], answered


@pytest.mark.parametrize("path", [one.path for one in PAGES if one.method == "POST"])
def test_a_form_answers_whatever_its_fields_are(path: str, browser: Browser, client: Client) -> None:
    form = FORMS[path]
    if form.given:
        assert call(*shlex.split(form.given), url=client.url).code == 0
    filled_in = form.filled_in(browser, path)
    token = filled_in.pop("form_token")[0]
    usual = tuple(
        (name, value) for name, given in filled_in.items() for value in ([given] if isinstance(given, str) else given)
    )
    answered = Counter[int]()

    @settings(max_examples=EXAMPLES)
    @given(changed([usual]))
    def answers(fields: Fields) -> None:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        content = encoded((("form_token", token), *fields))
        answered[is_sound(browser.http.post(path, content=content, headers=headers))] += 1

    answers()
    assert answered[200] + answered[303], answered
    assert not answered[403], answered
    assert call("info", "shop", "--json", url=client.url).code == 0  # no field has left anything unreadable


def test_the_parameters_are_those_of_the_views() -> None:
    assert {"name", "handler", "stream", "key", "id", "after", "prefix", "rate", "confirm", "letter"} <= {*PARAMETERS}
