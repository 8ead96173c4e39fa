"""`millstream find`: finds what has a name, a key or an id."""

from typing import Annotated

import typer

from millstream.admin.search import search
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_message, print_table
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_value, unescape

_BUDGET_MS = 10_000.0


def find(
    wanted: Annotated[
        str,
        typer.Argument(
            help="A handler, the beginning of a stream, a key or an entry id; write bytes that are not text as \\xNN.",
            metavar="TEXT",
        ),
    ],
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """Find handlers, streams, keys, entries and dead letters by name or id, for about ten seconds. Changes nothing."""
    with Client(url) as client:
        found = search(client, unescape(wanted), budget_ms=_BUDGET_MS)
    if as_json:
        for one in found.hits:
            place = {"handler": one.handler, "stream": one.stream, "key": json_value(one.key), "id": one.id}
            print_json({"kind": one.kind, "exact": one.exact, **place})
    elif found.hits:
        print_table(
            ("kind", "~handler", "~stream", "~key", "id"),
            [
                (
                    one.kind,
                    one.handler or "-",
                    "-" if one.stream is None else escape(one.stream),
                    "-" if one.key is None else escape(one.key),
                    one.id or "-",
                )
                for one in found.hits
            ],
        )
    else:
        print_message("nothing is found")
    if found.is_partial:
        print_message("there may be more: Redis has more than can be looked through in ten seconds, or these are many")
