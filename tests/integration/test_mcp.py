"""`millstream mcp`, as the program of an assistant uses it: requests on its stdin, responses on its stdout."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.admin.figure_history import FigureHistory
from millstream.cli.command_schemas import CommandSchema
from millstream.cli.mcp import READING, SHOWING_STATES
from millstream.delivery.running_code import report_code
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.pipelining import server_time_ms
from tests.support.commandline import Outcome, call, ended, running
from tests.support.consoles import fill_with
from tests.support.dead_letters import KEYS, add_dead_letter
from tests.support.running_codes import CODE_WITH_OUTPUTS
from tests.support.sweeps import swept
from tests.support.urls import PASSWORD, contains_password

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("mcp")]

PAGE = Path(__file__).parents[2] / "docs/commands.md"
CARD = "4111-1111"

CALLS: Mapping[str, Mapping[str, Any]] = {
    "info": {"app": "shop", "wide": True, "limit": 5},
    "why": {"handler": "shop.pay", "key": "parked x"},
    "find": {"wanted": "parked x"},
    "doctor": {"older_than": "1m", "limit": 10},
    "key_list": {"state": "parked"},
    "history": {"since": "1d"},
    "key_show": {"handler": "shop.pay", "key": "parked x", "stream": "orders"},
    "key_outputs": {"handler": "shop.pay", "key": "parked x"},
    "dlq_list": {"handlers": "shop.pay", "count": True},
    "dlq_show": {"selection": ["shop.pay"]},
    "dlq_groups": {"handlers": "shop.pay"},
    "delayed_list": {},
    "group_list": {"streams": ["orders"]},
    "group_consumers": {"stream": "orders", "group": "g"},
    "group_pending": {"stream": "orders", "group": "g", "from": "0"},
    "lease_list": {"service": "calls", "count": True},
    "partition_show": {"base": "bills"},
    "state_list": {"handler": "shop.pay"},
    "state_show": {"handler": "shop.pay", "key": "parked x"},
}
"""Arguments for every tool."""


class Server:
    """A running `millstream mcp`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._requests = 0

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, method: str, **params: Any) -> Any:
        """The response to a request."""
        self._requests += 1
        self.send(json.dumps({"jsonrpc": "2.0", "id": self._requests, "method": method, "params": params}).encode())
        found = self.receive()
        assert (found["jsonrpc"], found["id"]) == ("2.0", self._requests)
        return found

    def call(self, tool: str, **arguments: Any) -> Any:
        """The result of a tool."""
        return self.ask("tools/call", name=tool, arguments=arguments)["result"]

    def end(self) -> Outcome:
        """End its input, and wait for its end."""
        return ended(self._process)


@contextmanager
def serving(url: str, *options: str) -> Iterator[Server]:
    """A server, which ends well when its input ends, and has written nothing but responses."""
    with running("mcp", *options, url=url, stdin=subprocess.PIPE) as process:
        server = Server(process)
        yield server
        if process.poll() is None:
            assert (server.end().code, process.returncode) == (0, 0)


@contextmanager
def filled(redis: EmbeddedServer) -> Iterator[Client]:
    """A client of a Redis that gets something to show for every tool."""
    with Client(redis.url) as opened:
        fill_with(opened, "x")
        add_dead_letter(opened, [b"card", CARD.encode()])
        add_dead_letter(opened, [b"card", CARD.encode(), b"card", b"twice"])
        add_edited(opened, [b"card", CARD.encode()])
        report_code(opened, "shop", {"pay": CODE_WITH_OUTPUTS}, held_ms=3_600_000)
        opened.execute("XADD", "out", "*", "key", "parked x", "card", CARD)
        assert FigureHistory(opened).add(swept(opened, server_time_ms(opened)))
        opened.execute("XGROUP", "CREATE", "orders", "g", "0")
        opened.execute("XREADGROUP", "GROUP", "g", "c", "COUNT", 2, "STREAMS", "orders", ">")
        assert call("lease", "add", "calls", "call:1", url=opened.url).code == 0
        Partitions(opened, "bills").create(2)
        yield opened


def add_edited(client: Client, before: list[bytes]) -> None:
    """Add a dead letter of an edited copy, with its fields before the edit."""
    letter_id = add_dead_letter(client, [b"card", b"another"])
    entry = client.execute("XRANGE", KEYS.dead_letters, letter_id, letter_id)[0][1]
    client.execute("XADD", KEYS.dead_letters, "*", *entry, "before_edit", msgspec.msgpack.encode(before))
    client.execute("XDEL", KEYS.dead_letters, letter_id)


