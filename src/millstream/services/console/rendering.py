"""Rendering: templates to HTML. Every value is escaped, whatever it contains."""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from millstream.admin.findings import quoted
from millstream.redis_client.escaping import escape, escape_lines
from millstream.redis_client.formats import format_age, format_count, format_run_time, format_time


def render(template: str, **values: Any) -> str:
    """The HTML of a template with these values."""
    return _templates().get_template(template).render(**values)


@cache
def _templates() -> Environment:
    """The templates. A name that is misspelt is an error; a character that no page can hold is escaped as in a terminal."""
    found = Environment(
        loader=PackageLoader("millstream.services.console"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "age": format_age,
        "name": escape,
        "number": _number,
        "quoted": quoted,
        "rate": format_count,
        "run_time": format_run_time,
        "time": lambda ms: "-" if ms is None else format_time(ms) or "-",
    }
    return found


def _printable(value: Any) -> Any:
    return escape_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _number(value: float | None, *, exact: bool = True) -> str:
    return "?" if value is None else f"{'' if exact else '>'}{value:,}"
