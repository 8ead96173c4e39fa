"""Each form of the console leaves Redis, and its one record, as the command that it stands for leaves them."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.services.console.views import PAGES
from tests.support.accessibility import Axe
from tests.support.browser import Browser, Chromium
from tests.support.commandline import call
from tests.support.console_browsing import log_in, record_reports, send_form
from tests.support.console_forms import FORMS, Form
from tests.support.console_threads import ConsoleThread
from tests.support.console_usability import is_usable, one_window
from tests.support.consoles import WAYS, write_tokens
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

POSTED = {one.path: one.level for one in PAGES if one.method == "POST"}
"""The lowest level of each form: another test states the levels a second time."""
HOUR_MS = 3_600_000.0
TIME = re.compile(r"\d{12,}(?:-\d+)?")
"""A time in milliseconds, or an id that begins with one."""


@pytest.fixture(scope="module")
def other_server() -> Iterator[EmbeddedServer]:
    """A second Redis, for the commands."""
    with EmbeddedServer(extra={"appendonly": "no"}) as server:
        yield server


@pytest.fixture
def other(other_server: EmbeddedServer) -> Iterator[Client]:
    other_server.call("FLUSHALL")
    with Client(other_server.url) as opened:
        yield opened


def copy(client: Client, other: Client) -> None:
    """Give the other server all keys of this one."""
    for name in client.execute("KEYS", "*"):
        other.execute("RESTORE", name, max(0, client.execute("PTTL", name)), client.execute("DUMP", name))


def contents(client: Client) -> dict[str, str]:
    """All that Redis holds, but for what the console keeps for itself."""
    names = [name for name in client.execute("KEYS", "*") if not name.startswith(b"millstream:console:")]
    return {name.decode(): repr(read(client, name)) for name in sorted(names)}


def read(client: Client, name: bytes) -> object:
    """A key as a whole; of the groups of a stream not when their consumers were seen."""
    kind = client.execute("TYPE", name)
    if kind == b"stream":
        groups = [dict(pairs(one)) for one in client.execute("XINFO", "GROUPS", name)]
        pending = [client.execute("XPENDING", name, one[b"name"], "-", "+", 1_000) for one in groups]
        return client.execute("XRANGE", name, "-", "+"), groups, [[one[:2] for one in some] for some in pending]
    if kind == b"hash":
        return sorted(pairs(client.execute("HGETALL", name)))
    if kind == b"set":
        return sorted(client.execute("SMEMBERS", name))
    if kind == b"zset":
        return client.execute("ZRANGE", name, 0, -1, "WITHSCORES")
    return client.execute("LRANGE", name, 0, -1) if kind == b"list" else client.execute("GET", name)


def pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def without_new_times(found: dict[str, str], known: set[str]) -> dict[str, str]:
    """The contents with one word in place of each time and id that was not there before."""
    return {name: TIME.sub(lambda at: at[0] if at[0] in known else "NEW", text) for name, text in found.items()}


def test_each_form_is_in_the_table_and_each_row_of_the_table_is_a_form() -> None:
    assert sorted(FORMS) == sorted(POSTED)


def is_as_its_command(client: Client, other: Client, form: Form, before: dict[str, str], ids: dict[str, str]) -> str:
    """One record, of what its command leaves on the other server, which has the same data. Returns what it prints."""
    (record,) = AuditLog(client).read()
    assert record.action == form.action
    assert record.result, "it did not end"
    assert not record.result.startswith(("failed", "unknown"))
    done = call(*shlex.split(form.command.format(by=record.by, **ids)), url=other.url)
    assert done.code == 0, done.err
    after, known = contents(client), {at for text in before.values() for at in TIME.findall(text)}
    assert len(AuditLog(other).read()) == (not form.reads_only)
    for one in AuditLog(other).read():  # in the words of the form; it may say more
        assert one.action == form.action
        assert without_new_times({"": one.result or ""}, known)[""].startswith(
            without_new_times({"": record.result}, known)[""]
        )
        both = one.about.keys() & record.about.keys()
        assert {name: one.about[name] for name in both} == {name: record.about[name] for name in both}
        assert both >= {"handler", "stream", "app"} & record.about.keys()
    assert without_new_times(after, known) == without_new_times(contents(other), known)
    assert (after == before) is form.reads_only
    return done.out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", POSTED)
def test_a_form_leaves_one_record_and_what_its_command_leaves_at_its_lowest_level(
    client: Client, other: Client, tmp_path: Path, path: str, way: str
) -> None:
    form = FORMS[path]
    ids = form.prepare(client)
    copy(client, other)
    before = contents(client)
    assert contents(other) == before
    with WAYS[way](client.url, tmp_path, POSTED[path]) as browser:
        answer = form.send(browser, path)
    assert answer.status == 200, answer.text
    assert AuditLog(client).read()[0].by.startswith("the application" if way == "authorize" else "token ")
    printed = is_as_its_command(client, other, form, before, ids)
    if form.reads_only:
        assert [json.loads(line) for line in answer.html.splitlines()] == [*map(json.loads, printed.splitlines())]


def test_each_form_is_sent_by_mouse_and_leaves_what_its_command_leaves_and_each_question_is_usable(
    client: Client, other: Client, tmp_path: Path, chromium: Chromium
) -> None:
    axe, asked = Axe(), list[str]()
    with (
        ConsoleThread(client.url, write_tokens(tmp_path), renew_ms=HOUR_MS) as console,
        Browser(f"{console.url}/", chromium) as browser,
    ):
        record_reports(browser)
        log_in(browser, "admin")
        browser.command("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        for path, form in FORMS.items():

            def look_at_question(path: str = path) -> None:
                is_usable(browser, axe, f"the question of {path}", one_window(len(asked)))
                asked.append(path)

            for one in (client, other):
                one.execute("FLUSHALL")
            ids = form.prepare(client)
            copy(client, other)
            before = contents(client)
            send_form(browser, console.url, path, form, look_at_question)
            eventually(lambda: [one.id for one in AuditLog(client).read() if one.result], f"the end of {path}")
            printed = is_as_its_command(client, other, form, before, ids)
            if form.reads_only:
                # Chromium makes an empty file of that name first, and then moves the whole one there.
                eventually(lambda: [one for one in tmp_path.glob("*.jsonl") if one.stat().st_size], "the file")
                (file,) = tmp_path.glob("*.jsonl")
                assert [*map(json.loads, file.read_text().splitlines())] == [*map(json.loads, printed.splitlines())]
    assert len(asked) >= 8
