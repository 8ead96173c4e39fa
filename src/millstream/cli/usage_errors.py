"""What is wrong with a command line, as one line in our style."""

import re
from difflib import get_close_matches
from typing import Any

from millstream.redis_client.formats import join_words

_SUGGESTION = re.compile(r"\.? \(?(?:Did you mean|Possible options:) (.*?)[?)]*$")
_NO_NUMBER = re.compile(r"is not (?:a valid (int|integer|float)(?: range)?|in the range \S+)$")


def describe_usage_error(error: Any, words: str) -> str:
    """The error, and where the usage is explained. `words`: of the command, if the error does not know it."""
    if nearest := get_close_matches(getattr(error, "option_name", ""), getattr(error, "possibilities", None) or (), 1):
        error.possibilities = nearest
    text = error.format_message().replace("Value error, ", "").rstrip(".")
    text = _SUGGESTION.sub(r"; did you mean \1?", f"{text[:1].lower()}{text[1:]}")
    if text.startswith("no such command") and not text.endswith("?"):
        text += _commands_of(error.ctx)
    if (parameter := getattr(error, "param", None)) is not None:
        text = _NO_NUMBER.sub(lambda _: f"is not {_number_of(parameter.type)}", text)
    if getattr(error, "ctx", None):
        words = error.ctx.command_path
    return f"{text}{'' if text.endswith('?') else ';'} see: {words} --help"


def _commands_of(context: Any) -> str:
    """The commands of a family, such as `millstream rate`, as the end of an error text; nothing of all families."""
    names = sorted(getattr(context.command, "commands", {})) if context.parent is not None else []
    return f"; use {join_words(names, 'or')}" if names else ""


def _number_of(kind: Any) -> str:
    """The numbers that a type of parameter allows."""
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    name = "a whole number" if kind.name.startswith("int") else "a number"
    if least is None or most is None:
        above = "above" if getattr(kind, "min_open", False) else "of at least"
        below = "below" if getattr(kind, "max_open", False) else "of at most"
        return (
            f"{name} {above} {least}" if least is not None else f"{name} {below} {most}" if most is not None else name
        )
    return f"{name} from {least} to {most}"
