"""Checks of the data in Redis: streams that only grow, entries that wait without a worker, dead letters, leftovers.

Findings are summed up by handler: a handler of 100,000 streams has one line for each kind of trouble.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from millstream.admin.delayed_streams import first_due_ms
from millstream.admin.findings import Finding, quoted, start_command
from millstream.admin.inspection import inspect
from millstream.admin.lag import COUNT_ENTRIES
from millstream.admin.reports import GroupReport, HandlerReport, Inspection, StreamReport
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import FORMAT
from millstream.delivery.restarts import CRASH_LOOP
from millstream.errors import RedisError, WrongType
from millstream.groups.group import ConsumerInfo, consumers_of
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import WAITING, HandlerKeys, stage_of, to_wire
from millstream.redis_client.pipelining import call_all, send_all
from millstream.redis_client.replies import mapping_of

_FINISHED_ENTRIES = 10_000
_UNREAD_ENTRIES = 1_000_000
_NAMED = 3
_RESTART_MS = 30_000  # as long as the restart of a worker or run may take
_WATCHED = 100
_MOST_PARKED = 1_000
_MOST_DIGITS = 15
_MEASURED_STREAMS = 100


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data that the checks examine.

    * `found`: streams and handlers; `consumers`: of each handler on a stream
    * `idle`: pending entries that were idle for `old_ms`, on streams with a live worker
    * `damage`: why the keys of a handler on a stream are unreadable that its report does not look at
    * `due_ms`: when the first delayed message of each stream that has some is due, in Unix milliseconds
    * `letters_since_ms`: when the oldest dead letter of a handler was written, by its label, in Unix milliseconds
    * `parked_since_ms`: since when the first of the parked keys of a handler has been parked, likewise
    * `known`: names of the handlers in the app's file, by app; {} if no file was given
    * `cli`: the redis-cli command that reaches the streams
    """

    found: Inspection
    consumers: Mapping[tuple[str, str], Sequence[ConsumerInfo]]
    idle: Mapping[tuple[str, str], int]
    damage: Mapping[HandlerKeys, str]
    due_ms: Mapping[str, int]
    letters_since_ms: Mapping[str, int]
    parked_since_ms: Mapping[str, int]
    old_ms: int
    known: Mapping[str, Collection[str]]
    cli: str

    @cached_property
    def by_handler(self) -> Mapping[str, Sequence[HandlerReport]]:
        """The reports of each handler, by its label."""
        found: dict[str, list[HandlerReport]] = {}
        for one in self.found.handlers:
            found.setdefault(one.label, []).append(one)
        return found

    @cached_property
    def by_stage(self) -> Mapping[tuple[str, str], Sequence[tuple[str, GroupReport]]]:
        """The progress of each stage, by app and name: its streams, and the group on each."""
        found: dict[tuple[str, str], list[tuple[str, GroupReport]]] = {}
        for stream in self.found.streams:
            for group in stream.groups:
                if stage := stage_of(group.name):
                    found.setdefault(stage, []).append((stream.name, group))
        return found


def read_data(
    client: Client,
    *,
    app: str | None,
    known: Mapping[str, Collection[str]],
    cli: str,
    max_streams: int,
    old_ms: int,
    clock: Clock = SYSTEM_CLOCK,
) -> Data:
    """Read the data of at most `max_streams` streams, in a bounded number of calls. Raises RedisError."""
    found = inspect(client, app, max_streams=max_streams, stuck_first=True, clock=clock)
    places = [(one.stream, _keys(one).group) for one in found.handlers if one.problem is None]
    consumers = consumers_of(client, places)
    alive = [(one.stream, _keys(one).group) for one in found.handlers if one.pending and one.consumers]
    return Data(
        found=found,
        consumers=consumers,
        idle=_count_idle(client, alive, old_ms),
        damage=_find_damage(client, [_keys(one) for one in found.handlers if one.problem is None]),
        due_ms=first_due_ms(
            client, sorted({one.name for one in found.streams} | {one.stream for one in found.handlers})
        ),
        letters_since_ms=_oldest_letters_ms(client, found.handlers),
        parked_since_ms=_oldest_parks_ms(client, found.handlers),
        old_ms=old_ms,
        known=known,
        cli=cli,
    )


