"""Redact: hides values of messages from the operators to whom a program shows the messages, one value at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

REDACTED = "(redacted)"
"""The text that stands for a hidden value."""

Redact = Callable[[str, str], str]
"""Gets the name of a value and its text, and returns the text to show. The names: those of fields and of entries of a
state, and `key`, `error`, `traceback` and `sentence`.
"""


def show_all(name: str, text: str) -> str:  # noqa: ARG001 - as every Redact
    """A Redact that hides nothing."""
    return text


def hide_fields(names: Sequence[str]) -> Redact:
    """A Redact that hides the values with these names."""
    hidden = frozenset(names)
    return lambda name, text: REDACTED if name in hidden else text


def without_values(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a command prints of a message with `--json`, with each value of a field hidden; names stay."""
    hidden = dict(line)
    if "fields" in hidden:
        hidden["fields"] = dict.fromkeys(hidden["fields"], REDACTED)
    if "pairs" in hidden:
        hidden["pairs"] = [[name, REDACTED] for name, _ in hidden["pairs"]]
    if "before_edit" in hidden:
        hidden["before_edit"] = without_values(hidden["before_edit"])
    return hidden
