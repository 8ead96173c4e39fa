"""What commands change is in the audit, beside what operators do in the console; `millstream audit` lists it."""

import re
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.audit_log import AuditLog, AuditRecord
from millstream.balancer import announce
from millstream.balancer.protocol import Service
from millstream.cli.recorded_action import recorded
from millstream.errors import MillstreamError
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, StreamKeys, audit_key
from scripts.command_reference import all_commands
from tests.support.balancers import heartbeat_request
from tests.support.commandline import call, in_a_terminal
from tests.support.consoles import console, fill_with

pytestmark = [pytest.mark.cli]

PAY, KEY = {"handler": "shop.pay"}, {"handler": "shop.pay", "stream": "orders", "key": "parked x"}
GROUP = {"stream": "in", "group": "g"}
ACTIONS: list[tuple[str, str, Mapping[str, str], str]] = [
    ("pause shop.pay", "pause", PAY, "paused on 1 stream"),
    ("resume shop.pay --stream orders", "resume", {**PAY, "stream": "orders"}, "resumed on 1 stream"),
    ("rate set shop.pay 60/m", "rate set", {**PAY, "rate": "1/s"}, "set on 1 stream"),
    ("rate clear shop.pay", "rate clear", PAY, "cleared on 1 stream"),
    ("key park shop.pay new --reason audit", "key park", {**KEY, "key": "new", "reason": "audit"}, "parked"),
    ("key unpark shop.pay 'parked x'", "key unpark", KEY, "unparked"),
    ("key unpark shop.pay --all", "key unpark", {**PAY, "keys": "1"}, "1 of 1 unparked"),
    ("key skip shop.pay 'parked x'", "key skip", {**KEY, "reason": "skipped by an operator"}, "skipped: message ID"),
    ("state reset shop.pay 'parked x'", "state reset", KEY, "reset"),
    ("state reset shop.pay none", "state reset", {**KEY, "key": "none"}, "had no state"),
    ("state reset shop.pay none 'parked x'", "state reset", {**KEY, "key": "none, parked x"}, "1 of 2 reset"),
    (
        "dlq redrive shop.pay --since 2h",
        "dlq redrive",
        {**PAY, "letters": "1", "since": "2h"},
        "1 of 1 redriven",
    ),
    ("dlq stop shop.pay", "dlq stop", {**PAY, "redrive": "ID"}, "requested"),
    ("dlq purge {letter}", "dlq purge", {**PAY, "id": "ID", "letters": "1"}, "1 of 1 purged"),
    (
        "dlq edit {letter} --set text=1 --by eve",
        "dlq edit",
        {**PAY, "stream": "orders", "id": "ID", "fields": "text changed", "editor": "eve"},
        "redriven as ID",
    ),
    ("delayed cancel orders {delayed}", "delayed cancel", {"stream": "orders", "id": "{delayed}"}, "cancelled"),
    ("drain w-0", "drain", {"app": "shop", "worker": "w-0"}, "requested"),
    ("forget shop.gone", "forget", {"handler": "shop.gone"}, "1 key and 0 groups removed"),
    ("group create in new", "group create", {**GROUP, "group": "new", "after": "latest"}, "created"),
    (
        "group set-id in g --after earliest",
        "group set-id",
        {**GROUP, "before": "2-0", "after": "0-0"},
        (
            "moved from 2-0 to 0-0: 2 entries would be delivered again; its 2 pending entries stay pending, and pass to the "
            "consumer that gets them again"
        ),
    ),
    ("group delete in g", "group delete", GROUP, "deleted, with 2 pending entries"),
    (
        "group delete-consumer in g a --transfer-to b",
        "group delete-consumer",
        {**GROUP, "consumer": "a", "transfer_to": "b"},
        "deleted, 2 of 2 pending entries moved",
    ),
    ("group clean in --idle 0s", "group clean", {**GROUP, "idle": "0s"}, "1 consumer deleted"),
    ("group claim in g b 1-0", "group claim", {**GROUP, "consumer": "b", "id": "1-0"}, "1 entry claimed"),
    (
        "group claim in g b --min-idle 0s",
        "group claim",
        {**GROUP, "consumer": "b", "min_idle": "0s"},
        "2 entries claimed",
    ),
    ("lease add calls call:2", "lease add", {"service": "calls", "stream": "call:2"}, "1 stream announced"),
    ("lease release calls call:1", "lease release", {"service": "calls", "stream": "call:1"}, "1 of 1 stream released"),
    ("lease remove calls call:1", "lease remove", {"service": "calls", "stream": "call:1"}, "1 of 1 stream removed"),
    (
        "partition create new 2",
        "partition create",
        {"base": "new", "partitions": "2"},
        "has 2 partitions, generation 1",
    ),
    (
        "partition grow bills 3",
        "partition grow",
        {"base": "bills", "partitions": "3"},
        "has 3 partitions, generation 2",
    ),
]
"""A command, without `--yes`; the name of its action, what it is about, and its result. ID is any id of an entry."""

