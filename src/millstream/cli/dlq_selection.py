"""The options and arguments by which the commands of `millstream dlq` select dead letters."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.admin.handler_names import select_handlers, split_name
from millstream.admin.time_inputs import parse_time_ms
from millstream.delivery.dead_letter_queue import REASONS, DeadLetterFilter
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import unescape

_LETTER_ID = re.compile(r"\d+-\d+")

Stream = Annotated[str | None, typer.Option("--stream", help="Only those from this stream.")]
Reason = Annotated[
    str | None,
    typer.Option(
        "--reason",
        help=f"Only those with this reason: {', '.join(REASONS[:-1])}; or {REASONS[-1]}, for entries that are not dead "
        "letters.",
    ),
]
Key = Annotated[str | None, typer.Option("--key", help="Only those of this key, written as in `list`.")]
Since = Annotated[
    str | None, typer.Option("--since", help="Only those dead-lettered since: 15m (ago), 2h, 3d, or an ISO 8601 time.")
]

Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of letters.")]
Selection = Annotated[
    list[str] | None,
    typer.Argument(
        help="Only those of this handler, or of all handlers of this app; then, only these letter ids.",
        metavar="[APP[.HANDLER]] [LETTER_ID...]",
    ),
]
All = Annotated[bool, typer.Option("--all", help="All dead letters; required without ids and filters.")]


def letter_filter(
    selection: Sequence[str],
    stream: str | None,
    reason: str | None = None,
    key: str | None = None,
    since: str | None = None,
) -> DeadLetterFilter:
    """The filter of a command. `selection` is letter ids, and at most one handler or app before them."""
    names = _names_in(selection)
    if len(names) > 1 or names != [*selection[: len(names)]]:
        raise ConfigError(
            f"give at most one APP or APP.HANDLER, then letter ids like 1700000000000-0, not {names[-1]!r}"
        )
    app, handler = split_name(names[0]) if names else (None, None)
    return DeadLetterFilter(
        app=app,
        handler=handler,
        stream=stream,
        reason=reason,
        key=None if key is None else unescape(key),
        since_ms=parse_time_ms(since) if since else 0,
        ids=tuple(selection[len(names) :]),
    )


def check_selection(wanted: DeadLetterFilter, *, every: bool) -> None:
    """Raise ConfigError if the user has neither selected dead letters nor asked for `every` one."""
    if wanted == DeadLetterFilter() and not every:
        raise ConfigError("select dead letters: give their ids, a handler, a filter such as --reason, or --all")


def check_name(client: Client, selection: Sequence[str], stream: str | None) -> None:
    """Where nothing is found, raise MillstreamError if no handler of the selected name has run: it may be misspelt."""
    for name in _names_in(selection):
        select_handlers(client, name, stream)


def _names_in(selection: Sequence[str]) -> list[str]:
    """What is no letter id: a handler or an app."""
    return [one for one in selection if not _LETTER_ID.fullmatch(one)]