@pytest.fixture
def client(millstream_fresh_server: EmbeddedServer) -> Iterator[Client]:
    with filled(millstream_fresh_server) as opened:
        yield opened


@pytest.fixture(scope="module")
def asked() -> Iterator[Server]:
    """One server for many questions."""
    with EmbeddedServer() as redis, filled(redis) as client, serving(client.url) as server:
        yield server


def dumps(client: Client) -> dict[bytes, bytes]:
    """Everything in Redis."""
    return {key: client.execute("DUMP", key) for key in client.execute("KEYS", "*")}


def login(client: Client, rule: str) -> str:
    """Make the user of a rule; return the URL to connect with."""
    client.execute(*rule.split(), ">secret")
    return client.url.replace("redis://", f"redis://{rule.split()[2]}:secret@", 1)


def rule_of_the_page() -> str:
    found = re.search(r"^    (ACL SETUSER assistant .*) '>\.\.\.'$", PAGE.read_text(), re.M)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("user", ["all rights", "operator", "may only read"])
def test_every_tool_answers_and_changes_nothing_in_redis(user: str, client: Client) -> None:
    rules = {"operator": call("acl", "operator").out.strip(), "may only read": rule_of_the_page()}
    url = login(client, rules[user]) if user in rules else client.url
    client.pipeline([("PERSIST", key) for key in client.execute("KEYS", "*")])  # nothing expires meanwhile
    before = dumps(client)
    assert len(before) > 10
    with serving(url, "--payloads") as server:
        assert {one["name"] for one in server.ask("tools/list")["result"]["tools"]} == CALLS.keys()
        for tool, arguments in CALLS.items():
            result = server.call(tool, **arguments)
            assert not result["isError"], (tool, result)
            assert result["structuredContent"]["lines"], (tool, result)
            assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    assert dumps(client) == before


@pytest.mark.parametrize("words", [*READING, *SHOWING_STATES])
def test_no_tool_is_a_command_that_asks_before_it_changes_something(words: str) -> None:
    options = {option for one in CommandSchema(words).command.params for option in one.opts}
    assert {"--json", "--url"} <= options
    assert options.isdisjoint({"--yes", "--dry-run"})


def test_a_tool_prints_the_same_lines_as_its_command(client: Client) -> None:
    with serving(client.url) as server:
        listed = server.call("dlq_list", handlers="shop.pay", limit=1)["structuredContent"]
    shown = call("dlq", "list", "shop.pay", "--limit", "1", "--json", url=client.url)
    assert listed == {"lines": shown.json_lines(), "messages": shown.err.splitlines()}
    assert len(listed["lines"]) == len(listed["messages"]) == 1


def test_the_schema_of_a_tool_has_the_arguments_of_its_command_and_no_option_that_runs_code_or_never_ends(
    client: Client,
) -> None:
    with serving(client.url) as server:
        tools = {one["name"]: one for one in server.ask("tools/list")["result"]["tools"]}
    assert tools.keys() == CALLS.keys() - {"state_list", "state_show"}
    assert all(one["annotations"]["readOnlyHint"] and one["description"] for one in tools.values())
    schema = {name: one["inputSchema"]["properties"] for name, one in tools.items()}
    assert all(about["description"] for one in schema.values() for about in one.values())
    assert schema["info"].keys() == {"app", "wide", "limit"}
    assert schema["doctor"].keys() == {"limit", "older_than"}
    assert schema["key_list"]["limit"].items() >= {"type": "integer", "minimum": 1}.items()
    assert schema["key_list"]["count"]["type"] == "boolean"
    assert "parked" in schema["key_list"]["state"]["enum"]
    assert schema["dlq_show"]["selection"]["items"] == {"type": "string"}
    assert tools["why"]["inputSchema"]["required"] == ["handler", "key"]