WITHOUT_A_QUESTION = ("key unpark shop.pay 'parked x'", "group claim in g b 1-0")
"""Commands that would ask if they were to change more."""
WITHOUT_DRY_RUN = {"pause", "resume", "dlq stop", "key park", "group create", "lease add", "partition create"}


def options_of(name: str) -> set[str]:
    (found,) = (command for words, command in all_commands() if " ".join(words) == name)
    return {option for one in found.params for option in one.opts}


def fill(client: Client) -> dict[str, str]:
    """All that the commands change; the ids that they name."""
    fill_with(client, "x")
    client.execute("HSET", HandlerKeys("shop", "gone", "orders").meta, "committed_id", "0-0")
    for entry_id in ("1-0", "2-0"):
        client.execute("XADD", "in", entry_id, "n", 1)
    client.execute("XGROUP", "CREATE", "in", "g", "0")
    client.execute("XREADGROUP", "GROUP", "g", "a", "STREAMS", "in", ">")
    client.execute("XGROUP", "CREATECONSUMER", "in", "g", "b")
    announce(client, "calls", "call:1")
    Service(client, "calls", consumer="one", incarnation="1").heartbeat(heartbeat_request(requests_all=True))
    Partitions(client, "bills").create(2)
    (letter, _), *_ = client.execute("XRANGE", HandlerKeys("shop", "pay", "orders").dead_letters, "-", "+")
    (delayed,) = client.execute("ZRANGE", StreamKeys("orders").due, 0, -1)
    return {"letter": letter.decode(), "delayed": delayed.decode()}


def records(client: Client) -> list[AuditRecord]:
    """Those of commands."""
    return [one for one in AuditLog(client).read() if one.by != "ann"]


def with_ids(value: Any) -> Any:
    """A record with every id that Redis has made replaced."""
    if isinstance(value, str):
        return re.sub(r"\d{13}-\d+", "ID", value)
    return {name: with_ids(one) for name, one in value.items()}


@pytest.mark.parametrize(("words", "action", "about", "result"), ACTIONS, ids=[one[0] for one in ACTIONS])
def test_a_command_records_its_user_its_action_and_the_result_unless_it_changes_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch, words: str, action: str, about: Mapping[str, str], result: str
) -> None:
    monkeypatch.setenv("LOGNAME", "bob")
    ids = fill(client)
    given = shlex.split(words.format(**ids))
    options = options_of(action)
    if "--dry-run" in options:
        assert call(*given, "--dry-run", url=client.url).code in (0, 2)
        assert records(client) == []
    if "--yes" in options and words not in WITHOUT_A_QUESTION:
        assert (call(*given, url=client.url).code, records(client)) == (2, [])
        given.append("--yes")
    done = call(*given, url=client.url)
    assert (done.code, "audit" in done.err) == (0, False), done
    (record,) = records(client)
    assert (record.by, record.action) == (f"bob@{socket.gethostname()}", action)
    assert with_ids(record.about) == with_ids({name: one.format(**ids) for name, one in about.items()})
    assert with_ids(record.result or "") == result


def test_every_command_that_can_be_tried_with_dry_run_records_what_it_does() -> None:
    changing = {
        " ".join(words) for words, one in all_commands() if any("--dry-run" in option.opts for option in one.params)
    }
    assert len(changing) > 15
    assert changing | WITHOUT_DRY_RUN == {action for _, action, *_ in ACTIONS}


def test_an_answer_of_no_records_nothing(client: Client) -> None:
    fill(client)
    shown = in_a_terminal("dlq", "purge", "shop.pay", url=client.url, answer=b"n\n")
    assert (shown.code, records(client)) == (1, [])


def test_an_action_that_is_refused_is_recorded_with_the_reason(client: Client) -> None:
    fill(client)
    assert call("group", "delete-consumer", "in", "g", "a", "--yes", url=client.url).code == 2
    assert call("key", "park", "shop.pay", "parked x", url=client.url).code == 1
    parked, deleted = records(client)
    assert (parked.action, parked.result) == ("key park", "was parked already")
    assert (deleted.result or "").startswith("failed: ")


