"""The page of JSON, docs/reference/json.md, and whether what a command prints is as it says."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/reference/json.md"

_TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_STEPS = re.compile(r"\[\]|[^.\[\]]+")


@dataclass
class Node:
    """A field of the page, with those below it. `kinds` is empty for objects and lists."""

    kinds: set[str] = field(default_factory=set)
    optional: bool = False
    below: dict[str, "Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """What a command, or one of its events, prints: the fields of the page, by path."""

    name: str
    root: Node
    paths: Mapping[str, str]


@cache
def sections() -> Mapping[str, Section]:
    """The tables of the page, by heading."""
    _, *parts = re.split(r"^##+ (.+)$", PAGE.read_text(), flags=re.M)
    return {name: _section(name, text) for name, text in zip(parts[::2], parts[1::2], strict=True) if "| `" in text}


def _section(name: str, text: str) -> Section:
    root, paths = Node(), {}
    for path, kinds, unit, meaning in re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.M):
        assert path not in paths or name == "key unpark", f"{name}: {path} twice"
        assert all((unit.strip(), meaning.strip())), f"{name}: {path}"
        paths[path] = kinds
        node, optional = root, kinds.endswith(", optional")
        for step in _STEPS.findall(path):
            fresh = step not in node.below
            node = node.below.setdefault(step, Node(optional=optional))
            node.optional = optional if fresh else node.optional and optional
        node.kinds |= set(kinds.removesuffix(", optional").split(" or "))
    return Section(name, root, paths)


def faults(section: Section, value: object) -> list[str]:
    """How a value differs from the page."""
    return list(_faults(section.root, value, section.name))


def seen(section: Section, value: object) -> set[str]:
    """The paths of the page that a value has."""
    return {path for path in section.paths if _reaches(value, _STEPS.findall(path))}


def event_section(command: str, event: Mapping[str, Any]) -> Section:
    """The section of an event, which must be on the page."""
    name = f"{command}: {event['event']}"
    assert name in sections(), f"{PAGE.name} has no section {name!r}"
    return sections()[name]


def check_events(command: str, events: list[dict[str, Any]]) -> None:
    """Fail if an event is not as the page says."""
    assert [fault for event in events for fault in faults(event_section(command, event), event)] == []


def _faults(node: Node, value: object, where: str) -> Iterator[str]:
    if "any" in node.kinds:
        return
    if isinstance(value, dict) and node.below and "[]" not in node.below:
        named = node.below.keys() - {"*"}
        rest = node.below.get("*")
        for name in value.keys() - named:
            if rest is None:
                yield f"{where}.{name} is not on the page"
            else:
                yield from _faults(rest, value[name], f"{where}.{name}")
        for name in named:
            if name in value:
                yield from _faults(node.below[name], value[name], f"{where}.{name}")
            elif not node.below[name].optional:
                yield f"{where}.{name} is missing"
    elif isinstance(value, list) and "[]" in node.below:
        for one in value:
            yield from _faults(node.below["[]"], one, f"{where}[]")
    elif not any(_is(value, kind) for kind in node.kinds) and not (value is None and _all_optional(node)):
        yield f"{where} is {value!r}, and not {' or '.join(sorted(node.kinds)) or 'an object'}"


def _all_optional(node: Node) -> bool:
    return bool(node.below) and all(one.optional for one in node.below.values())


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _reaches(value: object, steps: list[str]) -> bool:
    if not steps:
        return not isinstance(value, (dict, list))
    first, rest = steps[0], steps[1:]
    if first == "[]":
        return isinstance(value, list) and any(_reaches(one, rest) for one in value)
    if not isinstance(value, dict):
        return False
    if first == "*":
        return any(_reaches(one, rest) or not rest for one in value.values())
    return first in value and (_reaches(value[first], rest) or not rest)
