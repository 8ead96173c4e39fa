"""Finding: what a check of `millstream doctor` found, why it matters, and the command that mends it. No I/O."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from millstream.admin.reports import Engine
from millstream.errors import MillstreamError
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize

_NAMED_STREAMS = 3

Severity = Literal["problem", "warning", "ok"]
"""`problem`: messages, states or progress may be lost or do not go on; `warning`: something to know or to mend soon."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    * `check`: name of the check; `what`: the fact; `why`: what follows from it, "" if nothing does
    * `mend`: the commands that mend it, each complete; () if there is nothing to do
    * `is_checked`: False if Redis refused the check
    * `handler`: the handler that it concerns, as `app.handler`; None if it concerns no single one
    * `since_ms`: since when it is so, in Unix milliseconds; None if that is unknown
    """

    check: str
    severity: Severity
    what: str
    why: str = ""
    mend: tuple[str, ...] = ()
    is_checked: bool = True
    handler: str | None = None
    since_ms: int | None = None


def run_check(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of `check`; if it cannot be made, one warning that says so."""
    try:
        yield from tuple(check())
    except MillstreamError as error:
        yield Finding(check=name, severity="warning", what=f"not checked: {error}", is_checked=False)


def merge_unchecked(findings: Iterable[Finding]) -> list[Finding]:
    """The findings in order; checks that failed for the same reason become one, at the place of the first of them."""
    merged: dict[object, Finding] = {}
    for one in findings:
        reason = one if one.is_checked else (one.severity, one.what)
        known = merged.get(reason)
        merged[reason] = one if known is None or one.is_checked else replace(known, check=f"{known.check}, {one.check}")
    return list(merged.values())


def start_command(engine: Engine, app: str) -> str:
    """The command that starts workers, or a run on Spark, of an app. Redis does not know the app's file."""
    command = "worker" if engine == "workers" else "run"
    return f'millstream {command} FILE.py  # FILE.py: the file with App("{escape(app)}")'


def named_streams(names: Iterable[str]) -> str:
    """The first three of these streams, and how many more there are."""
    found = sorted(set(names))
    some = ", ".join(map(escape, found[:_NAMED_STREAMS]))
    left = len(found) - _NAMED_STREAMS
    return some if left <= 0 else f"{some} and {pluralize(left, 'more stream')}"


def quoted(name: str | bytes) -> str:
    """A name or a key as one word of a shell, escaped as commands read it."""
    return shlex.quote(escape(name))
