"""`millstream mcp`: the commands that only read as tools of the Model Context Protocol, over stdin and stdout."""

import io
import json
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Annotated, Any, Literal

import msgspec
import typer

from millstream import __version__
from millstream.admin.value_redaction import without_values
from millstream.cli.command_schemas import CommandSchema
from millstream.cli.main import INTERRUPTED, error_boundary
from millstream.cli.options import Url
from millstream.cli.terminal import print_json, print_message_text
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client

READING = (
    *("info", "why", "find", "doctor", "history", "key list", "key show", "key outputs", "dlq list", "dlq show"),
    *("dlq groups", "delayed list", "group list", "group consumers", "group pending", "lease list", "partition show"),
)
"""Commands that write nothing to Redis, whatever their arguments. No other one is a tool."""
SHOWING_STATES = ("state list", "state show")
"""Such commands whose whole output is payload."""

_NOT_SET = {"info": ("watch", "over"), "doctor": ("app",)}
"""Options that no caller sets, nor the environment or a file: they wait, or name a file that would be run."""
_VERSIONS = ("2025-06-18", "2025-11-25", "2024-11-05")
"""Versions of the protocol that have all of this; the first is proposed to a client of another one."""
_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32700, -32600, -32601, -32602, -32603

Payloads = Annotated[bool, typer.Option("--payloads", help="Show values of fields, and the states of keys, too.")]


class _Request(msgspec.Struct):
    """A request of JSON-RPC; a notification has no id."""

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = {}
    id: int | str | msgspec.UnsetType = msgspec.UNSET


def mcp(context: typer.Context, url: Url = DEFAULT_URL, payloads: Payloads = False) -> None:
    """Serve the commands that only read to an assistant, as tools of the Model Context Protocol, until stdin ends.

    It answers requests of JSON-RPC, one per line of stdin, on stdout.
    """
    with Client(url) as client:
        client.execute("PING")  # fail at once if Redis is unavailable from the start
    server = _Server(context, url, payloads=payloads)
    for line in sys.stdin.buffer:
        try:
            request = msgspec.convert(json.loads(line), _Request)
        except msgspec.ValidationError as error:
            reply: Any = {"id": None, **_error(_INVALID_REQUEST, f"this is not a request of JSON-RPC 2.0: {error}")}
        except (ValueError, RecursionError):
            reply = {"id": None, **_error(_PARSE_ERROR, "this line is not JSON")}
        else:
            try:
                answer = server.answer(request)
            except Exception:  # noqa: BLE001 - a fault in one command must not end the server
                print_message_text(traceback.format_exc())
                answer = _error(_INTERNAL, "internal error; the log of the server has its traceback")
            reply = {"id": request.id, **answer} if request.id is not msgspec.UNSET else None
        if reply:
            print_json({"jsonrpc": "2.0", **reply}, flush=True)


class _Server:
    def __init__(self, context: typer.Context, url: str, *, payloads: bool) -> None:
        self._parent, self._url, self._payloads = context.find_root(), url, payloads
        self._tools = {one.replace(" ", "_"): one for one in (*READING, *(SHOWING_STATES if payloads else ()))}

    def answer(self, request: _Request) -> dict[str, Any]:
        params = request.params
        match request.method:
            case "initialize":
                version = next((one for one in _VERSIONS if one == params.get("protocolVersion")), _VERSIONS[0])
                about = {"name": "millstream", "version": __version__}
                return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
            case "ping":
                return {"result": {}}
            case "tools/list":
                return {"result": {"tools": [_describe(*one) for one in self._tools.items()]}}
            case "tools/call":
                name, arguments = params.get("name"), params.get("arguments", {})
                if name not in [*self._tools] or not isinstance(arguments, dict):
                    return _error(_INVALID_PARAMS, f"there is no tool {name!r}, or its arguments are no object")
                return {"result": self._call(self._tools[str(name)], arguments)}
        return _error(_NO_METHOD, f"there is no method {request.method!r}")

    def _call(self, words: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        out, err, failed = io.StringIO(), io.StringIO(), False
        try:
            with redirect_stdout(out), redirect_stderr(err), error_boundary(debug=False):
                schema = _schema(words)
                given = schema.argv(arguments)
                with schema.command.make_context(words, given, parent=self._parent) as context:
                    fixed = dict.fromkeys(_NOT_SET.get(words, ()))
                    context.params |= {"url": self._url, "as_json": True, **fixed}
                    schema.command.invoke(context)
        except typer.Exit as end:
            if end.exit_code == INTERRUPTED:
                raise KeyboardInterrupt from end
            failed = end.__cause__ is not None  # an error; `doctor` ends with 1 for what it has found
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        shown = lines if self._payloads else [without_values(one) for one in lines]
        found = {"lines": shown, "messages": err.getvalue().splitlines()}
        text = {"type": "text", "text": json.dumps(found)}
        return {"content": [text], "structuredContent": found, "isError": failed}


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _schema(words: str) -> CommandSchema:
    return CommandSchema(words, hidden={"url", "as_json", "config", *_NOT_SET.get(words, ())})


def _describe(name: str, words: str) -> dict[str, Any]:
    schema = _schema(words)
    about = " ".join(schema.command.help.split())
    read_only = {"readOnlyHint": True}
    return {"name": name, "description": about, "inputSchema": schema.describe(), "annotations": read_only}
