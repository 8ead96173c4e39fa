"""`millstream tail`: the entries of streams, as they come."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from millstream.client import Client, Command, Reply, raise_if_error
from millstream.commands.options import DEFAULT_URL, Url, parse_start
from millstream.commands.terminal import clip, say, say_json
from millstream.escaping import json_fields, visible
from millstream.model import ZERO_ID, EntryId

Entry = tuple[str, EntryId, Sequence[bytes]]

_BLOCK_MS = 2_000
_PAUSE_S = 0.1
_PAGE = 500
_LARGEST_SEQ = 2**64 - 1
_SHOWN_CHARS = 200


def tail(
    streams: Annotated[list[str], typer.Argument(help="The streams.", metavar="STREAM...")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where to begin: an id, earliest, latest, 15m (ago) or an ISO 8601 time, UTC by default. "
            "Default: latest, with --no-follow earliest.",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many entries.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for more, or end where the streams end now.")] = True,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object per entry, on a line of its own.")] = False,
) -> None:
    """Show the entries of one or more streams and follow them, through outages of Redis too.

    What is not printable is escaped. --json loses nothing: values that are not UTF-8 become {"hex": "..."}.
    """
    names = list(dict.fromkeys(streams))
    first = parse_start(start or ("latest" if follow else "earliest"))
    with Client(url) as client:
        ends = _ends(client, names)
        after = {name: ends[name] if first is None else _before(first) for name in names}
        pages = _followed(client, after) if follow else _finished(client, after, ends)
        left = sys.maxsize if count is None else count
        for page in pages:
            for entry in page[:left]:
                if as_json:
                    say_json(_as_json(*entry))
                else:
                    say(_as_line(*entry))
            sys.stdout.flush()
            left -= len(page)
            if left <= 0:
                return


def _ends(client: Client, names: Iterable[str]) -> dict[str, EntryId]:
    """The ids of the streams' last entries."""
    replies = client.pipeline([("XREVRANGE", name, "+", "-", "COUNT", 1) for name in names])
    last = (raise_if_error(reply) for reply in replies)
    return {name: EntryId.parse(found[0][0]) if found else ZERO_ID for name, found in zip(names, last, strict=True)}


def _before(first: EntryId) -> EntryId:
    """The id after which `first` is the next one possible."""
    if first.seq:
        return EntryId(first.ms, first.seq - 1)
    return EntryId(first.ms - 1, _LARGEST_SEQ) if first.ms else ZERO_ID


def _finished(client: Client, after: dict[str, EntryId], ends: dict[str, EntryId]) -> Iterator[list[Entry]]:
    """What lies after `after` up to `ends`, a page at a time, one stream after the other."""
    for name, end in ends.items():
        while after[name] < end:
            page = _entries(name, client.execute("XRANGE", name, f"({after[name]}", str(end), "COUNT", _PAGE))
            if not page:
                break
            after[name] = page[-1][1]
            yield page


def _followed(client: Client, after: dict[str, EntryId]) -> Iterator[list[Entry]]:
    """What comes after `after`, page by page, for ever."""
    read = _read_each if client.is_cluster else _read_all
    while True:
        for name, items in client.patiently(lambda: read(client, after), what="tail"):
            page = _entries(name.decode(), items)
            after[page[-1][0]] = page[-1][1]
            yield page


def _read_all(client: Client, after: dict[str, EntryId]) -> Reply:
    ids = map(str, after.values())
    return client.execute("XREAD", "COUNT", _PAGE, "BLOCK", _BLOCK_MS, "STREAMS", *after, *ids) or ()


def _read_each(client: Client, after: dict[str, EntryId]) -> Reply:
    """The same where the streams may be on several nodes, none of which can wait for all of them."""
    commands: list[Command] = [("XREAD", "COUNT", _PAGE, "STREAMS", name, str(last)) for name, last in after.items()]
    found = [part for reply in client.pipeline(commands) for part in raise_if_error(reply) or ()]
    if not found:
        time.sleep(_PAUSE_S)
    return found


def _entries(stream: str, items: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Entry]:
    return [(stream, EntryId.parse(entry_id), pairs) for entry_id, pairs in items]


def _as_json(stream: str, entry_id: EntryId, pairs: Sequence[bytes]) -> dict[str, object]:
    return {"stream": stream, "id": str(entry_id), "time": _time(entry_id), **json_fields(pairs)}


def _as_line(stream: str, entry_id: EntryId, pairs: Sequence[bytes]) -> str:
    shown = (
        f"{visible(name)}={clip(visible(value), _SHOWN_CHARS)}"
        for name, value in zip(pairs[::2], pairs[1::2], strict=True)
    )
    return f"{_time(entry_id) or '-'}  {visible(stream)}  {entry_id}  {'  '.join(shown)}"


def _time(entry_id: EntryId) -> str | None:
    """When the entry was added, by its id; None if the id is no time."""
    try:
        moment = datetime.fromtimestamp(entry_id.ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
