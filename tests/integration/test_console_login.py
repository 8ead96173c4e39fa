"""Logging in and out of the console: how a session ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import ended_sessions_key
from millstream.services.console import console_app
from millstream.services.console.sessions import FORM_COOKIE, SESSION_COOKIE
from tests.support.consoles import Browser, client_of, console

pytestmark = [pytest.mark.cli]


@contextmanager
def copy_of(browser: Browser, url: str, folder: Path) -> Iterator[Browser]:
    """A browser with copies of the cookies of another one, at a console that starts now and has the same tokens."""
    with client_of(console_app(url, token_file=folder / "tokens")) as http:
        for name in (SESSION_COOKIE, FORM_COOKIE):
            http.cookies.set(name, str(browser.http.cookies.get(name)), domain="127.0.0.1", path="/")
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


def test_sessions_are_refused_where_redis_refuses_to_say_whether_they_have_ended(
    client: Client, tmp_path: Path
) -> None:
    with console(client.url, tmp_path, "admin") as browser:
        client.execute("SET", ended_sessions_key(), "x")
        page = browser.get("/")
        assert (page.status, "Redis: " in page.text) == (503, True)
