"""The console in this process, as a browser without JavaScript uses it: links, forms and cookies."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from html import unescape
from html.parser import HTMLParser
from http.cookiejar import DefaultCookiePolicy
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec

from millstream.admin.audit_log import AuditLog
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.expiring_members import hold_members
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun
from millstream.delivery.pause import Pause
from millstream.delivery.redrive_reports import RedriveReport
from millstream.delivery.running_code import report_code
from millstream.handlers.dead_letter import DeadLetter
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import (
    HandlerKeys,
    live_workers_key,
    long_runs_key,
    redrive_reports_key,
    worker_name_key,
)
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console import Level, console_app
from tests.support.keyed_fixtures import joined_by_field
from tests.support.running_codes import CODE_WITH_OUTPUTS

LEVELS = ("figures", "payloads", "operate", "admin")
TOKENS = {level: f"0123456789abcdef-{level}" for level in LEVELS}
BASE = "http://127.0.0.1"
SCRIPT = '<script src="/console.js" defer></script>'
"""The only script of a page."""


def write_tokens(folder: Path) -> Path:
    """A token file with a token for each level."""
    path = folder / "tokens"
    path.write_text("".join(f"{token} {level}\n" for level, token in TOKENS.items()))
    return path


class Page:
    """A page that was received: its links, forms, texts."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.html = response.text
        self.headers = response.headers
        self.url = str(response.url)
        self._reader = _Reader()
        self._reader.feed(self.html)

    @property
    def text(self) -> str:
        """What it shows, with single spaces."""
        return re.sub(r"\s+", " ", self._reader.text).strip()

    @property
    def links(self) -> list[str]:
        """The addresses of its links."""
        return self._reader.links

    @property
    def actions(self) -> set[str]:
        """The paths to which its forms post."""
        return {one["path"] for one in self._reader.forms if one["method"] == "post"}

    @property
    def tags(self) -> set[str]:
        """The names of its elements."""
        return self._reader.tags

    def form(self, path: str, button: str = "") -> dict[str, Any]:
        """The fields of the form that is sent to `path`, of several the one with a button that begins with `button`."""
        found = [one for one in self._reader.forms if one["path"] == path and button in one["text"]]
        assert found, f"no form for {path} in {self.text}"
        return {name: list(values) for name, values in found[0]["fields"].items()}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.forms: list[dict[str, Any]] = []
        self._area: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.links.append(values["href"])
        if tag == "form":
            self.forms.append(
                {"path": values["action"], "method": values.get("method", "get"), "fields": {}, "text": ""}
            )
        if tag == "input" and self.forms and values.get("name") and values.get("type") != "checkbox":
            self.forms[-1]["fields"].setdefault(values["name"], []).append(values.get("value", ""))

        if tag == "textarea" and self.forms:
            self._area = values["name"]
            self.forms[-1]["fields"][self._area] = [""]

    def handle_endtag(self, tag: str) -> None:
        self._area = None if tag == "textarea" else self._area
        self.text += " " if tag in ("dt", "dd", "td", "th", "li", "p", "h1", "h2", "h3") else ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._area is not None:
            self.forms[-1]["fields"][self._area][0] += data
        if self.forms:
            self.forms[-1]["text"] += data


class _InProcess(httpx.BaseTransport):
    """Calls an ASGI application in this process, on an event loop of its own."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._runner = asyncio.Runner()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._runner.run(self._answer(request))

    def close(self) -> None:
        self._runner.close()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


def client_of(app: Any) -> httpx.Client:
    """A client of an ASGI application in this process."""
    return httpx.Client(transport=_InProcess(app), base_url=BASE)


class Browser:
    """A browser without JavaScript that uses a console."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def get(self, path: str, **headers: str) -> Page:
        """A page, after redirects."""
        return Page(self.http.get(path, headers=headers, follow_redirects=True))

    def log_in(self, level: str) -> Page:
        """Log in with the token of this level."""
        return self.send(self.get("/login"), "/login", token=TOKENS[level])

    def send(self, page: Page, path: str, button: str = "", **fields: Any) -> Page:
        """Fill in a form of a page, and send it."""
        return self.post(path, **{**page.form(path, button), **fields})

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Page:
        """Send these fields."""
        return Page(self.http.post(path, data=fields, headers=headers, follow_redirects=True))


@contextmanager
def console(url: str, folder: Path, level: str | None = None, **options: Any) -> Iterator[Browser]:
    """A console with a token for each level, and a browser that has logged in with that of `level`."""
    app = console_app(url, **{"token_file": write_tokens(folder), **options})
    with client_of(app) as http:
        browser = Browser(http)
        if level is not None:
            assert browser.log_in(level).status == 200
        yield browser


@contextmanager
def authorized(url: str, level: Level | None, **options: Any) -> Iterator[Browser]:
    """A console in an application that grants this level."""
    with client_of(console_app(url, authorize=lambda request: level, **options)) as http:
        yield Browser(http)


