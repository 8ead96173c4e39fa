"""The part of Helm's template language that `deploy/helm` uses. It refuses the rest, and values that the chart lacks.

`tests/unit/test_helm_chart.py` compares it with Helm itself, where that is installed.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.deploy_files import documents, read_yaml

_ACTION = re.compile(r"(\{\{-? .*? -?\}\})")
_WORD = re.compile(r'"[^"]*"|[^\s"]+')
_PIPE = re.compile(r'\|(?=(?:[^"]*"[^"]*")*[^"]*$)')
_BLOCKS = ("if", "with", "range", "define")


class ChartError(Exception):
    """The templates use what is not understood, or a required value is missing."""


@dataclass
class _Block:
    """A block with its condition, and what comes before and after its `else`."""

    keyword: str
    condition: str = ""
    body: list["str | _Block"] = field(default_factory=list)
    otherwise: list["str | _Block"] = field(default_factory=list)


@dataclass(frozen=True)
class _Action:
    """One pair of braces: its text."""

    text: str


def render(chart: Path, values: Mapping[str, Any], release: str) -> list[dict[str, Any]]:
    """The objects that a release of the chart consists of. Raises ChartError."""
    root = {
        "Values": _merged(read_yaml(chart / "values.yaml"), values),
        "Release": {"Name": release, "Service": "Helm"},
    }
    renderer = _Renderer(root)
    paths = sorted((chart / "templates").iterdir(), key=lambda path: (path.suffix != ".tpl", path.name))
    texts = {path.name: renderer.render(_parsed(path.read_text()), root) for path in paths}
    return [found for name, text in texts.items() if name.endswith(".yaml") for found in documents(text)]


def _merged(defaults: Any, values: Any) -> Any:
    """The values of the chart with those of a user: objects are merged, all else is replaced."""
    if not isinstance(defaults, dict) or not isinstance(values, Mapping):
        return deepcopy(values)
    merged = {name: _merged(defaults.get(name), value) for name, value in values.items()}
    return {**defaults, **merged}


def _tokens(text: str) -> Iterator[str | _Action]:
    """Text and actions; a dash inside the braces removes the space on its side."""
    parts = _ACTION.split(text)
    for number, part in enumerate(parts):
        if number % 2:
            yield _Action(part.removeprefix("{{").removesuffix("}}").strip("- "))
            continue
        found = part
        if number and parts[number - 1].endswith("-}}"):
            found = found.lstrip()
        if number + 1 < len(parts) and parts[number + 1].startswith("{{-"):
            found = found.rstrip()
        if "{{" in found or "}}" in found:
            raise ChartError(f"not understood: {found.strip()}")
        yield found


def _parsed(text: str) -> list[Any]:
    """The blocks of a template. Actions that are no block stay as they are."""
    outer = _Block("")
    open_blocks, targets = [outer], [outer.body]
    for token in _tokens(text):
        keyword, _, rest = token.text.partition(" ") if isinstance(token, _Action) else ("", "", "")
        if keyword in _BLOCKS:
            block = _Block(keyword, rest)
            targets[-1].append(block)
            open_blocks.append(block)
            targets.append(block.body)
        elif keyword == "else" and not rest:
            targets[-1] = open_blocks[-1].otherwise
        elif keyword == "end":
            open_blocks.pop()
            targets.pop()
        else:
            targets[-1].append(token)  # type: ignore[arg-type]  # an action, beside text and blocks
    if len(open_blocks) != 1:
        raise ChartError(f"not ended: {open_blocks[-1].keyword} {open_blocks[-1].condition}")
    return outer.body


class _Renderer:
    """Renders templates of one chart, which see each other's definitions."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._defined: dict[str, list[Any]] = {}

    def render(self, nodes: Sequence[Any], dot: Any) -> str:
        return "".join(self._rendered(node, dot) for node in nodes)

    def _rendered(self, node: Any, dot: Any) -> str:
        if isinstance(node, str):
            return node
        if isinstance(node, _Action):
            return _text(self._value(node.text, dot))
        if node.keyword == "define":
            self._defined[json.loads(node.condition)] = node.body
            return ""
        value = self._value(node.condition, dot)
        if not value:
            return self.render(node.otherwise, dot)
        if node.keyword == "range":
            return "".join(self.render(node.body, one) for one in value)
        return self.render(node.body, value if node.keyword == "with" else dot)

    def _value(self, pipeline: str, dot: Any) -> Any:
        """The value of commands that are joined by pipes: each is the last argument of the next."""
        given: list[Any] = []
        for command in _PIPE.split(pipeline):
            first, *more = _WORD.findall(command)
            if first.startswith((".", '"')) and not more and not given:
                given = [self._operand(first, dot)]
            else:
                given = [self._called(first, [*(self._operand(word, dot) for word in more), *given])]
        return given[0]

    def _operand(self, word: str, dot: Any) -> Any:
        if not word.startswith("."):
            return json.loads(word)
        found = dot
        for name in word.split(".")[1:] if word != "." else ():
            if name not in found:
                raise ChartError(f"there is no {word}")
            found = found[name]
        return found

    def _called(self, function: str, given: Sequence[Any]) -> Any:
        match function, *given:
            case "quote", value:
                return json.dumps(_text(value))
            case "toYaml", value:
                return import_module("yaml").safe_dump(value, default_flow_style=False).rstrip()
            case "nindent", int(width), str(text):
                return "\n" + "\n".join(" " * width + line if line else line for line in text.split("\n"))
            case "include", str(name), dot:
                return self.render(self._defined[name], dot)
            case "required", str(message), value:
                if value in (None, ""):
                    raise ChartError(message)
                return value
            case "add", int(one), int(other):
                return one + other
            case "not", value:
                return not value
        raise ChartError(f"not understood: {function} with {len(given)} arguments")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
