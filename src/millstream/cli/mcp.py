"""`millstream mcp`: lets an assistant ask what waits and why, by the Model Context Protocol over stdin and stdout."""

import json
import sys
import traceback
from typing import Annotated, Any

import typer

from millstream import __version__
from millstream.cli.mcp_tools import ReadOnlyTools
from millstream.cli.options import Url
from millstream.cli.terminal import print_json, print_message_text
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client

Payloads = Annotated[bool, typer.Option("--payloads", help="Show values of fields, and the states of keys, too.")]

_VERSIONS = ("2025-06-18", "2025-11-25", "2024-11-05")
"""Versions of the protocol that have all of this; the first is proposed to a client of another one."""

_PARSE_ERROR, _INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32700, -32600, -32601, -32602, -32603
_INSTRUCTIONS = (
    "Tools show Redis Streams processed by millstream, and change nothing. Start with info and key_list, which show "
    "what is behind or stuck; why explains one key; dlq_list has the messages that failed; doctor checks everything."
)


class _RefusedRequest(Exception):
    """A request that is answered with an error. Its arguments: the code and the message."""


def mcp(context: typer.Context, url: Url = DEFAULT_URL, payloads: Payloads = False) -> None:
    """Serve the commands that only read to an assistant, as tools of the Model Context Protocol, until stdin ends.

    It answers requests of JSON-RPC, one per line of stdin, on stdout.
    """
    with Client(url) as client:
        client.execute("PING")  # fail at once if Redis is unavailable from the start
    tools = ReadOnlyTools(context, url, payloads=payloads)
    for line in sys.stdin.buffer:
        if (reply := _reply(tools, line)) is not None:
            print_json({"jsonrpc": "2.0", **reply}, flush=True)


def _reply(tools: ReadOnlyTools, line: bytes) -> dict[str, Any] | None:
    """The response to a line; None to a notification."""
    request_id = None
    try:
        request = _parse(line)
        if "id" not in request:
            return None
        request_id = request["id"]
        return {"id": request_id, "result": _result(tools, request["method"], request.get("params", {}))}
    except _RefusedRequest as refused:
        code, message = refused.args
    except Exception:  # noqa: BLE001 - a fault in one command must not end the server
        print_message_text(traceback.format_exc())
        code, message = _INTERNAL, "internal error; the log of the server has its traceback"
    return {"id": request_id, "error": {"code": code, "message": message}}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _RefusedRequest(_PARSE_ERROR, "this line is not JSON") from error
    if not (
        isinstance(request, dict)
        and request.get("jsonrpc") == "2.0"
        and isinstance(request.get("method"), str)
        and isinstance(request.get("params", {}), dict)
        and type(request.get("id", 0)) in (int, str)
    ):
        raise _RefusedRequest(_INVALID_REQUEST, "this line is not a request of JSON-RPC 2.0")
    return request


def _result(tools: ReadOnlyTools, method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            return {
                "protocolVersion": asked if asked in _VERSIONS else _VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "millstream", "version": __version__},
                "instructions": _INSTRUCTIONS,
            }
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [*tools.describe()]}
        case "tools/call":
            name, arguments = params.get("name"), params.get("arguments", {})
            if name not in tools or not isinstance(arguments, dict):
                raise _RefusedRequest(_INVALID_PARAMS, f"there is no tool {name!r}, or its arguments are no object")
            return tools.call(str(name), arguments)
    raise _RefusedRequest(_NO_METHOD, f"there is no method {method!r}")