@contextmanager
def program(url: str, folder: Path, level: Level) -> Iterator[Browser]:
    """A program that sends the bearer token of this level, and keeps no cookie: no form of its pages has a valid token."""
    with console(url, folder) as browser:
        browser.http.headers["Authorization"] = f"Bearer {TOKENS[level.word]}"
        browser.http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        yield browser


WAYS: Mapping[str, Callable[[str, Path, Level], AbstractContextManager[Browser]]] = {
    "session": lambda url, folder, level: console(url, folder, level.word),
    "bearer token": program,
    "authorize": lambda url, folder, level: authorized(url, level),
}
"""How a console knows the sender of a request, and what opens one for a viewer of this level."""


def pages_reached(browser: Browser, *starts: str, most: int = 200) -> dict[str, Page]:
    """All pages that links lead to, from the first page and these on, but for those that only reload."""
    return dict(islice(pages_one_by_one(browser, "/", *starts), most))


def pages_one_by_one(browser: Browser, *starts: str) -> Iterator[tuple[str, Page]]:
    """The path of each page that links lead to, from these pages on, and the page, as it is received."""
    found: set[str] = set()
    waiting = [*starts]
    while waiting:
        path = unescape(waiting.pop(0))
        if path not in found and path.startswith("/") and "refresh=" not in path:
            found.add(path)
            page = browser.get(path)
            yield path, page
            waiting += page.links


def add_output(client: Client, secret: str) -> None:
    """An output of the handler of `fill_with` for its parked key, which the page of the key finds for an hour."""
    report_code(client, "shop", {"pay": CODE_WITH_OUTPUTS}, held_ms=3_600_000)
    client.execute("XADD", "out", "*", "key", f"parked {secret}", "text", secret)


def fill_with(client: Client, secret: str) -> KeyedStream:
    """A handler `shop.pay` on `orders` that has this text wherever messages and their errors leave one; its worker `w-0`."""
    keyed = joined_by_field(client, "orders", app="shop", handler="pay")
    for n in range(3):
        client.execute("XADD", "orders", "*", "key", f"parked {secret}", "text", f"{n} {secret}")
    client.execute("XADD", "orders", "*", "key", f"failing {secret}", "text", secret)
    keyed.enqueue_new(count=100, max_pending=1_000)
    parked, failing = keyed.lease_keys(queues=2, entries=100, run=2, lease_ms=60_000, now_ms=0).leases
    error = LastError(error=f"RuntimeError: {secret}", traceback=f"Traceback\n  {secret}\n", attempts=2, blocks=True)
    keyed.release_leases(
        [
            LeaseRelease(parked, "park", f"failed: {secret}", 4),
            LeaseRelease(failing, "backoff", 60_000, 2, error.pack()),
        ]
    )
    places = HandlerKeys("shop", "pay", "orders")
    client.execute("HSET", places.state, f"parked {secret}", msgspec.msgpack.encode({"card": secret, "deep": [secret]}))
    letter = DeadLetter(
        stream="orders",
        id="1-0",
        pairs=[b"text", secret.encode()],
        key=f"parked {secret}".encode(),
        app="shop",
        handler="pay",
        attempts=1,
        reason="failed",
        error=f"ValueError: {secret}",
        traceback=f"Traceback\n  {secret}\n",
        time_ms=server_time_ms(client),
    )
    client.execute("XADD", places.dead_letters, "*", *letter.items())
    run = LongRun(
        handler="shop.pay",
        stream="orders",
        id="1-0",
        key=secret,
        worker="w-0",
        started_ms=server_time_ms(client) - 90_000,
        time_limit_ms=600_000,
    )
    hold_members(client, 3_600_000, {long_runs_key("shop"): [run]})  # as report_long_runs does, for longer
    cause = f"ValueError: {secret}"
    redrive = RedriveReport(
        id="1700000000000-0", by="ann", rate=0.5, began_ms=1_700_000_000_000, letters=11, tried=5, redriven=2, unknown=2
    )
    hold_members(client, 3_600_000, {redrive_reports_key("shop", "pay"): [redrive]})
    why = Pause(by="breaker", at_ms=server_time_ms(client), cause="failed", count=9, of=9, error=cause)
    CommitStore(client, app="shop", handler="pay").set_paused(["orders"], paused=True, why=why)
    client.execute("SET", worker_name_key("shop", "w-0"), "token")
    client.execute("ZADD", live_workers_key("shop", "pay"), server_time_ms(client) + 3_600_000, "w-0")
    with Producer(client.url) as producer:
        producer.publish("orders", {"text": secret}, delay_ms=3_600_000)
    with AuditLog(client).action(by="ann", action="key park", about={"key": secret}):
        pass
    return keyed
