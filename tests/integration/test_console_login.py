"""Logging in to the console and out of it: how a session ends, and how many tokens may be guessed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from httpx import Response

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import ended_sessions_key
from millstream.services.console import console_app
from millstream.services.console.app import ConsoleParts, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.guard import make_guard
from millstream.services.console.login_limits import LoginLimits
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rights import ConsoleTokens
from millstream.services.console.sessions import FORM_COOKIE, KNOWN_COOKIE, SESSION_COOKIE
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from tests.support.consoles import Browser, client_of, console, write_tokens

pytestmark = [pytest.mark.cli]


@contextmanager
def copy_of(browser: Browser, url: str, folder: Path) -> Iterator[Browser]:
    """A browser with copies of the cookies of another one, at a console that starts now and has the same tokens."""
    with client_of(console_app(url, token_file=folder / "tokens")) as http:
        for name in (SESSION_COOKIE, FORM_COOKIE):
            http.cookies.set(name, str(browser.http.cookies.get(name)), domain="127.0.0.1", path="/")
        yield Browser(http)


@contextmanager
def console_at(now_s: Callable[[], float], url: str, folder: Path) -> Iterator[Browser]:
    """A console whose limits of guesses have this clock."""
    tokens, clients = ConsoleTokens(), ClientPool(url)
    tokens.read(write_tokens(folder))
    guard = replace(make_guard(clients, tokens, None), limits=LoginLimits(monotonic=now_s))
    names, redrives = StreamNames(url), RedriveThreads(url)
    ranking = StreamRanking(url, names)
    parts = ConsoleParts(clients=clients, guard=guard, names=names, ranking=ranking, redrives=redrives)
    with client_of(make_console(parts)) as http:
        yield Browser(http)


def test_a_session_that_is_logged_out_ends_for_copies_of_its_cookie_on_every_console(
    client: Client, tmp_path: Path
) -> None:
    with (
        console(client.url, tmp_path, "operate") as browser,
        console(client.url, tmp_path, "operate") as other,
        copy_of(browser, client.url, tmp_path) as copy,
    ):
        page = copy.get("/redis")
        assert page.url.endswith("/redis")
        assert browser.send(browser.get("/"), "/logout").url.endswith("/login")
        assert copy.get("/redis").url.endswith("/login")
        assert copy.send(page, "/logout").url.endswith("/login")
        fields = {"form_token": page.form("/logout")["form_token"], "name": "shop.pay"}
        assert copy.post("/handler/pause", **fields).status == 401
        with copy_of(copy, client.url, tmp_path) as later:
            assert later.get("/redis").url.endswith("/login")
        assert other.get("/redis").url.endswith("/redis"), "another session of the same token goes on"


def test_sessions_that_have_ended_are_kept_until_their_time_is_over(client: Client, tmp_path: Path) -> None:
    client.execute("ZADD", ended_sessions_key(), 1_000, "of long ago")
    with console(client.url, tmp_path, "operate") as browser:
        browser.send(browser.get("/"), "/logout")
    assert client.execute("ZCARD", ended_sessions_key()) == 1
    assert client.execute("ZSCORE", ended_sessions_key(), "of long ago") is None


def test_a_session_sees_figures_alone_while_redis_cannot_say_whether_it_has_ended(tmp_path: Path) -> None:
    with EmbeddedServer() as server, console(server.url, tmp_path, "admin") as browser:
        page = browser.get("/")
        assert browser.get("/audit").status == 200
        server.stop()
        assert ": figures" in browser.get("/").text
        assert browser.get("/audit").status == 403
        assert browser.send(page, "/logout").status == 503
        server.start()
        assert browser.send(page, "/logout").url.endswith("/login")


def test_a_session_keeps_its_level_where_redis_has_closed_connections_that_were_idle(
    client: Client, tmp_path: Path
) -> None:
    with console(client.url, tmp_path, "admin") as browser:
        for _ in range(3):
            assert browser.get("/audit").status == 200
            client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def test_sessions_are_refused_where_redis_refuses_to_say_whether_they_have_ended(
    client: Client, tmp_path: Path
) -> None:
    with console(client.url, tmp_path, "admin") as browser:
        client.execute("SET", ended_sessions_key(), "x")
        page = browser.get("/")
        assert (page.status, "Redis: " in page.text) == (503, True)


def test_tokens_are_guessed_neither_by_the_form_nor_as_bearer_tokens(client: Client, tmp_path: Path) -> None:
    now_s = 0.0
    with console_at(lambda: now_s, client.url, tmp_path) as browser:

        def guess(n: int, **headers: str) -> Response:
            if n % 2:
                form = browser.get("/login").form("/login")
                return browser.http.post("/login", data={**form, "token": f"guess {n}"}, headers=headers)
            return browser.http.get("/redis", headers={"Authorization": f"Bearer guess {n}", **headers})

        assert [guess(n).status_code for n in range(5)] == [401] * 5
        assert [guess(n).status_code for n in range(5)] == [401] * 5, "the same tokens again"
        for n in (5, 6):
            refused = guess(n)
            assert (refused.status_code, "try again in 1 s" in refused.text) == (429, True)
            assert refused.headers["retry-after"] == "1"
        assert browser.log_in("figures").status == 429, "a valid token is a guess, too"
        assert guess(7, **{"X-Forwarded-For": "203.0.113.9"}).status_code == 401, "another client of the proxy"
        now_s = 1.0
        assert browser.log_in("figures").status == 200


def test_guesses_of_strangers_keep_no_browser_out_that_has_logged_in_before(client: Client, tmp_path: Path) -> None:
    with console_at(lambda: 0.0, client.url, tmp_path) as browser:
        browser.send(browser.log_in("operate"), "/logout")
        known = browser.http.cookies.get(KNOWN_COOKIE)
        browser.http.cookies.delete(KNOWN_COOKIE)
        for n in range(6):
            browser.http.get("/redis", headers={"Authorization": f"Bearer guess {n}"})
        browser.http.cookies.set(KNOWN_COOKIE, "0" * 64, domain="127.0.0.1", path="/")
        assert browser.log_in("operate").status == 429, "a forged cookie"
        browser.http.cookies.set(KNOWN_COOKIE, str(known), domain="127.0.0.1", path="/")
        assert browser.get("/").url.endswith("/login"), "it opens no page"
        assert browser.log_in("operate").status == 200
