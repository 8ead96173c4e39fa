"""Open pages of the console renew their figures: at no cost for more viewers, and without disturbing the user."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from starlette.requests import Request

from millstream.admin.audit_log import AuditLog
from millstream.admin.figure_history import STEP_MS, FigureHistory
from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console.app import RENEW_AFTER_HEADER, RENEWAL_HEADER, ConsoleParts, console_app, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.ended_sessions import EndedSessions
from millstream.services.console.guard import make_guard
from millstream.services.console.live_reads import LiveReads
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rights import ConsoleTokens, Level
from millstream.services.console.sessions import SESSION_COOKIE, Sessions
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.console.views import PAGES
from tests.support.accessibility import Axe
from tests.support.browser import Browser, Chromium
from tests.support.command_stats import commands_run
from tests.support.commandline import reserved_port
from tests.support.console_browsing import await_text, log_in, record_reports, visit
from tests.support.console_threads import ConsoleThread
from tests.support.consoles import BASE, TOKENS, client_of, console, fill_with, write_tokens
from tests.support.sweeps import swept
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("unhurried")]

SECRET = "canary"
KEYS = HandlerKeys("shop", "pay", "orders")
RENEWAL = {RENEWAL_HEADER: "1"}
LIVE = (
    *(
        "/",
        "/stuck",
        "/handlers",
        "/handler?name=shop.pay",
        "/letters?handler=shop.pay",
        "/streams",
        "/stream?name=orders",
        "/tail?name=orders",
    ),
    *("/group?stream=orders&group=readers", "/workers", "/queries", "/delayed", "/delayed?stream=orders"),
    *(f"/key?handler=shop.pay&stream=orders&key=parked+{SECRET}", "/redis", "/audit"),
)
HOUR_MS = 3_600_000.0


@pytest.fixture
def filled(client: Client) -> Client:
    fill_with(client, SECRET)
    client.execute("XGROUP", "CREATE", "orders", "readers", "0")
    for minutes in (3, 2):
        FigureHistory(client).add(swept(client, server_time_ms(client) - minutes * STEP_MS))
    return client


# --- Cost and rights ---


def renewal_commands(url: str, folder: Path, path: str, viewers: int) -> Counter[str]:
    """The commands of one renewal of a page for so many viewers, each in a session of their own, at the same time."""
    tokens, clients = ConsoleTokens(), ClientPool(url)
    tokens.read(write_tokens(folder))
    guard = make_guard(clients, tokens, None)
    seen = LiveReads[Mapping[bytes, bool]](keep_ms=HOUR_MS)
    guard = dataclasses.replace(guard, ended=EndedSessions(clients, reads=seen))
    names = StreamNames(url, wait_ms=HOUR_MS)
    parts = ConsoleParts(
        clients=clients,
        guard=guard,
        names=names,
        ranking=StreamRanking(url, names),
        redrives=RedriveThreads(url),
        live=LiveReads(keep_ms=HOUR_MS),
    )
    app = make_console(parts)
    known = tokens.viewer_of(TOKENS["admin"])
    assert known is not None
    sessions = [guard.sessions.issue(known[0]) for _ in range(viewers)]
    assert len(set(sessions)) == viewers

    async def renew() -> set[str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            for one in sessions:  # each has the page open
                session = guard.sessions.find(one)
                assert session is not None
                assert not await guard.ended.had(session)
            seen.clear()
            before.update(commands_run(counting.execute))
            asked = (http.get(path, headers={**RENEWAL, "Cookie": f"{SESSION_COOKIE}={one}"}) for one in sessions)
            answers = await asyncio.gather(*asked)
        assert {one.status_code for one in answers} == {200}, path
        return {one.text for one in answers}

    before: Counter[str] = Counter()
    with Client(url) as counting:
        shown = asyncio.run(renew())
        sent = commands_run(counting.execute)
    sent.subtract(before)
    clients.close()
    assert len({one.partition("form_token")[0] for one in shown}) == 1, "one collection"
    return +sent


@pytest.mark.parametrize("path", LIVE)
def test_fifty_viewers_of_an_open_page_add_no_command_of_redis(filled: Client, tmp_path: Path, path: str) -> None:
    renewal_commands(filled.url, tmp_path, path, 1)  # Redis now knows the scripts
    of_one = renewal_commands(filled.url, tmp_path, path, 1)
    assert of_one["zmscore"] >= 1, "whether the session has ended"
    assert of_one.total() > 2
    assert renewal_commands(filled.url, tmp_path, path, 50) == of_one


def test_a_renewal_takes_the_level_of_its_page_and_shows_no_more(filled: Client, tmp_path: Path) -> None:
    assert {urlsplit(path).path for path in LIVE} == {one.path for one in PAGES if one.is_live}
    with console(filled.url, tmp_path, "admin") as browser:
        renewed = {path: browser.get(path, **RENEWAL) for path in LIVE}
        assert {one.status for one in renewed.values()} == {200}
        assert all(0 <= int(one.headers[RENEW_AFTER_HEADER]) <= 5_000 for one in renewed.values())
        assert sum(SECRET in one.html for one in renewed.values()) >= 2
        assert not any("<nav" in one.html for one in renewed.values())
        for level in ("figures", "payloads"):
            assert browser.send(browser.get("/"), "/logout").url.endswith("/login")
            assert browser.get("/streams", **RENEWAL).url.endswith("/login"), "the session has ended"
            assert browser.log_in(level).status == 200
            found = {path: browser.get(path, **RENEWAL) for path in LIVE}
            refused = [path for path, one in found.items() if one.status != 200]
            assert {urlsplit(path).path for path in refused} == (
                {"/stuck", "/tail", "/letters", "/key", "/audit"} if level == "figures" else set()
            )
            assert (sum(SECRET in one.html for one in found.values()) > 0) == (level == "payloads")
            assert not {action for one in found.values() for action in one.actions} - {"/letters/export"}


def test_a_form_that_came_with_a_renewal_can_be_sent(filled: Client, tmp_path: Path) -> None:
    with console(filled.url, tmp_path, "operate") as browser:
        page = browser.get("/handler?name=shop.pay", **RENEWAL)
        assert "The handler goes on." in browser.send(page, "/handler/resume").text


def test_a_renewal_says_that_redis_is_away_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    with EmbeddedServer() as server, console(server.url, tmp_path, "admin") as browser:
        assert browser.get("/streams", **RENEWAL).status == 200
        server.stop()
        page = eventually(lambda: (one := browser.get("/streams", **RENEWAL)).status == 503 and one, "an error")
        assert page
        assert "Redis: " in page.text
        server.start()
        eventually(lambda: browser.get("/streams", **RENEWAL).status == 200, "the figures")


def test_viewers_share_no_renewal_where_what_is_hidden_may_depend_on_the_viewer(filled: Client) -> None:
    viewer: ContextVar[str] = ContextVar("viewer")

    def authorize(request: Request) -> Level:
        viewer.set(request.headers["Viewer"])
        return Level.PAYLOADS

    def redact(name: str, text: str) -> str:
        return text if viewer.get() == "ann" else "hidden"

    with client_of(console_app(filled.url, authorize=authorize, redact=redact)) as http:
        names = ("ann", "bob", "ann")
        shown = [http.get("/letters?handler=shop.pay", headers={**RENEWAL, "Viewer": name}).text for name in names]
    assert [SECRET in one for one in shown] == [True, False, True]


def test_whether_a_session_has_ended_is_asked_again_once_redis_is_back(tmp_path: Path) -> None:
    tokens = ConsoleTokens()
    tokens.read(write_tokens(tmp_path))
    known = tokens.viewer_of(TOKENS["admin"])
    assert known is not None
    sessions = Sessions(tokens)
    session = sessions.find(sessions.issue(known[0]))
    assert session is not None

    async def run(server: EmbeddedServer, clients: ClientPool) -> None:
        ended = EndedSessions(clients, reads=LiveReads(keep_ms=HOUR_MS))
        server.stop()
        with pytest.raises(Unavailable):
            await ended.had(session)
        server.start()
        assert not await ended.had(session)

    with EmbeddedServer() as server:
        clients = ClientPool(server.url)
        asyncio.run(run(server, clients))
        clients.close()


# --- In a browser ---


TALL = "document.body.style.minHeight = '5000px'; 0"


@pytest.fixture
def started(filled: Client, tmp_path: Path) -> Iterator[ConsoleThread]:
    """On a port that it can have again after a stop."""
    with reserved_port() as port, ConsoleThread(filled.url, write_tokens(tmp_path), port=port) as console:
        yield console


@pytest.fixture
def browser(started: ConsoleThread, chromium: Chromium) -> Iterator[Browser]:
    """A browser in which an operator has logged in, and which reports what the policy of a page forbids."""
    with Browser(f"{started.url}/", chromium) as opened:
        record_reports(opened)
        opened.command("Emulation.setFocusEmulationEnabled", enabled=True)
        log_in(opened, "operate")
        yield opened


def await_true(browser: Browser, condition: str) -> None:
    eventually(
        lambda: browser.run(f"Boolean({condition})"), condition, log=lambda: browser.run("document.body.innerText")
    )


def entries_of(stream: str) -> str:
    """The number of entries that the page of the streams shows of one."""
    return f"Array.from(document.querySelectorAll('tbody tr')).find(one => one.innerText.startsWith({stream!r}))?.cells[1].innerText"


def test_an_open_page_shows_a_message_that_was_published_since_and_its_policy_is_kept(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/streams")
    browser.run(
        "window.loaded = 'once'; document.querySelector('tbody a').focus(); window.focused = document.activeElement; 0"
    )
    assert browser.run("document.activeElement.innerText") == "orders"
    assert browser.run(entries_of("orders")) == "4"
    filled.execute("XADD", "a-new-stream", "*", "n", 1)
    filled.execute("XADD", "orders", "*", "n", 1)
    await_true(browser, f"{entries_of('orders')} === '5'")
    await_true(browser, f"{entries_of('a-new-stream')} === '1'")
    assert browser.run("window.loaded") == "once", "it was not loaded again"
    assert browser.run("document.activeElement === window.focused && document.activeElement.innerText") == "orders"
    filled.execute("DEL", "a-new-stream")
    await_true(browser, f"!({entries_of('a-new-stream')})")
    assert browser.run("document.activeElement === window.focused")
    assert browser.run("window.reports") == []
    assert browser.run("document.querySelectorAll('[aria-live], [role=status], [role=alert]').length") == 1
    browser.run("document.body.append(Object.assign(document.createElement('script'), {text: '1'})); 0")
    await_true(browser, "window.reports.length === 1")


def test_a_renewal_leaves_a_form_in_use_the_focus_open_details_the_selection_and_the_scroll_position(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/handler?name=shop.pay")
    browser.run("window.opened = document.querySelector('details'); window.opened.open = true; 0")
    browser.run(TALL)
    browser.run("document.getElementById('key').focus(); window.focused = document.activeElement; 0")
    browser.command("Input.insertText", text="half a k")
    browser.run("document.activeElement.setSelectionRange(2, 5); scrollTo(0, 300); 0")
    at = browser.run("scrollY")
    assert at > 0
    unread = "document.querySelector('main dd').innerText"
    before = browser.run(unread)
    filled.execute("XADD", "orders", "*", "key", "another", "n", 1)
    await_true(browser, f"{unread} !== {before!r}")
    assert browser.run("document.activeElement === window.focused && window.focused.isConnected")
    assert browser.run("[window.focused.value, window.focused.selectionStart, window.focused.selectionEnd]") == [
        *("half a k", 2, 5)
    ]
    assert browser.run("scrollY") == at
    assert browser.run("[window.opened.isConnected, window.opened.open]") == [True, True]
    assert browser.run("window.reports") == []


def test_a_renewal_leaves_what_was_done_and_all_that_the_page_shows_beside_it(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/handler?name=shop.pay")
    browser.run("document.querySelector('form[action=\"/handler/resume\"] button').click(); 0")
    await_text(browser, "The handler goes on.")
    assert browser.run("document.body.innerText.includes('The command: ')")
    unread = "document.querySelector('main dd').innerText"
    before = browser.run(unread)
    filled.execute("XADD", "orders", "*", "key", "another", "n", 1)
    await_true(browser, f"{unread} !== {before!r}")
    texts = "['The handler goes on.', 'The command: '].map(one => document.body.innerText.includes(one))"
    assert browser.run(texts) == [True, True]


def test_an_open_page_of_a_key_shows_its_state_of_now_and_keeps_a_reason_that_is_half_written(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/key?handler=shop.pay&stream=orders&key=failing+{SECRET}")
    browser.run("document.getElementById('reason-orders').focus(); window.focused = document.activeElement; 0")
    browser.command("Input.insertText", text="half a r")
    outputs = browser.run("document.getElementById('outputs').innerText")
    filled.execute("HSET", KEYS.state, f"failing {SECRET}", msgspec.msgpack.encode({"count": "of now"}))
    await_text(browser, "of now")
    assert "Last outputs" in outputs == browser.run("document.getElementById('outputs').innerText")
    assert browser.run("document.activeElement === window.focused && window.focused.value") == "half a r"


def test_an_open_audit_shows_a_new_action_above_the_others(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/audit")
    browser.run("window.known = document.querySelector('tbody tr'); 0")
    with AuditLog(filled).action(by="bob", action="key unpark", about={"key": SECRET}):
        pass
    await_true(browser, "document.body.innerText.includes('bob')")
    newest = "document.querySelector('tbody tr')"
    assert browser.run(f"[{newest}.cells[1].innerText, {newest}.nextElementSibling === window.known]") == ["bob", True]


def test_dead_letters_that_are_ticked_stay_as_they_are_and_the_figures_around_them_do_not(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/letters?handler=shop.pay")
    visit(browser, browser.run("document.querySelector('tbody th a').href"))
    rows = "document.querySelectorAll('tbody tr').length"
    ((_, letter),) = filled.execute("XRANGE", KEYS.dead_letters, "-", "+")
    filled.execute("XADD", KEYS.dead_letters, "*", *letter)
    await_true(browser, f"{rows} === 2")
    browser.run("window.ticked = document.querySelector('input[type=checkbox]'); window.ticked.checked = true; 0")
    filled.execute("XADD", KEYS.dead_letters, "*", *letter)
    await_text(browser, "3 failed")
    assert browser.run(f"[{rows}, window.ticked.isConnected, window.ticked.checked]") == [2, True, True]
    browser.run("window.ticked.checked = false; 0")
    await_true(browser, f"{rows} === 3")


def test_a_page_says_since_when_there_is_no_connection_and_goes_on_after_a_restart(
    started: ConsoleThread, browser: Browser, filled: Client, tmp_path: Path
) -> None:
    visit(browser, f"{started.url}/streams")
    browser.run("window.loaded = 'once'; 0")
    started.stop()
    await_text(browser, "No connection to the console since 2")
    assert browser.run("getComputedStyle(document.getElementById('connection')).position") == "sticky"
    filled.execute("XADD", "orders", "*", "n", 1)
    with ConsoleThread(filled.url, tmp_path / "tokens", port=urlsplit(started.url).port or 0):
        await_true(browser, f"{entries_of('orders')} === '5'")
        assert browser.run("document.getElementById('connection').textContent") == ""
        assert browser.run("window.loaded") == "once"
        (tmp_path / "tokens").write_text(f"{TOKENS['figures']} figures\n")
        await_text(browser, "reload the page to log in again")


def test_axe_finds_nothing_on_a_page_without_a_connection(started: ConsoleThread, browser: Browser) -> None:
    axe = Axe()
    visit(browser, f"{started.url}/streams")
    started.stop()
    await_text(browser, "No connection to the console since 2")
    for dark in (False, True):
        browser.show(width=1_440 if dark else 390, dark=dark)
        assert axe.violations(browser) == []


def test_a_page_asks_nothing_while_it_is_hidden_or_its_figures_are_held(
    started: ConsoleThread, browser: Browser
) -> None:
    visit(browser, f"{started.url}/")
    browser.run(
        "window.asked = 0; window.fetch = () => { window.asked += 1; return Promise.reject(new Error('none')) }; 0"
    )
    await_true(browser, "window.asked")  # by now no earlier request is under way
    is_hidden = "Object.defineProperty(document, 'hidden', {configurable: true, value: %s}); "
    woken = "document.dispatchEvent(new Event('visibilitychange')); "
    hold = "document.querySelector('#renewal button').click(); "
    for begin, end in ((is_hidden % "true" + woken, is_hidden % "false" + woken), (hold, hold)):
        await_text(browser, "Hold the figures")
        asked = browser.run(f"{begin}window.asked")
        browser.run(f"{woken}{woken}0")
        assert browser.run("window.asked") == asked
        assert browser.run(f"{end}window.asked") > asked


HELD_BACK = """
window.loaded = fetch
window.fetch = async (...request) => {
  const answer = await loaded(...request), text = await answer.text()
  window.renewed = true
  const rows = Array.from(new DOMParser().parseFromString(text, 'text/html').querySelectorAll('tbody tr'))
  if (!rows.some(one => one.cells[0].textContent === 'orders' && one.cells[1].textContent === '5'))
    return new Response(text, {headers: answer.headers})
  window.asked = true
  await new Promise(go => { window.goOn = go })
  const found = new Response(text, {headers: answer.headers})
  found.text = async () => { setTimeout(() => { window.taken = true }); return text }
  return found
}
0
"""


def test_figures_that_arrive_after_they_were_held_do_not_change_the_page(
    started: ConsoleThread, browser: Browser, filled: Client
) -> None:
    visit(browser, f"{started.url}/streams")
    browser.run(HELD_BACK)
    await_true(browser, "window.renewed")  # by now no request is under way that is not held back
    filled.execute("XADD", "orders", "*", "n", 1)
    await_true(browser, "window.asked")
    browser.run("document.querySelector('#renewal button').click(); window.goOn(); 0")
    await_true(browser, "window.taken")
    assert browser.run(entries_of("orders")) == "4"
    browser.run("window.fetch = window.loaded; document.querySelector('#renewal button').click(); 0")
    await_true(browser, f"{entries_of('orders')} === '5'")


def test_an_answer_of_another_program_replaces_nothing_and_the_page_says_to_reload_it(
    started: ConsoleThread, browser: Browser
) -> None:
    visit(browser, f"{started.url}/streams")
    page = "<!DOCTYPE html><main><h1>Company login</h1></main>"
    browser.run(f"window.fetch = () => Promise.resolve(new Response({page!r})); 0")
    await_text(browser, ": reload the page.")
    assert browser.run(entries_of("orders")) == "4"
    assert not browser.run("document.body.innerText.includes('No connection')")
