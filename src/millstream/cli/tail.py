"""`millstream tail`: prints the entries of streams as they arrive."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from millstream.admin.time_inputs import parse_start
from millstream.cli.follow import Follower
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_line, print_message, truncate
from millstream.errors import ConfigError, MillstreamError, WrongType
from millstream.model import ZERO_ID, EntryId, Message
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.error_translation import not_a_stream
from millstream.redis_client.escaping import escape, json_fields
from millstream.redis_client.formats import format_time, pluralize
from millstream.redis_client.key_names import is_pattern
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.resp import Reply
from millstream.router import END, Gap, Item, Router
from millstream.router.stream_events import Reason

_PAGE = 500
_SHOWN_CHARS = 200
_GAPS: Mapping[Reason, str] = {
    "trimmed": "entries were trimmed before they could be shown",
    "recreated": "the stream was deleted and created again",
    "rewound": "Redis lost the end of the stream; continuing from its present end",
}


def tail(
    streams: Annotated[
        list[str], typer.Argument(help="The streams, or patterns of them, like 'orders:*'.", metavar="STREAM...")
    ],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where to start: an id, earliest, latest, 15m (ago) or an ISO 8601 time, UTC by default. "
            "Default: latest, with --no-follow earliest.",
        ),
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="ID", help="Start after this id, such as that of the last entry seen.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after this number of entries.")] = None,
    follow: Annotated[
        bool, typer.Option(help="Wait for new entries, or stop at the present end of the streams.")
    ] = True,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """Print the entries of streams and follow them, also after outages of Redis; patterns match new streams, too.

    Unprintable bytes are escaped. --json is lossless: values that are not UTF-8 become {"hex": "..."}.
    """
    if start is not None and after is not None:
        raise ConfigError("--from and --after exclude each other: give only one")
    first = parse_start(start or ("latest" if follow else "earliest"))
    after_id = EntryId.parse(after) if after is not None else first and first.previous()
    names = [name for name in dict.fromkeys(streams) if not is_pattern(name)]
    patterns = list(filter(is_pattern, streams))
    printer = _Printer(as_json=as_json, most=sys.maxsize if limit is None else limit)
    with Client(url) as client:
        if follow:
            client.execute("PING")  # fail at once if Redis is unavailable from the start; wait for it in later outages
            asyncio.run(_follow(client, printer, names, patterns, after_id))
        else:
            _print_existing(client, printer, list(dict.fromkeys((*names, *_matching(client, patterns)))), after_id)


async def _follow(
    client: Client, printer: "_Printer", names: Sequence[str], patterns: Sequence[str], after_id: EntryId | None
) -> None:
    with Router(client.url) as router:
        places = partial(_start_ids, client, after_id)
        follower = Follower(
            client, router, places=places, show=printer.show, on_begun=partial(_print_started, patterns)
        )
        await follower.run(names, patterns)


def _print_started(patterns: Sequence[str], count: int) -> None:
    later = f", and new ones that match {' or '.join(map(escape, patterns))}" if patterns else ""
    print_message(f"following {pluralize(count, 'stream')}{later}; Ctrl-C ends it")


def _start_ids(client: Client, after_id: EntryId | None, names: Sequence[str]) -> Mapping[str, str]:
    """The ids after which the router starts, capped at the streams' ends: a greater id would mean a recreated stream."""
    if after_id is None:
        return dict.fromkeys(names, END)
    ends = (ZERO_ID if isinstance(found, Exception) else _last_of(found) for found in _last_entries(client, names))
    return {name: str(min(after_id, end)) for name, end in zip(names, ends, strict=True)}


def _print_existing(client: Client, printer: "_Printer", names: Sequence[str], after_id: EntryId | None) -> None:
    """Print the entries after `after_id` up to the present end, one stream after the other."""
    lasts = _last_entries(client, names)
    for name, found in zip(names, lasts, strict=True):
        if isinstance(found, WrongType):
            raise not_a_stream(name)
    ends = [_last_of(raise_if_error(found)) for found in lasts]
    missing = _missing(client, [name for name, end in zip(names, ends, strict=True) if end == ZERO_ID])
    for name, end in zip(names, ends, strict=True):
        after = end if after_id is None else after_id
        while after < end:
            page = client.execute("XRANGE", name, f"({after}", str(end), "COUNT", _PAGE)
            if not page:
                break
            for found_id, pairs in page:
                after = EntryId.parse(found_id)
                if printer.show_entry(name, after, pairs):
                    return
            sys.stdout.flush()
    if missing:
        raise MillstreamError(
            f"no such stream: {', '.join(map(escape, missing))}; `millstream info` lists those that exist, and without "
            "--no-follow it waits for them"
        )


def _missing(client: Client, empty: Sequence[str]) -> list[str]:
    """Those of the streams without entries that do not exist; a message names the others."""
    found = client.pipeline([("EXISTS", name) for name in empty])
    for name in (name for name, exists in zip(empty, found, strict=True) if exists != 0):
        print_message(f"{escape(name)}: the stream is empty")
    return [name for name, exists in zip(empty, found, strict=True) if exists == 0]


def _matching(client: Client, patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        found = client.scan_streams(pattern)
        if not found:
            print_message(f"no stream matches {escape(pattern)}")
        yield from found


def _last_entries(client: Client, names: Sequence[str]) -> Sequence[Reply]:
    return client.pipeline([("XREVRANGE", name, "+", "-", "COUNT", 1) for name in names])


def _last_of(found: Reply) -> EntryId:
    return EntryId.parse(found[0][0]) if found else ZERO_ID


class _Printer:
    """Prints at most `most` entries."""

    def __init__(self, *, as_json: bool, most: int) -> None:
        self._as_json = as_json
        self._left = most

    def show(self, item: Item) -> bool:
        """Print an item of a subscription; return whether the limit is reached."""
        if isinstance(item, Message):
            return self.show_entry(item.stream, EntryId.parse(item.id), item.pairs)
        if isinstance(item, Gap):
            self._show_gap(item)
        return False

    def show_entry(self, stream: str, entry_id: EntryId, pairs: Sequence[bytes]) -> bool:
        """Print an entry; return whether the limit is reached."""
        if self._as_json:
            print_json({"stream": stream, "id": str(entry_id), "time": format_time(entry_id.ms), **json_fields(pairs)})
        else:
            shown = (f"{escape(name)}={truncate(escape(value), _SHOWN_CHARS)}" for name, value in pairs_of(pairs))
            print_line(f"{format_time(entry_id.ms) or '-'}  {escape(stream)}  {entry_id}  {'  '.join(shown)}")
        self._left -= 1
        return self._left <= 0

    def _show_gap(self, gap: Gap) -> None:
        if self._as_json:
            print_json({"event": "gap", **asdict(gap)})
            return
        missed = "" if gap.missed is None else f" ({pluralize(gap.missed, 'entry', 'entries')})"
        print_message(f"{escape(gap.stream)}: {_GAPS[gap.reason]}, after {gap.after}{missed}")
