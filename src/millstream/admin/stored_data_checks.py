"""Checks of what Redis stores: keys that cannot be read, streams that only grow, and what nothing needs any more."""

from collections.abc import Iterable, Iterator, Sequence

from millstream.admin.examined_data import Data
from millstream.admin.findings import Finding, named_streams, quoted
from millstream.admin.reports import HandlerReport, StreamReport
from millstream.delivery.commit_store import FORMAT
from millstream.model import EntryId
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize
from millstream.redis_client.key_names import HandlerKeys

_FINISHED_ENTRIES = 10_000
_UNREAD_ENTRIES = 1_000_000


def check_unreadable(data: Data) -> Iterator[Finding]:
    """Handlers whose keys, or streams, hold something that no handler of this version has written."""
    for label, some in data.by_handler.items():
        if others := [one for one in some if one.stream_type != "stream"]:
            yield _wrong_type(data.cli, label, others)
        usable = [one for one in some if one.stream_type == "stream" and not _is_newer(one)]
        problems = [(one, one.problem or data.damage.get(one.keys)) for one in usable]
        if unreadable := [(one, problem) for one, problem in problems if problem is not None]:
            one, problem = unreadable[0]
            yield Finding(
                check="unreadable",
                handler=label,
                severity="problem",
                what=f"{label}: its keys on {named_streams([each.stream for each, _ in unreadable])} are unreadable: {problem}",
                why="another program has written there; the handler cannot commit",
                mend=(f"{data.cli} TYPE {quoted(_damaged_key(one.keys, problem))}",),
            )


def _wrong_type(cli: str, label: str, others: Sequence[HandlerReport]) -> Finding:
    one, more = others[0], len(others) - 1
    return Finding(
        check="unreadable",
        handler=label,
        severity="problem",
        what=f"{escape(one.stream)} holds a {one.stream_type} where {label} needs a stream"
        + (f"; and so do {pluralize(more, 'more key')}" if more else ""),
        why="another program has written there; the handler cannot read it, and keeps its progress and state",
        mend=(f"{cli} RENAME {quoted(one.stream)} NEW_NAME  # or delete that key",),
    )


def _damaged_key(keys: HandlerKeys, problem: str) -> str:
    """The key that a problem names, or else the one with what the handler has committed."""
    named = (keys.owners, keys.leases, keys.ready, keys.backoff, keys.parked, keys.awaiting, keys.crashes)
    return next((one for one in (*named, keys.dead_letters) if f" {one}:" in problem), keys.meta)


def check_format(data: Data) -> Iterator[Finding]:
    """Handlers whose keys a newer version of millstream has stored."""
    for label, some in data.by_handler.items():
        if newer := [one for one in some if _is_newer(one)]:
            yield Finding(
                check="format",
                handler=label,
                severity="problem",
                what=f"{label} on {named_streams([one.stream for one in newer])}: {newer[0].problem}",
                why="workers and runs of this version refuse to start; those of the newer one go on",
                mend=("millstream --version  # where the handler runs: install that version here, too",),
            )


def check_growth(data: Data) -> Iterator[Finding]:
    """Streams whose entries all groups have finished, and which were never trimmed."""
    finished = {one.name: _finished(one) for one in data.found.streams if one.groups and one.added == one.length}
    growing = {name: count for name, count in finished.items() if count >= _FINISHED_ENTRIES}
    if growing:
        worst = sorted(growing, key=lambda name: -growing[name])
        trim = f"{data.cli} XTRIM {quoted(worst[0])} MAXLEN '~' {_FINISHED_ENTRIES}"
        yield Finding(
            check="growth",
            severity="warning",
            since_ms=_first_added_ms(one for one in data.found.streams if one.name in growing),
            what=f"{named_streams(worst)}: {sum(growing.values()):,} entries that all groups have finished, and nothing trims",
            why="a stream that is never trimmed grows until Redis is full",
            mend=(f"{trim}  # while no group is further behind; better: millstream worker APP --trim",),
        )
    unread = [one for one in data.found.streams if not one.groups and one.added == one.length >= _UNREAD_ENTRIES]
    if unread:
        yield Finding(
            check="growth",
            severity="warning",
            since_ms=_first_added_ms(unread),
            what=f"{named_streams([one.name for one in unread])}: {sum(one.length for one in unread):,} entries without a "
            "consumer group, and nothing trims",
            why="a stream that is never trimmed grows until Redis is full",
            mend=(f"{data.cli} XTRIM {quoted(unread[0].name)} MAXLEN '~' {_UNREAD_ENTRIES}",),
        )


def _first_added_ms(streams: Iterable[StreamReport]) -> int | None:
    """When the first entry of these streams was added, in Unix milliseconds: nothing has trimmed them since."""
    return min((EntryId.parse(one.first_id).ms for one in streams if one.first_id), default=None)


def check_leftovers(data: Data) -> Iterator[Finding]:
    """Handlers whose app has none of their name any more, or whose streams no longer exist."""
    there = {one.name for one in data.found.streams}
    there |= {one.stream for one in data.found.handlers if one.stream_type != "stream"}
    for label, some in data.by_handler.items():
        app, _, handler = label.partition(".")
        gone = [one.stream for one in some if one.stream not in there and not data.found.hidden_streams]
        if app in data.known and handler not in data.known[app]:
            yield Finding(
                check="leftovers",
                handler=label,
                severity="warning",
                what=f"{label}: the app {app} has no handler {handler} any more",
                why="its progress, state and groups stay in Redis, and its groups keep streams from being trimmed",
                mend=(f"millstream forget {label} --dry-run",),
            )
        elif gone and not data.found.is_sample:
            yield Finding(
                check="leftovers",
                handler=label,
                severity="warning",
                what=f"{label}: its streams are gone: {named_streams(gone)}",
                why="its progress and state stay in Redis",
                mend=(f"millstream forget {label} --dry-run",),
            )


def _is_newer(report: HandlerReport) -> bool:
    return (report.stored_format or 0) > FORMAT


def _finished(stream: StreamReport) -> int:
    """How many entries at the beginning of a stream that was never trimmed all its groups have finished, about.

    0 if it is unknown, or if the first entry is still needed.
    """
    read = [group.entries_read for group in stream.groups]
    if stream.first_id is None or any(count is None for count in read):
        return 0
    if any(EntryId.parse(group.last_delivered_id) < EntryId.parse(stream.first_id) for group in stream.groups):
        return 0
    return max(0, min(count or 0 for count in read) - max(group.pending for group in stream.groups))