def test_values_of_fields_and_states_are_hidden_unless_payloads_are_asked_for(client: Client) -> None:
    with serving(client.url) as server:
        shown = {name: server.call(name, **CALLS[name]) for name in CALLS if not name.startswith("state_")}
        assert CARD not in json.dumps(shown)
        letters = shown["dlq_show"]["structuredContent"]["lines"]
        assert {"card": "(redacted)"} in [one.get("fields") for one in letters]
        assert [["card", "(redacted)"]] * 2 in [one.get("pairs") for one in letters]
        assert {"fields": {"card": "(redacted)"}} in [one.get("before_edit") for one in letters]
        assert server.ask("tools/call", name="state_list", arguments={"handler": "shop.pay"})["error"]["code"] == -32602
    with serving(client.url, "--payloads") as server:
        assert CARD in json.dumps(server.call("dlq_show", selection=["shop.pay"]))


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("why", {"handler": "shop.gone", "key": "k"}, "error: no handler 'shop.gone'"),
        ("why", {"handler": "shop.pay"}, "error: missing argument 'KEY'; see: millstream why --help"),
        ("why", {"handler": "shop.pay", "key": 7}, "error: key: 7 is not of the type string"),
        ("key_list", {"limit": 0}, "error: invalid value for '--limit'"),
        ("key_list", {"state": "lost"}, "error: invalid value for '--state'"),
        ("key_list", {"url": "redis://127.0.0.1:1"}, "error: there is no argument 'url'"),
        ("info", {"watch": "1s"}, "error: there is no argument 'watch'"),
        ("key_show", {"handler": "shop.pay", "key": "--url=redis://127.0.0.1:1"}, "error: the key '--url="),
    ],
)
def test_the_error_of_a_command_is_the_result_of_its_tool(
    tool: str, arguments: Mapping[str, Any], message: str, asked: Server
) -> None:
    result = asked.call(tool, **arguments)
    assert result["isError"]
    assert result["structuredContent"]["lines"] == []
    assert result["structuredContent"]["messages"][-1].startswith(message), result


def test_requests_that_cannot_be_answered_are_errors_and_the_next_one_is_answered(client: Client) -> None:
    with serving(client.url) as server:
        for line, code in (
            (b"no JSON", -32700),
            (b"\xff", -32700),
            (b"[" * 100_000, -32700),
            (b"[]", -32600),
            (b'{"id": 1, "method": "ping"}', -32600),
            (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600),
            (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": []}', -32600),
        ):
            server.send(line)
            found = server.receive()
            assert (found["id"], found["error"]["code"]) == (None, code), line
        assert server.ask("resources/list")["error"]["code"] == -32601
        for params in ({"name": "pause"}, {"name": ["info"]}, {}, {"name": "info", "arguments": [1]}):
            assert server.ask("tools/call", **params)["error"]["code"] == -32602, params
        server.send(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')  # no response follows
        assert server.ask("ping")["result"] == {}


def test_a_client_gets_its_own_version_of_the_protocol_if_the_server_knows_it(client: Client) -> None:
    with serving(client.url) as server:
        for wanted, chosen in (
            ("2025-06-18", "2025-06-18"),
            ("2024-11-05", "2024-11-05"),
            ("1999-01-01", "2025-06-18"),
        ):
            about = {"protocolVersion": wanted, "capabilities": {}, "clientInfo": {"name": "t"}}
            found = server.ask("initialize", **about)["result"]
            assert (found["protocolVersion"], found["capabilities"]) == (chosen, {"tools": {}})
            assert found["serverInfo"]["name"] == "millstream"
        assert server.end() == Outcome(code=0, out="", err="")


def test_a_fault_of_a_command_is_logged_and_does_not_end_the_server(client: Client) -> None:
    with serving(client.url) as server:
        server.send(
            b'{"jsonrpc": "2.0", "id": "a", "method": "tools/call",'
            b' "params": {"name": "find", "arguments": {"wanted": "\\ud800"}}}'
        )
        found = server.receive()
        assert (found["id"], found["error"]["code"]) == ("a", -32603)
        assert server.ask("ping")["result"] == {}
        assert "UnicodeEncodeError" in server.end().err


def test_settings_of_the_environment_neither_repeat_a_tool_nor_choose_another_redis(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_INFO_WATCH", "1s")
    monkeypatch.setenv("MILLSTREAM_DOCTOR_APP", "nothing.py")
    with serving("redis://127.0.0.1:1", "--url", client.url) as server:
        assert len(server.call("info")["structuredContent"]["lines"]) == 1
        assert not server.call("doctor")["isError"]


def test_an_outage_of_redis_is_an_error_of_the_tool_without_the_password_and_the_server_goes_on(
    client: Client, millstream_fresh_server: EmbeddedServer
) -> None:
    client.execute("ACL", "SETUSER", "me", "on", f">{PASSWORD}", "+@all", "~*")
    with serving(client.url.replace("redis://", f"redis://me:{PASSWORD}@", 1)) as server:
        assert not server.call("dlq_list")["isError"]
        millstream_fresh_server.stop()
        refused = server.call("dlq_list")
        assert refused["isError"]
        assert "cannot be reached" in refused["structuredContent"]["messages"][-1] or "refused" in json.dumps(refused)
        assert not contains_password(json.dumps(refused))
        assert server.ask("ping")["result"] == {}