def test_a_key_on_several_streams_is_one_action(client: Client) -> None:
    fill(client)
    client.execute("HSET", HandlerKeys("shop", "pay", "returns").meta, "committed_id", "0-0", "owner", "keyed")
    client.execute("XADD", "returns", "*", "n", "1")
    assert call("key", "park", "shop.pay", "parked x", "--reason", "r", url=client.url).code == 0
    (record,) = records(client)
    assert record.about == {"handler": "shop.pay", "key": "parked x", "reason": "r"}
    assert record.result == "parked on 1 of 2 streams"


def test_without_the_right_to_write_the_audit_a_command_works_and_says_that_it_is_not_recorded(client: Client) -> None:
    fill(client)
    rule = call("acl", "operator", "--stream", "orders", "--app", "shop").out.split()
    client.execute(*(word for word in rule if word != f"~{audit_key()}"), ">pw")
    url = client.url.replace("redis://", "redis://millstream-operator:pw@")
    done = call("rate", "set", "shop.pay", "50", url=url)
    assert (done.code, done.out) == (0, "shop.pay has the rate 50/s on orders\n")
    (said,) = done.err.splitlines()
    assert said.startswith("this action is not recorded in the audit: ")
    assert audit_key() in said
    assert records(client) == []
    assert call("rate", "show", "shop.pay", "--json", url=url).json_lines()[0]["rate"] == 50


def test_a_result_that_cannot_be_recorded_is_said_and_the_command_goes_on(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(client, "pause", handler="shop.pay", stream=None) as action:
        (record,) = records(client)
        assert (record.about, record.result) == ({"handler": "shop.pay"}, None)
        client.execute("DEL", audit_key())
        client.execute("SET", audit_key(), "text")
        action.result = "paused"
    assert capsys.readouterr().err.startswith("the result of this action is not recorded in the audit: ")


def test_an_action_that_is_interrupted_is_recorded_as_that(client: Client) -> None:
    with pytest.raises(KeyboardInterrupt), recorded(client, "group clean", stream="in"):
        raise KeyboardInterrupt
    with pytest.raises(MillstreamError, match="no"), recorded(client, "pause", handler="a.b"):
        raise MillstreamError("no")
    assert [one.result for one in records(client)] == ["failed: no", "unknown, it may have been done: interrupted"]


def test_the_audit_is_listed_newest_first_up_to_a_limit_and_from_a_time_on(client: Client) -> None:
    assert call("audit", url=client.url).err == "there are no recorded actions\n"
    client.execute("XADD", audit_key(), "1000-0", "by", "eve", "action", "drain", "about", '{"worker":"w\\u001b"}')
    client.execute("HSET", HandlerKeys("shop", "pay", "orders").meta, "committed_id", "0-0", "owner", "workers")
    client.execute("XADD", "orders", "*", "n", "1")
    for verb in ("pause", "resume"):
        assert call(verb, "shop.pay", url=client.url).code == 0
    shown = call("audit", "--json", url=client.url).json_lines()
    assert [one["action"] for one in shown] == ["resume", "pause", "drain"]
    assert shown[0].keys() == {"id", "at_ms", "by", "action", "about", "result"}
    assert shown[2] == {
        "id": "1000-0",
        "at_ms": 1000,
        "by": "eve",
        "action": "drain",
        "about": {"worker": "w\x1b"},
        "result": None,
    }
    table = call("audit", url=client.url).out.splitlines()
    assert table[0].split() == ["when", "by", "action", "about", "result"]
    assert table[1].endswith("resume  handler shop.pay  resumed on 1 stream")
    assert table[3].startswith("1970-01-01T00:00:01.000Z  eve ")
    assert r"worker w\x1b" in table[3]
    assert "unknown: its process ended first" in table[3]
    recent = call("audit", "--json", "--since", "1h", url=client.url)
    assert [one["action"] for one in recent.json_lines()] == ["resume", "pause"]
    first = call("audit", "--json", "--limit", "1", url=client.url)
    assert [one["action"] for one in first.json_lines()] == ["resume"]
    assert (first.err, recent.err) == ("there are more: --limit shows them\n", "")
    assert call("audit", "--since", "soon", url=client.url).code == 2


def test_the_console_lists_what_commands_do(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "bob")
    fill(client)
    assert call("drain", "w-0", "--yes", url=client.url).code == 0
    with console(client.url, tmp_path, "payloads") as browser:
        page = browser.get("/audit").text
    assert f"bob@{socket.gethostname()}" in page
    assert "app shop, worker w-0" in page
