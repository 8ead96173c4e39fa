"""The options and arguments by which the commands of `millstream dlq` select dead letters."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.admin.handler_names import split_name
from millstream.admin.time_inputs import parse_time_ms
from millstream.delivery.dead_letter_queue import REASONS, DeadLetterFilter
from millstream.errors import ConfigError
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


def names_in(selection: Sequence[str]) -> list[str]:
    """What is no letter id: a handler or an app."""
    return [one for one in selection if not _LETTER_ID.fullmatch(one)]


def letter_filter(
    selection: Sequence[str],
    stream: str | None,
    reason: str | None = None,
    key: str | None = None,
    since: str | None = None,
) -> DeadLetterFilter:
    """The filter of a command. `selection` is letter ids, and at most one handler or app before them."""
    names = names_in(selection)
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
