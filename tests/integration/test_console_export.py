"""Dead letters are exported by the console as the lines that `dlq show --json` prints: whole, or what may be shown."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from millstream.admin.audit_log import AuditLog
from millstream.admin.letter_export import LetterExport
from millstream.delivery.dead_letter_queue import DeadLetterFilter
from millstream.errors import AccessDenied
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, audit_key
from millstream.services.console import Level, console_app
from tests.support.commandline import call
from tests.support.consoles import Browser, authorized, console

pytestmark = [pytest.mark.cli]

LETTERS = "/letters?handler=shop.pay"


def add(client: Client, count: int, *, value: bytes = b"\xff\n", stream: str = "orders", error: str = "no {}") -> None:
    """Dead letters of `shop.pay` with fields `n`, `card` and `raw`."""
    keys = HandlerKeys("shop", "pay", stream)
    letters = [
        DeadLetter(
            stream=stream,
            id=f"{n + 1}-0",
            pairs=[b"n", b"%d" % n, b"card", b"visa4111", b"raw", value],
            key=b"ann",
            app="shop",
            handler="pay",
            attempts=1,
            reason="failed",
            error=error.format(n),
            traceback="Traceback\n  visa4111",
            time_ms=n,
        )
        for n in range(count)
    ]
    client.execute("HSET", keys.meta, "owner", "workers")
    client.pipeline([("XADD", keys.dead_letters, "*", *one.items()) for one in letters])


@pytest.fixture
def browser(client: Client, tmp_path: Path) -> Iterator[Browser]:
    with console(client.url, tmp_path, "payloads") as opened:
        yield opened


def exported(browser: Browser, page: str = LETTERS) -> httpx.Response:
    """The answer to the form of a page that exports."""
    return browser.http.post("/letters/export", data=browser.get(page).form("/letters/export"))


def test_all_dead_letters_of_a_handler_are_exported_as_the_command_prints_them(
    browser: Browser, client: Client
) -> None:
    add(client, 120)
    add(client, 30, stream="refunds")
    client.execute("XADD", HandlerKeys("shop", "pay", "orders").dead_letters, "*", "foreign", b"\xff")
    answer = exported(browser)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["content-disposition"] == 'attachment; filename="dead-letters-shop.pay.jsonl"'
    assert answer.text == call("dlq", "show", "shop.pay", "--json", url=client.url).out
    assert len(answer.text.splitlines()) == 151
    (record,) = AuditLog(client).read()
    assert (record.action, record.about, record.result) == (
        "dlq show",
        {"handler": "shop.pay"},
        "151 read, complete",
    )


def test_one_group_is_exported_alone(browser: Browser, client: Client) -> None:
    add(client, 200)
    add(client, 3, error="other {}")
    group = next(one for one in browser.get(LETTERS).links if "other+N" in one)
    rows = [json.loads(one) for one in exported(browser, group).text.splitlines()]
    assert [one["error"] for one in rows] == ["other 0", "other 1", "other 2"]
    assert AuditLog(client).read()[0].result == "3 read, complete"


def test_what_is_hidden_on_pages_is_hidden_in_the_export(client: Client) -> None:
    add(client, 1)
    hidden = {"card", "key", "error", "traceback"}
    with authorized(
        client.url, Level.PAYLOADS, redact=lambda name, text: "(hidden)" if name in hidden else text
    ) as browser:
        text = exported(browser).text
        row = json.loads(text)
    assert {row[name] for name in ("key", "error", "traceback")} == {"(hidden)"}
    assert row["fields"] == {"n": "0", "card": "(hidden)", "raw": {"hex": "ff0a"}}
    assert ("visa4111" in text, "ann" in text) == (False, False)


def test_why_an_entry_is_no_dead_letter_is_hidden_with_the_errors(client: Client) -> None:
    add(client, 1)
    dead = HandlerKeys("shop", "pay", "orders").dead_letters
    client.execute("XADD", dead, "*", "fields", b"\x90", "stream", "orders", "id", "card 4111")
    with authorized(
        client.url, Level.PAYLOADS, redact=lambda name, text: "(hidden)" if name in ("error", "id") else text
    ) as browser:
        rows = [json.loads(one) for one in exported(browser).text.splitlines()]
    assert [one["error"] for one in rows] == ["(hidden)"] * 2, "the cause quotes the id"


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
def test_an_export_reads_as_far_as_its_receiver_and_a_part_more(browser: Browser, client: Client, spec: str) -> None:
    add(client, 60, value=b"x" * 300_000)
    receiver = Receiver(spec)
    result = receiver.export(browser, client)
    assert len(receiver.parts) == 1
    assert receiver.parts[0] < 6_000_000, "a part of 60 dead letters of 300,000 bytes"
    count, _, how = str(result).partition(" read, ")
    assert (int(count.replace(",", "")) < 30, how) == (True, "broken off by its receiver")


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
def test_an_export_whose_receiver_leaves_before_the_first_part_has_a_record_of_its_end(
    browser: Browser, client: Client, spec: str
) -> None:
    add(client, 1)
    receiver = Receiver(spec, leaves_at="http.response.start")
    result = receiver.export(browser, client)
    assert (receiver.parts, result) == ([], "1 read, broken off by its receiver")


def test_an_export_whose_end_cannot_be_recorded_is_complete_and_the_log_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(client, 1)
    read = LetterExport.next_part

    def harmed(letters: LetterExport, own: Client) -> bytes | None:
        client.pipeline([("DEL", audit_key()), ("SET", audit_key(), "of another program")])
        return read(letters, own)

    monkeypatch.setattr(LetterExport, LetterExport.next_part.__name__, harmed)
    with authorized(client.url, Level.PAYLOADS) as browser:
        assert len(exported(browser).text.splitlines()) == 1
    assert "end of a download not recorded" in caplog.text
    assert "its record stays without a result: 1 read, complete" in caplog.text


class Receiver:
    """What an ASGI server of this version does for a browser that sends the form and goes after one part, or before."""

    def __init__(self, spec: str, *, leaves_at: str = "http.response.body") -> None:
        self.parts: list[int] = []
        self._spec = spec
        self._leaves_at = leaves_at
        self._form: list[dict[str, Any]] = []
        self._gone = asyncio.Event()

    def export(self, browser: Browser, client: Client) -> str | None:
        """Send the form of the page; return its result in the audit."""
        form = urlencode(browser.get(LETTERS).form("/letters/export"), doseq=True).encode()
        cookie = "; ".join(f"{name}={value}" for name, value in browser.http.cookies.items())
        self._form = [{"type": "http.request", "body": form, "more_body": False}]
        app = console_app(client.url, authorize=lambda request: Level.PAYLOADS)
        asyncio.run(app(self.scope(cookie), self.receive, self.send))  # type: ignore[arg-type]
        return AuditLog(client).read()[0].result

    async def receive(self) -> dict[str, Any]:
        if self._form:
            return self._form.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        size = len(message.get("body", b""))
        if size:
            self.parts.append(size)
        if message["type"] == self._leaves_at and (size or message["type"] != "http.response.body"):
            self._gone.set()
            if self._spec == "2.4":
                raise OSError("the receiver is gone")
            await asyncio.Event().wait()

    def scope(self, cookie: str) -> dict[str, Any]:
        headers = {"host": "127.0.0.1", "content-type": "application/x-www-form-urlencoded", "cookie": cookie}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": self._spec},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/letters/export",
            "raw_path": b"/letters/export",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }


def test_an_export_that_redis_refuses_is_one_sentence_or_breaks_off_and_recorded(
    browser: Browser, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(client, 2_000)
    inner = LetterExport.next_part
    parts: list[bytes | None] = []

    def fail_at(number: int) -> None:
        def next_part(self: LetterExport, client: Client) -> bytes | None:
            if len(parts) == number:
                raise AccessDenied("no permission")
            parts.append(inner(self, client))
            return parts[-1]

        monkeypatch.setattr(LetterExport, "next_part", next_part)

    fail_at(0)
    answer = exported(browser)
    assert (answer.status_code, "no permission" in answer.text) == (503, True)
    assert AuditLog(client).read()[0].result == "failed: no permission"
    fail_at(1)
    answer = exported(browser)
    assert len(answer.text.splitlines()) < 2_000
    assert str(AuditLog(client).read()[0].result).endswith(" read, failed: no permission")


def test_a_viewer_of_figures_exports_nothing(client: Client, tmp_path: Path) -> None:
    add(client, 1)
    with console(client.url, tmp_path, "figures") as browser:
        form = {"form_token": browser.get("/").form("/logout")["form_token"], "handler": "shop.pay"}
        assert browser.post("/letters/export", **form).status == 403
    assert AuditLog(client).read() == []


def test_a_part_of_an_export_has_about_a_million_bytes_whatever_their_number(client: Client) -> None:
    add(client, 3_000)
    add(client, 40, value=b"x" * 400_000)
    export = LetterExport(client, DeadLetterFilter(app="shop", handler="pay"))
    sizes = []
    while (part := export.next_part(client)) is not None:
        sizes.append(len(part))
    assert export.count == 3_040
    assert len(sizes) > 5


def test_dead_letters_are_shown_by_handler_and_filter(client: Client) -> None:
    add(client, 3)
    add(client, 2, stream="refunds", error="other {}")
    rows = call("dlq", "show", "shop.pay", "--stream", "refunds", "--json", url=client.url).json_lines()
    assert [(one["error"], one["fields"]["n"]) for one in rows] == [("other 0", "0"), ("other 1", "1")]
    assert len(call("dlq", "show", "--all", "--limit", "4", "--json", url=client.url).json_lines()) == 4
    shown = call("dlq", "show", "shop.pay", url=client.url).out
    assert shown.count("letter_id") == 5
    refusal = call("dlq", "show", url=client.url)
    assert (refusal.code, "select dead letters" in refusal.err) == (2, True)
    assert "there are no dead letters of these" in call("dlq", "show", "--reason", "crashed", url=client.url).err
    assert call("dlq", "show", "shop.nope", url=client.url).code == 1
    first = rows[0]["letter_id"]
    gone = call("dlq", "show", first, "1-1", "--stream", "refunds", "--json", url=client.url)
    assert (gone.code, len(gone.json_lines()), "no dead letter 1-1" in gone.err) == (1, 1, True)
