"""Tools of `millstream mcp`: the commands that only read, with a JSON schema of the arguments of each."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import typer

from millstream.admin.value_redaction import REDACTED
from millstream.cli.main import INTERRUPTED, error_boundary, load_command
from millstream.errors import ConfigError

READING = (
    *("info", "why", "find", "doctor", "key list", "key show", "dlq list", "dlq show", "delayed list"),
    *("group list", "group consumers", "group pending", "lease list", "partition show"),
)
"""Commands that write nothing to Redis, whatever their arguments. No other one is a tool."""

SHOWING_STATES = ("state list", "state show")
"""Such commands whose whole output is payload."""

_FIXED: Mapping[str, Mapping[str, Any]] = {
    "info": {"watch": None, "over": None},  # the former never ends, the latter waits for any time
    "doctor": {"app": None},  # it may name a file, which would be run
}
"""Parameters of commands that no caller sets, nor the environment or a file."""

_TYPES = {"int": "integer", "integer": "integer", "bool": "boolean", "boolean": "boolean"}
"""Types of the schema, by what versions of Typer call theirs; all others are strings."""
_TYPE_OF: Mapping[type, str] = {str: "string", int: "integer", bool: "boolean", list: "array"}


class ReadOnlyTools:
    """The tools of a server. Without `payloads`, they show no value of a field and no state."""

    def __init__(self, context: typer.Context, url: str, *, payloads: bool) -> None:
        self._parent = context.find_root()
        self._url = url
        self._payloads = payloads
        self._commands = {name.replace(" ", "_"): name for name in (*READING, *(SHOWING_STATES if payloads else ()))}

    def __contains__(self, name: object) -> bool:
        return name in [*self._commands]

    def describe(self) -> Iterator[dict[str, Any]]:
        """Each tool as `tools/list` shows it."""
        for name, words in self._commands.items():
            known = _arguments(words)
            schema = {
                "type": "object",
                "properties": {one: _schema(parameter) for one, parameter in known.items()},
                "required": [one for one, parameter in known.items() if parameter.required],
                "additionalProperties": False,
            }
            about = " ".join(_command(words).help.split())
            yield {"name": name, "description": about, "inputSchema": schema, "annotations": {"readOnlyHint": True}}

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run the command; its output, and its messages, as the result of `tools/call`."""
        out, err, failed = io.StringIO(), io.StringIO(), False
        try:
            with redirect_stdout(out), redirect_stderr(err), error_boundary(debug=False):
                self._run(self._commands[name], arguments)
        except typer.Exit as end:
            if end.exit_code == INTERRUPTED:
                raise KeyboardInterrupt from end
            failed = end.__cause__ is not None  # an error; `doctor` ends with 1 for what it has found
        lines = map(json.loads, out.getvalue().splitlines())
        found = {
            "lines": [one if self._payloads else _without_payload(one) for one in lines],
            "messages": err.getvalue().splitlines(),
        }
        text = {"type": "text", "text": json.dumps(found)}
        return {"content": [text], "structuredContent": found, "isError": failed}

    def _run(self, words: str, arguments: Mapping[str, Any]) -> None:
        command = _command(words)
        given = _as_words(_arguments(words), arguments)
        with command.make_context(words, given, parent=self._parent) as context:
            context.params |= {"url": self._url, "as_json": True, **_FIXED.get(words, {})}
            command.invoke(context)


def _command(words: str) -> Any:
    family, *rest = words.split()
    found = load_command(family)
    return found.commands[rest[0]] if rest else found


def _arguments(words: str) -> Mapping[str, Any]:
    """The parameters of a command that a caller may set, by the name in its schema."""
    hidden = {"url", "as_json", "config", *_FIXED.get(words, ())}
    return {
        one.opts[0].removeprefix("--").replace("-", "_"): one
        for one in _command(words).params
        if one.name not in hidden
    }


def _schema(parameter: Any) -> dict[str, Any]:
    kind = parameter.type
    found: dict[str, Any] = {"type": _TYPES.get(kind.name.partition(" ")[0], "string")}
    if choices := getattr(kind, "choices", None):
        found["enum"] = [*choices]
    if (least := getattr(kind, "min", None)) is not None:
        found["minimum"] = least
    if parameter.nargs == -1:
        found = {"type": "array", "items": found}
    return found | {"description": parameter.help or parameter.metavar}


def _as_words(known: Mapping[str, Any], arguments: Mapping[str, Any]) -> Sequence[str]:
    """Arguments as on a command line. A value is never read as an option. Raises ConfigError for wrong ones."""
    options, positions = list[str](), list[str]()
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"there is no argument {name!r}; use {', '.join(known)}")
        if _TYPE_OF.get(type(value)) != (wanted := _schema(known[name])["type"]):
            raise ConfigError(f"{name}: {value!r} is not of the type {wanted}")
    for name, parameter in known.items():
        values = arguments.get(name, [])
        values = values if isinstance(values, list) else [values]
        if parameter.param_type_name == "argument":
            positions += map(str, values)
        elif not parameter.is_flag:
            options += [f"{parameter.opts[0]}={one}" for one in values]
        elif values == [True]:
            options.append(parameter.opts[0])
    return [*options, "--", *positions]


def _without_payload(line: Any) -> Any:
    hidden = dict(line)
    if "fields" in hidden:
        hidden["fields"] = dict.fromkeys(hidden["fields"], REDACTED)
    if "pairs" in hidden:
        hidden["pairs"] = [[name, REDACTED] for name, _ in hidden["pairs"]]
    return hidden
