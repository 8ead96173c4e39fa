"""What each level of the console may do, from which pages and host names, and what never leaves the process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from millstream.admin.key_queues import count_parked
from millstream.admin.value_redaction import hide_fields
from millstream.delivery.commit_store import CommitStore
from millstream.errors import ConfigError
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, audit_key
from millstream.services.console import Level, Viewer, console_app
from millstream.services.console.app import ConsoleParts, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.guard import make_guard
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rendering import render
from millstream.services.console.rights import ConsoleTokens
from millstream.services.console.secure_headers import SECURE_HEADERS
from millstream.services.console.sessions import FORM_COOKIE, SESSION_COOKIE, Sessions, form_token
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.console.views import PAGES
from tests.support.commandline import call
from tests.support.consoles import (
    BASE,
    LEVELS,
    SCRIPT,
    TOKENS,
    Browser,
    add_output,
    authorized,
    client_of,
    console,
    fill_with,
    pages_reached,
    write_tokens,
)
from tests.support.service_process import ServiceProcess, http_client
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

SECRET = "canary"
KEYS = HandlerKeys("shop", "pay", "orders")
RIGHTS = {
    ("GET", "/"): "figures",
    ("GET", "/stuck"): "payloads",
    ("POST", "/stuck/unpark"): "operate",
    ("GET", "/find"): "figures",
    ("GET", "/handlers"): "figures",
    ("GET", "/handler"): "figures",
    ("POST", "/handler/pause"): "operate",
    ("POST", "/handler/resume"): "operate",
    ("POST", "/handler/rate"): "operate",
    ("POST", "/handler/rate/clear"): "operate",
    ("GET", "/key"): "payloads",
    ("POST", "/key/park"): "operate",
    ("POST", "/key/unpark"): "operate",
    ("POST", "/key/skip"): "operate",
    ("POST", "/key/reset"): "admin",
    ("GET", "/letters"): "payloads",
    ("GET", "/letter"): "payloads",
    ("GET", "/letter/edit"): "admin",
    ("POST", "/letter/edit"): "admin",
    ("POST", "/letters/export"): "payloads",
    ("POST", "/letters/redrive"): "operate",
    ("POST", "/letters/redrive/stop"): "operate",
    ("POST", "/letters/purge"): "admin",
    ("GET", "/streams"): "figures",
    ("GET", "/stream"): "figures",
    ("GET", "/tail"): "payloads",
    ("GET", "/group"): "figures",
    ("POST", "/group/set-id"): "admin",
    ("GET", "/workers"): "figures",
    ("POST", "/workers/drain"): "admin",
    ("GET", "/queries"): "figures",
    ("GET", "/delayed"): "figures",
    ("POST", "/delayed/cancel"): "admin",
    ("GET", "/redis"): "figures",
    ("GET", "/audit"): "payloads",
}
"""The level that each page takes, stated here a second time."""

OPEN = {
    *(("GET", "/login"), ("POST", "/login"), ("POST", "/logout")),
    *(("GET", "/console.css"), ("GET", "/console.js"), ("GET", "/healthz")),
}
"""The routes that need no viewer."""

FULL = "/key?handler=shop.pay&key=parked+canary"
"""The page of a key that has everything."""


@pytest.fixture
def filled(client: Client) -> Client:
    fill_with(client, SECRET)
    add_output(client, SECRET)
    Group(client, "orders", "readers").create()
    return client


@pytest.fixture
def operator(filled: Client, tmp_path: Path) -> Iterator[Browser]:
    with console(filled.url, tmp_path, "operate") as browser:
        yield browser


# --- Levels ---


def test_every_page_is_in_the_table_of_rights() -> None:
    assert {(one.method, one.path): one.level.word for one in PAGES} == RIGHTS


def test_every_route_is_in_the_table_of_rights_or_is_open_to_all(client: Client, tmp_path: Path) -> None:
    tokens, clients = ConsoleTokens(), ClientPool(client.url)
    tokens.read(write_tokens(tmp_path))
    guard = make_guard(clients, tokens, None)
    names, redrives = StreamNames(client.url), RedriveThreads(client.url)
    ranking = StreamRanking(client.url, names)
    app = make_console(ConsoleParts(clients=clients, guard=guard, names=names, ranking=ranking, redrives=redrives))
    routes = [one for one in app.routes if isinstance(one, Route)]
    assert len(routes) == len(app.routes)
    found = {(method, one.path) for one in routes for method in (one.methods or ()) if method != "HEAD"}
    assert found == RIGHTS.keys() | OPEN


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_a_page_opens_for_its_level_and_those_above_it_alone(level: str | None, client: Client, tmp_path: Path) -> None:
    with console(client.url, tmp_path, level) as browser:
        token = browser.get("/").form("/logout")["form_token"] if level else [""]
        for (method, path), wanted in RIGHTS.items():
            answer = browser.http.request(
                method, path, data={"form_token": token} if method == "POST" else None, follow_redirects=False
            )
            if level is None:
                assert answer.status_code == (303 if method == "GET" else 401), path
                assert answer.headers.get("location", "/login") == "/login"
            elif LEVELS.index(level) < LEVELS.index(wanted):
                assert answer.status_code == 403, path
            else:
                assert answer.status_code in (200, 400, 404), path


@pytest.mark.parametrize("level", LEVELS)
def test_a_page_shows_the_forms_that_its_viewer_may_send_and_no_others(
    level: str, filled: Client, tmp_path: Path
) -> None:
    CommitStore(filled, app="shop", handler="pay").set_rate(["orders"], 1)
    with console(filled.url, tmp_path, level) as browser:
        seen = pages_reached(browser)
    assert [path for path, page in seen.items() if page.status != 200] == []
    may = LEVELS.index(level)
    allowed = {path for (method, path), one in RIGHTS.items() if method == "POST" and LEVELS.index(one) <= may}
    # a handler that is paused shows no other button than to resume it; what a key offers depends on its state
    assert {path for page in seen.values() for path in page.actions} == {"/logout"} | (allowed - {"/handler/pause"})


def test_the_figures_level_sees_nothing_that_messages_contain(filled: Client, tmp_path: Path) -> None:
    with console(filled.url, tmp_path, "payloads") as browser:
        seen = pages_reached(browser)
        assert [
            path for path in ("/key", "/letters", "/letter", "/audit") if not any(one.startswith(path) for one in seen)
        ] == []
        assert sum(SECRET in page.html for page in seen.values()) >= 8
    with console(filled.url, tmp_path, "figures") as browser:
        reached = pages_reached(browser, *seen)
        assert len(reached) >= 8
        assert [path for path, page in reached.items() if SECRET in page.html and page.status == 200] == []


def test_without_a_token_the_console_shows_this_machine_everything_and_changes_nothing(client: Client) -> None:
    with ServiceProcess(("console",), (), client.url) as started, http_client(started.url) as http:
        assert "payloads" in http.get("/").text
        assert http.get("/audit").status_code == 200
        assert http.get("/login").status_code == 404
        assert http.post("/handler/pause", data={"name": "shop.pay"}).status_code == 403
        assert http.get("/", headers={"Host": "evil.example"}).status_code == 421, "DNS rebinding"
        assert http.get("/", headers={"Host": "localhost:8080"}).status_code == 200
        assert started.stop() == 0


def test_the_console_needs_a_token_to_listen_on_other_addresses(client: Client, tmp_path: Path) -> None:
    refused = call("console", "--host", "0.0.0.0", "--port", "0", url=client.url)
    assert (refused.code, "--token-file" in refused.err) == (2, True)
    (tmp_path / "empty").write_text("# none\n")
    refused = call("console", "--port", "0", "--token-file", str(tmp_path / "empty"), url=client.url)
    assert (refused.code, "--token-file" in refused.err) == (2, True)
    (tmp_path / "wrong").write_text(f"{TOKENS['admin']} root\n")
    refused = call("console", "--port", "0", "--token-file", str(tmp_path / "wrong"), url=client.url)
    assert (refused.code, "unknown level 'root'" in refused.err) == (2, True)
    with pytest.raises(ConfigError, match="authorize="):
        console_app(client.url)


# --- Tokens, sessions, and the application around the console ---


def test_a_token_logs_a_browser_in_with_cookies_that_no_script_and_no_form_of_another_site_can_use(
    client: Client, tmp_path: Path
) -> None:
    with console(client.url, tmp_path) as browser:
        page = browser.get("/")
        assert page.url.endswith("/login")
        assert browser.send(page, "/login", token="0123456789abcdef-wrong").status == 401
        answer = browser.http.post("/login", data={**page.form("/login"), "token": TOKENS["operate"]})
        session = next(one for one in answer.headers.get_list("set-cookie") if one.startswith(SESSION_COOKIE))
        assert all(part in session for part in ("HttpOnly", "SameSite=lax", "Path=/")), session
        assert "Secure" not in session
        assert "operate" in browser.get("/").text
        assert browser.send(browser.get("/"), "/logout").url.endswith("/login")
        assert browser.get("/").url.endswith("/login")
        page = browser.get("/login")
        proxied = browser.http.post(
            "/login",
            data={**page.form("/login"), "token": TOKENS["operate"]},
            headers={"X-Forwarded-Proto": "https"},
        )
        assert "Secure" in proxied.headers["set-cookie"]


@pytest.mark.parametrize(
    ("proto", "is_secure"), [("https", True), ("HTTPS, http", True), ("http, https", False), ("http", False)]
)
def test_a_cookie_is_secure_where_the_first_proxy_speaks_https(
    client: Client, tmp_path: Path, proto: str, is_secure: bool
) -> None:
    with console(client.url, tmp_path) as browser:
        cookie = browser.http.get("/login", headers={"X-Forwarded-Proto": proto}).headers["set-cookie"]
    assert ("Secure" in cookie) is is_secure


def test_a_session_ends_with_its_time_and_with_its_token(tmp_path: Path) -> None:
    now_s = 1_000.0
    tokens = ConsoleTokens()
    tokens.read(write_tokens(tmp_path))
    sessions = Sessions(tokens, session_s=60, wall=lambda: now_s)
    known = tokens.viewer_of(TOKENS["admin"])
    assert known is not None
    session = sessions.issue(known[0])
    found = sessions.find(session)
    assert found is not None
    assert (found.viewer, found.until_s) == (known[1], 1_060.0)
    assert sessions.find(session[:-2] + "AA") is None
    assert sessions.find(None) is None
    assert sessions.find("no base64 é") is None
    now_s = 1_061.0
    assert sessions.find(session) is None
    now_s = 1_000.0
    (tmp_path / "tokens").write_text(f"{TOKENS['figures']} figures\n")
    tokens.replace(tmp_path / "tokens")
    assert sessions.find(session) is None


def test_a_token_that_is_removed_from_the_file_ends_its_sessions(client: Client, tmp_path: Path) -> None:
    path = write_tokens(tmp_path)
    with (
        ServiceProcess(("console", "--token-file", str(path)), (), client.url) as started,
        http_client(started.url) as http,
    ):
        browser = Browser(http)
        assert "operate" in browser.log_in("operate").text
        path.write_text(f"{TOKENS['figures']} figures\n")
        eventually(lambda: browser.get("/").url.endswith("/login"), "the end of the session")
        path.write_text("# none\n")
        assert browser.log_in("figures").status == 200


def test_a_token_that_is_removed_from_the_file_ends_its_sessions_in_an_application_too(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with console(client.url, tmp_path, "operate") as browser:
        bearer = {"Authorization": f"Bearer {TOKENS['operate']}"}
        assert browser.http.get("/redis", headers=bearer).status_code == 200
        (tmp_path / "tokens").write_text(f"{TOKENS['figures']} figures\n")
        eventually(lambda: browser.get("/").url.endswith("/login"), "the end of the session")
        assert browser.http.get("/redis", headers=bearer).status_code == 401
        assert browser.log_in("operate").status == 401
        (tmp_path / "tokens").unlink()
        eventually(lambda: browser.get("/") and "keeping the previous tokens" in caplog.text, "the warning")
        assert browser.log_in("figures").status == 200


def test_a_program_uses_a_bearer_token_and_needs_no_form(filled: Client, tmp_path: Path) -> None:
    with console(filled.url, tmp_path) as browser:
        bearer = {"Authorization": f"Bearer {TOKENS['operate']}"}
        page = browser.post("/handler/resume", headers=bearer, name="shop.pay")
        assert page.status in (200, 303)
        assert "resumed on 1 stream" in Browser(browser.http).get("/audit", **bearer).text


def test_an_unknown_bearer_token_is_refused_and_not_sent_to_the_login_form(client: Client, tmp_path: Path) -> None:
    with console(client.url, tmp_path, "operate") as browser:
        for answer in (
            browser.http.get("/redis", headers={"Authorization": "Bearer x"}),
            browser.http.post("/handler/resume", headers={"Authorization": "Bearer x"}, data={"name": "shop.pay"}),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert "this token is unknown" in answer.text
        browser.http.cookies.clear()
        assert browser.http.post("/handler/resume").headers["www-authenticate"].startswith("Bearer")
        assert browser.http.get("/redis").status_code == 303, "a browser"


def test_the_application_around_the_console_decides_the_level_and_the_name(filled: Client) -> None:
    with authorized(filled.url, None) as browser:
        assert browser.get("/").status == 401
    with authorized(filled.url, Level.FIGURES) as browser:
        assert browser.get("/").status == 200
        assert browser.get(FULL).status == 403

    async def viewer(request: object) -> Viewer:
        return Viewer(name="ann@example.org", level=Level.OPERATE)

    inner = Starlette(routes=[Mount("/ops/console", console_app(filled.url, authorize=viewer))])
    with client_of(inner) as http:
        browser = Browser(http)
        seen = pages_reached(browser, "/ops/console/")
        assert len([one for one, page in seen.items() if one.startswith("/ops/console/") and page.status == 200]) >= 8
        page = browser.get("/ops/console/handler?name=shop.pay")
        assert "The handler goes on." in browser.send(page, "/ops/console/handler/resume").text
        assert "ann@example.org" in browser.get("/ops/console/audit").text
        assert browser.get("/ops/console/console.css").status == 200
        assert '<script src="/ops/console/console.js" defer></script>' in browser.get("/ops/console/").html
        assert browser.get("/ops/console/console.js").status == 200


# --- Forms of other sites ---


def test_a_form_without_the_token_of_this_browser_changes_nothing(operator: Browser, filled: Client) -> None:
    page = operator.get(FULL)
    fields = page.form("/key/unpark")
    assert operator.post("/key/unpark", **{**fields, "form_token": ""}).status == 403
    assert operator.post("/key/unpark", **{**fields, "form_token": "0" * 64}).status == 403
    kept = operator.http.cookies.get(FORM_COOKIE)
    operator.http.cookies.set(FORM_COOKIE, "of another browser", domain="127.0.0.1", path="/")
    assert operator.post("/key/unpark", **fields).status == 403
    operator.http.cookies.delete(FORM_COOKIE)
    assert operator.post("/key/unpark", **fields).status == 403
    assert count_parked(filled, [KEYS])[0] == 1
    assert filled.execute("XLEN", audit_key()) == 2, "nothing was begun"
    operator.http.cookies.set(FORM_COOKIE, str(kept), domain="127.0.0.1", path="/")
    assert operator.post("/key/unpark", **fields).status == 200
    assert count_parked(filled, [KEYS])[0] == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_a_form_that_another_site_sends_changes_nothing(
    operator: Browser, filled: Client, headers: dict[str, str]
) -> None:
    fields = operator.get(FULL).form("/key/unpark")
    assert operator.post("/key/unpark", headers=headers, **fields).status == 403
    assert count_parked(filled, [KEYS])[0] == 1
    own = {"Sec-Fetch-Site": "same-origin", "Origin": BASE}
    assert operator.post("/key/unpark", headers=own, **fields).status == 200
    assert count_parked(filled, [KEYS])[0] == 0


def test_a_form_for_a_browser_without_any_cookie_changes_nothing(filled: Client) -> None:
    with authorized(filled.url, Level.ADMIN) as browser:
        fields: dict[str, Any] = {"handler": "shop.pay", "stream": "orders", "key": f"parked {SECRET}"}
        assert browser.post("/key/unpark", **fields, form_token=form_token("", "")).status == 403
        assert count_parked(filled, [KEYS])[0] == 1


def test_an_action_is_refused_by_get_and_by_what_is_no_form(operator: Browser, filled: Client) -> None:
    assert operator.get("/key/unpark?handler=shop.pay&stream=orders&key=x").status == 405
    assert operator.http.post("/key/unpark", json={"handler": "shop.pay"}).status_code == 415
    assert count_parked(filled, [KEYS])[0] == 1


def test_a_form_in_an_application_is_read_no_further_than_64_kilobytes(client: Client) -> None:
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1_000):
            sent += 10_000
            yield b"x" * 10_000

    async def status() -> int:
        app = console_app(client.url, authorize=lambda request: Level.ADMIN)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            return (await http.post("/handler/pause", content=parts(), headers=kind)).status_code

    assert asyncio.run(status()) == 413
    assert sent <= 80_000


def test_a_host_name_that_the_console_does_not_have_is_refused(client: Client, tmp_path: Path) -> None:
    with console(client.url, tmp_path, host_names=("127.0.0.1",)) as browser:
        assert browser.get("/login").status == 200
        assert browser.get("/login", Host="evil.example").status == 421


# --- What a page holds ---


def test_every_response_forbids_scripts_of_pages_frames_and_caches(operator: Browser) -> None:
    paths = ["/", "/login", "/console.css", "/console.js", "/no-such-page", "/handler", "/healthz", FULL]
    answers = [operator.get(path) for path in paths] + [operator.post("/key/park", form_token="")]
    assert {one.status for one in answers} >= {200, 400, 403, 404}
    for one in answers:
        policy = one.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self';"), one.url
        assert "unsafe" not in policy
        assert all(part in policy for part in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"))
        assert one.headers["x-content-type-options"] == "nosniff"
        assert one.headers["cache-control"] == "no-store"
    assert not {"style", "iframe", "img"} & {tag for one in answers for tag in one.tags}
    assert all(one.html.replace(SCRIPT, "").count("<script") == 0 for one in answers)
    assert not any(" style=" in one.html for one in answers)


def test_what_the_server_of_a_console_answers_by_itself_has_these_headers_too(client: Client) -> None:
    with ServiceProcess(("console",), (), client.url) as started, http_client(started.url) as http:
        both = {"Content-Length": "0", "Transfer-Encoding": "chunked"}
        answers = [
            http.get("/"),
            http.get("/", headers={"Host": "evil.example"}),
            http.get("/", headers={"Origin": "https://evil.example"}),
            http.get(f"/?{'x' * 16_000}", headers={"X": "y" * 1_000}),
            http.post("/", content=b"x" * 70_000),
            http.post("/", headers=both),
        ]
        assert [one.status_code for one in answers] == [200, 421, 403, 431, 413, 400]
        for one in answers:
            found = [one.headers.get_list(name) for name in SECURE_HEADERS]
            assert found == [[value] for value in SECURE_HEADERS.values()], one.status_code
        address = urlsplit(started.url)
        with socket.create_connection((address.hostname, address.port), FAIL_SAFE_S) as raw:
            raw.sendall(b"nonsense\r\n\r\n")
            answer = b"".join(iter(lambda: raw.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        for name, value in SECURE_HEADERS.items():
            assert answer.count(f"\r\n{name}: {value}\r\n".encode()) == 1
        assert answer.endswith(b'\r\n\r\n{"error":"not HTTP/1.1, or URL and headers are far too long"}')


def test_what_messages_contain_is_text_in_every_page(client: Client, tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;{{ 7 * 7 }}\x00\x1b[31m"
    fill_with(client, attack)
    client.execute("XADD", f"stream {attack}", "*", attack, attack)
    client.execute("XGROUP", "CREATE", "orders", attack, "0")
    with console(client.url, tmp_path, "admin") as browser:
        seen = pages_reached(browser)
    assert len(seen) >= 12
    assert [path for path, page in seen.items() if page.status != 200] == []
    assert "img" not in {tag for page in seen.values() for tag in page.tags}
    assert all(page.html.replace(SCRIPT, "").count("<script") == 0 for page in seen.values())
    assert not any(char in page.html for page in seen.values() for char in "\x00\x1b")
    assert sum("<script>alert(1)</script>" in page.text for page in seen.values()) >= 8, "it is shown, as text"


def test_a_character_that_no_page_can_hold_is_escaped_wherever_it_comes_from() -> None:
    shown = render("problem.html", root="", status=404, problem="\x00\x1b\udcff <b>")
    assert r"\x00\x1b\xff &lt;b&gt;" in shown
    assert shown.encode().decode() == shown


def test_a_long_value_is_cut_and_its_length_stated(client: Client, tmp_path: Path) -> None:
    client.execute("XADD", "orders", "*", "text", "x" * 70_000)
    with console(client.url, tmp_path, "payloads") as browser:
        page = browser.get("/stream?name=orders")
    assert "x" * 65_536 in page.html
    assert "x" * 65_537 not in page.html
    assert "4,464 more characters are not shown" in page.text


def test_what_redact_hides_is_in_no_page_and_in_no_address(filled: Client, tmp_path: Path) -> None:
    def redact(name: str, text: str) -> str:
        return text.replace(SECRET, "(hidden)")

    with console(filled.url, tmp_path, "admin") as browser:
        addresses = pages_reached(browser)
    with console(filled.url, tmp_path, "admin", redact=redact) as browser:
        seen = pages_reached(browser)
        assert len(seen) >= 9
        assert [path for path, page in seen.items() if SECRET in page.html or SECRET in path] == []
        assert sum("(hidden)" in page.text for page in seen.values()) >= 6
        assert "key parked (hidden) text (hidden) " in browser.get(FULL).text, "the output"
        known = {path: browser.get(path) for path in addresses}
    for path, page in known.items():
        assert SECRET not in page.text, path


def test_what_is_inside_a_hidden_entry_of_a_state_is_hidden(filled: Client, tmp_path: Path) -> None:
    card = "visa4111"  # no id and no token of a form can contain it
    state = {"card": {"number": card, "used": {card: 1}, "old": [{"number": card}]}, "count": {"number": 7}}
    filled.execute("HSET", KEYS.state, "ann", msgspec.msgpack.encode(state))
    with console(filled.url, tmp_path, "payloads", redact=hide_fields(["card"])) as browser:
        page = browser.get("/key?handler=shop.pay&key=ann")
    assert card not in page.html
    assert '"count": { "number": 7 }' in page.text


def test_the_command_hides_the_named_fields(filled: Client) -> None:
    with ServiceProcess(("console", "--redact", "text"), (), filled.url) as started, http_client(started.url) as http:
        shown = http.get("/stream?name=orders").text
        assert "(redacted)" in shown
        assert f"parked {SECRET}" in shown, "another field"
        assert f"0 {SECRET}" not in shown