def largest_mean_entry_bytes(client: Client) -> int:
    """Average size of the entries of the stream with the largest ones, of some streams. Raises RedisError.

    No entry is read: one that is too large for the output buffer would end the connection.
    """
    names = [to_wire(name) for name in islice(chain.from_iterable(client.scan_pages("*")), _MEASURED_STREAMS)]
    lengths = call_all(client, [("XLEN", name) for name in names])
    sizes = call_all(client, [("MEMORY", "USAGE", name) for name in names])
    return max((size // length for size, length in zip(sizes, lengths, strict=True) if size and length), default=0)


def _find_damage(client: Client, places: Sequence[HandlerKeys]) -> dict[HandlerKeys, str]:
    """Why the key queues of these handlers are unreadable, where another program has written."""
    replies = iter(
        send_all(
            client,
            [one for keys in places for one in (("HLEN", keys.owners), ("ZCARD", keys.leases), ("LLEN", keys.ready))],
        )
    )
    found = {keys: each for keys, *each in zip(places, replies, replies, replies, strict=True)}
    return {keys: str(one) for keys, each in found.items() for one in each if isinstance(one, WrongType)}


def _count_idle(client: Client, places: Sequence[tuple[str, str]], old_ms: int) -> dict[tuple[str, str], int]:
    """How many of the lowest pending entries, which consumers hold, were idle for so long."""
    replies = send_all(
        client,
        [("XPENDING", to_wire(stream), to_wire(group), "IDLE", old_ms, "-", "+", _WATCHED) for stream, group in places],
    )
    counts = {
        place: sum(1 for entry in reply if entry[1] != WAITING.encode())
        for place, reply in zip(places, replies, strict=True)
        if not isinstance(reply, RedisError)
    }
    return {place: count for place, count in counts.items() if count}


def _oldest_letters_ms(client: Client, handlers: Sequence[HandlerReport]) -> dict[str, int]:
    """When the oldest dead letter of each handler was written, of those of `_first_of`. Their ids tell it."""
    some = _first_of([one for one in handlers if one.dead_letters])
    calls = [(COUNT_ENTRIES, (to_wire(_keys(one).dead_letters),), ("0-0", 1, "+")) for one in some]
    replies = zip(some, client.try_scripts(calls), strict=True)
    return _earliest(
        (one.label, int(reply[1].partition(b"-")[0]))
        for one, reply in replies
        if not isinstance(reply, RedisError) and reply[1]
    )


def _oldest_parks_ms(client: Client, handlers: Sequence[HandlerReport]) -> dict[str, int]:
    """Since when the first parked key of each handler has been parked, of those of `_first_of`.

    A handler with more than a thousand such keys on a stream is left out.
    """
    with_many = {one.label for one in handlers if one.parked > _MOST_PARKED}
    some = [one for one in _first_of([one for one in handlers if one.parked]) if one.label not in with_many]
    replies = zip(some, send_all(client, [("HGETALL", _keys(one).parked) for one in some]), strict=True)
    texts = (
        (one.label, text.partition(b" ")[0])
        for one, reply in replies
        if not isinstance(reply, RedisError)
        for text in mapping_of(reply).values()
    )
    # The text of a key that waits until it has left another partition has no time.
    return _earliest((label, int(ms)) for label, ms in texts if ms.isdigit() and len(ms) <= _MOST_DIGITS)


def _first_of(having: Sequence[HandlerReport]) -> list[HandlerReport]:
    """The first hundred handlers on streams, without those with another stream beyond these: they may have older ones."""
    beyond = {one.label for one in having[_WATCHED:]}
    return [one for one in having[:_WATCHED] if one.label not in beyond]


def _earliest(times_ms: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The earliest time of each name."""
    found: dict[str, int] = {}
    for name, at_ms in times_ms:
        found[name] = min(at_ms, found.get(name, at_ms))
    return found


# --- The checks ---


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
            what=f"{_streams(worst)}: {sum(growing.values()):,} entries that all groups have finished, and nothing trims",
            why="a stream that is never trimmed grows until Redis is full",
            mend=(f"{trim}  # while no group is further behind; better: millstream worker APP --trim",),
        )
    unread = [one for one in data.found.streams if not one.groups and one.added == one.length >= _UNREAD_ENTRIES]
    if unread:
        yield Finding(
            check="growth",
            severity="warning",
            what=f"{_streams([one.name for one in unread])}: {sum(one.length for one in unread):,} entries without a "
            "consumer group, and nothing trims",
            why="a stream that is never trimmed grows until Redis is full",
            mend=(f"{data.cli} XTRIM {quoted(unread[0].name)} MAXLEN '~' {_UNREAD_ENTRIES}",),
        )


def check_dead_consumers(data: Data) -> Iterator[Finding]:
    """Consumers whose workers have ended: their pending entries wait; without any, they are names without a worker."""
    now_ms = _now_ms()
    for label, some in data.by_handler.items():
        gone = [
            (one, consumer)
            for one in some
            for consumer in data.consumers.get((one.stream, _keys(one).group), ())
            if consumer.idle_ms >= data.old_ms and consumer.name not in one.workers and consumer.name != WAITING
        ]
        holding = [(one, consumer) for one, consumer in gone if consumer.pending]
        empty = [(one, consumer) for one, consumer in gone if not consumer.pending]
        if holding:
            one = holding[0][0]
            held = sum(each.pending for _, each in holding)
            where = f"{quoted(one.stream)} {quoted(_keys(one).group)}"
            claimants = [name for each in some for name in each.workers if each.engine == "workers"]
            yield Finding(
                check="dead-consumers",
                handler=label,
                severity="problem",
                since_ms=now_ms - max(each.idle_ms for _, each in holding),
                what=f"{label}: {pluralize(held, 'pending entry', 'pending entries')} of {_names(holding)}, idle "
                f"for {format_age(min(each.idle_ms for _, each in holding))}, on {_streams([each.stream for each, _ in holding])}",
                why="these messages wait until a live worker claims them",
                mend=(
                    f"millstream group claim {where} {quoted(claimants[0])} --min-idle {data.old_ms // 1000}s"
                    if claimants
                    else start_command("workers", some[0].app),
                ),
            )
        if empty:
            one = empty[0][0]
            consumers = pluralize(len(empty), "consumer of an ended worker", "consumers of ended workers")
            yield Finding(
                check="dead-consumers",
                handler=label,
                severity="warning",
                what=f"{label}: {consumers} ({_names(empty)}), with nothing pending",
                why="they are only names, but hide who is alive",
                mend=(
                    f"millstream group clean {quoted(one.stream)} {quoted(_keys(one).group)} --idle {data.old_ms // 1000}s",
                ),
            )


def check_idle_entries(data: Data) -> Iterator[Finding]:
    """Entries that were idle for long, though workers are alive, which claim idle entries."""
    for label, some in data.by_handler.items():
        places = [place for one in some if (place := (one.stream, _keys(one).group)) in data.idle]
        if places:
            stream, group = places[0]
            yield Finding(
                check="idle-entries",
                handler=label,
                severity="warning",
                what=f"{label}: {pluralize(sum(data.idle[place] for place in places), 'entry', 'entries')} or more pending and idle for "
                f"{format_age(data.old_ms)}, on {_streams([stream for stream, _ in places])}",
                why="live workers renew or claim pending entries, at once those that were nacked (idle for 24 h or "
                "more): these workers hang, or have a longer --claim",
                mend=(f"millstream group pending {quoted(stream)} {quoted(group)} --min-idle {data.old_ms // 1000}s",),
            )


def check_waiting(data: Data) -> Iterator[Finding]:
    """Backlogs with no worker and no run alive."""
    for label, some in data.by_handler.items():
        # Runs on Spark may be jobs that start once a day; workers are there all the time.
        engine = some[0].engine
        old_ms = min(data.old_ms, _RESTART_MS) if engine == "workers" else data.old_ms
        waiting = [one for one in some if one.lag and not one.consumers and (one.oldest_age_ms or 0) >= old_ms]
        if waiting and not any(one.consumers for one in some):
            yield Finding(
                check="waiting",
                handler=label,
                severity="problem" if engine == "workers" else "warning",
                since_ms=_now_ms() - max(one.oldest_age_ms or 0 for one in waiting),
                what=f"{label}: {pluralize(sum(one.lag or 0 for one in waiting), 'entry waits', 'entries wait')}, the oldest for "
                f"{format_age(max(one.oldest_age_ms or 0 for one in waiting))}, and no worker or run is alive",
                why="nothing processes them",
                mend=(start_command(engine, some[0].app),),
            )


def check_late(data: Data) -> Iterator[Finding]:
    """Backlogs that workers or runs do not keep up with, though some are alive."""
    for label, some in data.by_handler.items():
        late = [one for one in some if one.lag and one.consumers and (one.oldest_age_ms or 0) >= data.old_ms]
        late = [one for one in late if not one.paused]
        if late:
            oldest_ms = max(one.oldest_age_ms or 0 for one in late)
            yield Finding(
                check="late",
                handler=label,
                severity="warning",
                since_ms=_now_ms() - oldest_ms,
                what=f"{label}: {pluralize(sum(one.lag or 0 for one in late), 'entry waits', 'entries wait')}, the oldest for "
                f"{format_age(oldest_ms)}, on {_streams([one.stream for one in late])}",
                why="its workers do not keep up, or its first messages are stuck",
                mend=(f"millstream key list {label}", start_command(late[0].engine, late[0].app)),
            )


def check_stages(data: Data) -> Iterator[Finding]:
    """Stages that make no progress: entries have waited for long, with a run alive or without."""
    for (app, stage), some in data.by_stage.items():
        old = [(stream, one) for stream, one in some if one.lag and (one.oldest_age_ms or 0) >= data.old_ms]
        if old:
            oldest_ms = max(one.oldest_age_ms or 0 for _, one in old)
            is_alive = any(one.alive for _, one in old)
            yield Finding(
                check="stages",
                severity="warning",
                since_ms=_now_ms() - oldest_ms,
                what=f"stage {escape(app)}.{escape(stage)}: {pluralize(sum(one.lag or 0 for _, one in old), 'entry waits', 'entries wait')}, "
                f"the oldest for {format_age(oldest_ms)}, on {_streams(stream for stream, _ in old)}",
                why="its run does not keep up, or its query fails again and again" if is_alive else "no run is alive",
                mend=(start_command("spark", quoted(app)),),
            )


def check_overdue(data: Data) -> Iterator[Finding]:
    """Delayed messages that are due and not moved to their streams."""
    late = {stream: due_ms for stream, due_ms in data.due_ms.items() if _now_ms() - due_ms >= _RESTART_MS}
    if late:
        first = min(late, key=lambda stream: late[stream])
        yield Finding(
            check="overdue",
            severity="problem",
            since_ms=late[first],
            what=f"{_streams(late)}: delayed messages are overdue, the first for {format_age(_now_ms() - late[first])}",
            why="workers and runs that read the stream move them, and none does",
            mend=(f"millstream delayed list {quoted(first)}",),
        )


def check_restarts(data: Data) -> Iterator[Finding]:
    """Worker processes that have ended unrequested."""
    for one in data.found.restarts:
        yield Finding(
            check="restarts",
            severity="problem" if one.count >= CRASH_LOOP else "warning",
            what=one.describe(),
            why="the messages that a process ran are run again each time, and one that crashes its process becomes a dead "
            "letter in the end; its log has the cause",
            mend=("millstream dlq list --reason crashed",),
        )


def check_long_runs(data: Data) -> Iterator[Finding]:
    """Messages that workers have been running for long."""
    runs = data.found.long_runs
    now_ms = _now_ms()
    for label in dict.fromkeys(one.handler for one in runs):
        some = [one for one in runs if one.handler == label]
        more = f"; and {pluralize(len(some) - 1, 'more message')}" if some[1:] else ""
        app = label.partition(".")[0]
        alive = {name for one in data.found.handlers if one.app == app for name in one.workers}
        stands_still = any(one.isolated and alive == {one.worker} for one in some)
        yield Finding(
            check="long-runs",
            handler=label,
            severity="problem" if stands_still else "warning",
            since_ms=some[0].started_ms,
            what=f"{some[0].describe(now_ms)}{more}",
            why="no other process of the app is alive: all its handlers wait until the run has ended"
            if stands_still
            else "the handler may hang, and the messages behind it wait; the log of that worker shows where the handler is",
            mend=(
                *((start_command("workers", app),) if stands_still else ()),
                f"millstream key list {label}",
                f"py-spy dump --pid PID  # of the worker {some[0].worker}",
            ),
        )


def check_dead_letters(data: Data) -> Iterator[Finding]:
    """Dead letters that wait for an operator."""
    for label, some in data.by_handler.items():
        if count := sum(one.dead_letters for one in some):
            yield Finding(
                check="dead-letters",
                handler=label,
                severity="warning",
                what=f"{label}: {pluralize(count, 'dead letter')}",
                since_ms=data.letters_since_ms.get(label),
                why="these messages were not processed, and stay in Redis until they are redriven or purged",
                mend=(f"millstream dlq list {label}", f"millstream dlq redrive {label}"),
            )


def check_parked(data: Data) -> Iterator[Finding]:
    """Keys that are parked."""
    for label, some in data.by_handler.items():
        if count := sum(one.parked for one in some):
            yield Finding(
                check="parked",
                handler=label,
                severity="warning",
                what=f"{label}: {pluralize(count, 'parked key')}",
                since_ms=data.parked_since_ms.get(label),
                why=f"{'its' if count == 1 else 'their'} messages wait until an operator unparks the key",
                mend=(f"millstream key list {label}", f"millstream key unpark {label} KEY"),
            )


def check_blocked(data: Data) -> Iterator[Finding]:
    """Keys whose first message is retried without end: its attempts have failed, or it waits for newer code."""
    for label, some in data.by_handler.items():
        if count := sum(one.blocked for one in some):
            yield Finding(
                check="blocked",
                handler=label,
                severity="warning",
                what=f"{label}: {pluralize(count, 'blocked key')}",
                why="its first message has failed all its attempts or waits for newer code, and is retried without end, and "
                "the others wait: mend the cause, and it goes on by itself",
                mend=(f"millstream key list {label}", f"millstream key skip {label} KEY  # or give that message up"),
            )


def check_paused(data: Data) -> Iterator[Finding]:
    """Handlers that are paused."""
    for label, some in data.by_handler.items():
        paused = [one.stream for one in some if one.paused]
        if paused:
            pauses = [one.pause for one in some if one.pause]
            opened = next((one for one in pauses if one.by == "breaker"), None)
            yield Finding(
                check="paused",
                handler=label,
                severity="problem" if opened else "warning",
                since_ms=min((one.at_ms for one in pauses if one.at_ms), default=None),
                what=f"{label}: paused on {_streams(paused)}",
                why=f"it is {(opened or pauses[0]).reason}; nothing new of it is processed",
                mend=(f"millstream resume {label}{'  # once the cause is mended' if opened else ''}",),
            )


def check_unreadable(data: Data) -> Iterator[Finding]:
    """Handlers whose keys hold something that no handler of this version has written."""
    for label, some in data.by_handler.items():
        problems = [(one, one.problem or data.damage.get(_keys(one))) for one in some if not _is_newer(one)]
        if unreadable := [(one, problem) for one, problem in problems if problem is not None]:
            one, problem = unreadable[0]
            yield Finding(
                check="unreadable",
                handler=label,
                severity="problem",
                what=f"{label}: its keys on {_streams([each.stream for each, _ in unreadable])} are unreadable: {problem}",
                why="another program has written there; the handler cannot commit",
                mend=(f"{data.cli} TYPE {quoted(_damaged_key(_keys(one), problem))}",),
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
                what=f"{label} on {_streams([one.stream for one in newer])}: {newer[0].problem}",
                why="workers and runs of this version refuse to start; those of the newer one go on",
                mend=("millstream --version  # where the handler runs: install that version here, too",),
            )


def check_leftovers(data: Data) -> Iterator[Finding]:
    """Handlers whose app has none of their name any more, or whose streams no longer exist."""
    there = {one.name for one in data.found.streams}
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
                what=f"{label}: its streams are gone: {_streams(gone)}",
                why="its progress and state stay in Redis",
                mend=(f"millstream forget {label} --dry-run",),
            )


DATA_CHECKS: Mapping[str, Callable[[Data], Iterable[Finding]]] = {
    "unreadable": check_unreadable,
    "format": check_format,
    "dead-consumers": check_dead_consumers,
    "idle-entries": check_idle_entries,
    "waiting": check_waiting,
    "late": check_late,
    "stages": check_stages,
    "overdue": check_overdue,
    "restarts": check_restarts,
    "long-runs": check_long_runs,
    "dead-letters": check_dead_letters,
    "parked": check_parked,
    "blocked": check_blocked,
    "paused": check_paused,
    "growth": check_growth,
    "leftovers": check_leftovers,
}


# --- Texts and sums ---


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _keys(report: HandlerReport) -> HandlerKeys:
    return HandlerKeys(report.app, report.handler, report.stream)


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


def _streams(names: Iterable[str]) -> str:
    found = sorted(set(names))
    some = ", ".join(map(escape, found[:_NAMED]))
    return some if len(found) <= _NAMED else f"{some} and {pluralize(len(found) - _NAMED, 'more stream')}"


def _names(consumers: Sequence[tuple[HandlerReport, ConsumerInfo]]) -> str:
    found = sorted({consumer.name for _, consumer in consumers})
    return ", ".join(map(escape, found[:_NAMED])) + (", ..." if len(found) > _NAMED else "")
