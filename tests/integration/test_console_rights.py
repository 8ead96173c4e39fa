"""Every route of the console for every viewer: however the console knows them, their level decides, and nothing else."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.services.console import Level
from millstream.services.console.app import ConsoleParts, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.guard import make_guard
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rights import ConsoleTokens
from millstream.services.console.sessions import FORM_COOKIE, SESSION_COOKIE, form_token
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.console.views import PAGES
from tests.support.console_forms import FORMS
from tests.support.consoles import WAYS, Browser, authorized, client_of, console

pytestmark = [pytest.mark.cli]

OPEN = ("/console.css", "/console.js", "/healthz")
LEVELS = {one.path: one.level for one in PAGES if one.method == "POST"}
"""The level of each form: another test states the levels of all routes a second time."""


@contextmanager
def without_tokens(url: str) -> Iterator[Browser]:
    """A console that requires no token, as it serves this machine."""
    clients = ClientPool(url)
    guard = make_guard(clients, ConsoleTokens(), None)
    names, redrives = StreamNames(url), RedriveThreads(url)
    ranking = StreamRanking(url, names)
    parts = ConsoleParts(clients=clients, guard=guard, names=names, ranking=ranking, redrives=redrives)
    with client_of(make_console(parts)) as http:
        yield Browser(http)


@contextmanager
def unknown_token(url: str, folder: Path) -> Iterator[Browser]:
    """A program whose token is not in the file."""
    with console(url, folder) as browser:
        browser.http.headers["Authorization"] = "Bearer 0123456789abcdef-unknown"
        yield browser


def viewer(way: str, level: Level | None, url: str, folder: Path) -> AbstractContextManager[Browser]:
    """A viewer of this level; None: a viewer without any level."""
    if way == "no token":
        return without_tokens(url)
    if level is not None:
        return WAYS[way](url, folder, level)
    return authorized(url, None) if way == "authorize" else unknown_token(url, folder)


def own_form_token(browser: Browser) -> str:
    """What each form of this browser carries."""
    browser.get("/")
    cookies = browser.http.cookies
    return form_token(cookies.get(FORM_COOKIE) or "", cookies.get(SESSION_COOKIE) or "")


VIEWERS: list[tuple[str, Level | None]] = [
    *((way, level) for way in WAYS if way != "session" for level in Level),  # those of sessions another test tries
    ("no token", Level.PAYLOADS),
    ("bearer token", None),
    ("authorize", None),
]


@pytest.mark.parametrize(("way", "level"), VIEWERS)
def test_a_route_answers_viewers_of_its_level_and_above_however_they_are_known(
    way: str, level: Level | None, client: Client, tmp_path: Path
) -> None:
    with viewer(way, level, client.url, tmp_path) as browser:
        token = own_form_token(browser)
        for page in PAGES:
            sent = {"form_token": token} if page.method == "POST" else None
            answer = browser.http.request(page.method, page.path, data=sent)
            if level is None:
                assert answer.status_code == 401, page.path
            elif level < page.level:
                assert (answer.status_code, f"needs the level {page.level.word}" in answer.text) == (403, True)
            else:
                assert answer.status_code in (200, 400, 404), page.path
        assert {browser.get(path).status for path in OPEN} == {200}


def below(level: Level) -> list[tuple[str, Level]]:
    """Viewers of the level below this one."""
    lower = Level(level - 1)
    return [*((way, lower) for way in WAYS), *([("no token", Level.PAYLOADS)] if level > Level.PAYLOADS else [])]


def test_a_form_as_an_admin_fills_it_in_changes_nothing_for_viewers_below_its_level(
    client: Client, tmp_path: Path
) -> None:
    known: dict[tuple[str, Level], tuple[Browser, str]] = {}
    next(iter(FORMS.values())).prepare(client)  # the console keeps the overview, which a login shows, for two seconds
    with ExitStack() as stack, console(client.url, tmp_path, "admin") as admin:
        for path, level in LEVELS.items():
            client.execute("FLUSHALL")
            FORMS[path].prepare(client)
            fields = FORMS[path].filled_in(admin, path)
            before = dumps(client)
            for one in below(level):
                if one not in known:
                    browser = stack.enter_context(viewer(*one, client.url, tmp_path))
                    known[one] = (browser, own_form_token(browser))
                browser, token = known[one]
                answer = browser.post(path, **{**fields, "form_token": token})
                assert (answer.status, "needs the level" in answer.text) == (403, True), (path, one)
            assert dumps(client) == before, path
    assert len(known) == 10


def dumps(client: Client) -> dict[bytes, bytes]:
    """All that Redis holds."""
    return {name: client.execute("DUMP", name) for name in client.execute("KEYS", "*")}
