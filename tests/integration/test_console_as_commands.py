"""Each form of the console leaves Redis, and its one record, as the command that it stands for leaves them."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys, audit_key
from millstream.services.console.views import PAGES
from tests.support.commandline import call
from tests.support.console_forms import FORMS
from tests.support.consoles import console, fill_with

pytestmark = [pytest.mark.cli]

POSTED = tuple(one.path for one in PAGES if one.method == "POST")
KEYS = HandlerKeys("shop", "pay", "orders")
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


def prepare(client: Client, given: str) -> dict[str, str]:
    """What a form needs, without records of earlier actions. Returns the ids that commands need."""
    fill_with(client, "x")
    if given:
        assert call(*shlex.split(given), url=client.url).code == 0
    Group(client, "orders", "readers").create()
    client.execute("DEL", audit_key())
    ((letter, _),) = client.execute("XRANGE", KEYS.dead_letters, "-", "+")
    (delayed,) = DelayedMessages(client).find("orders", limit=2)
    return {"letter": letter.decode(), "delayed": delayed.id}


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


@pytest.mark.parametrize("path", POSTED)
def test_a_form_leaves_one_record_and_what_its_command_leaves(
    client: Client, other: Client, tmp_path: Path, path: str
) -> None:
    form = FORMS[path]
    ids = prepare(client, form.given)
    copy(client, other)
    before = contents(client)
    assert contents(other) == before
    with console(client.url, tmp_path, "admin") as browser:
        answer = form.send(browser, path)
    assert answer.status == 200, answer.text
    (record,) = AuditLog(client).read()
    assert (record.action, record.by[:6]) == (form.action, "token ")
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
    if form.reads_only:
        assert [json.loads(line) for line in answer.html.splitlines()] == done.json_lines()
