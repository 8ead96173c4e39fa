"""Checks of entries that wait: held by consumers that are gone or hang, read by nothing, too old, or past their time."""

from collections.abc import Iterator, Mapping, Sequence

from millstream.admin.examined_data import Data
from millstream.admin.findings import Finding, named_streams, quoted, start_command
from millstream.admin.reports import HandlerReport
from millstream.delivery.query_progress import QueryProgress
from millstream.groups.group import ConsumerInfo
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import WAITING

_NAMED = 3
_RESTART_MS = 30_000  # as long as the restart of a worker or run may take
_IN_A_ROW = 2


def check_dead_consumers(data: Data) -> Iterator[Finding]:
    """Consumers whose workers have ended: their pending entries wait; without any, they are names without a worker."""
    for label, some in data.by_handler.items():
        gone = [
            (one, consumer)
            for one in some
            for consumer in data.consumers.get((one.stream, one.keys.group), ())
            if consumer.idle_ms >= data.old_ms and consumer.name not in one.workers and consumer.name != WAITING
        ]
        holding = [(one, consumer) for one, consumer in gone if consumer.pending]
        empty = [(one, consumer) for one, consumer in gone if not consumer.pending]
        if holding:
            one = holding[0][0]
            held = sum(each.pending for _, each in holding)
            where = f"{quoted(one.stream)} {quoted(one.keys.group)}"
            claimants = [name for each in some for name in each.workers if each.engine == "workers"]
            yield Finding(
                check="dead-consumers",
                handler=label,
                severity="problem",
                since_ms=data.now_ms - max(each.idle_ms for _, each in holding),
                what=f"{label}: {pluralize(held, 'pending entry', 'pending entries')} of {_names(holding)}, idle "
                f"for {format_age(min(each.idle_ms for _, each in holding))}, on {named_streams([each.stream for each, _ in holding])}",
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
                since_ms=data.now_ms - max(each.idle_ms for _, each in empty),
                what=f"{label}: {consumers} ({_names(empty)}), with nothing pending",
                why="they are only names, but hide who is alive",
                mend=(
                    f"millstream group clean {quoted(one.stream)} {quoted(one.keys.group)} --idle {data.old_ms // 1000}s",
                ),
            )


def check_idle_entries(data: Data) -> Iterator[Finding]:
    """Entries that were idle for long, though workers are alive, which claim idle entries."""
    for label, some in data.by_handler.items():
        places = [place for one in some if (place := (one.stream, one.keys.group)) in data.idle]
        if places:
            stream, group = places[0]
            idle = [data.idle[place] for place in places]
            yield Finding(
                check="idle-entries",
                handler=label,
                severity="warning",
                since_ms=data.now_ms - max(one.idle_ms for one in idle),
                what=f"{label}: {pluralize(sum(one.count for one in idle), 'entry', 'entries')} or more pending and idle for "
                f"{format_age(data.old_ms)}, on {named_streams([stream for stream, _ in places])}",
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
                since_ms=data.now_ms - max(one.oldest_age_ms or 0 for one in waiting),
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
                since_ms=data.now_ms - oldest_ms,
                what=f"{label}: {pluralize(sum(one.lag or 0 for one in late), 'entry waits', 'entries wait')}, the oldest for "
                f"{format_age(oldest_ms)}, on {named_streams([one.stream for one in late])}",
                why="its workers do not keep up, or its first messages are stuck",
                mend=(f"millstream key list {label}", start_command(late[0].engine, late[0].app)),
            )


def check_stages(data: Data) -> Iterator[Finding]:
    """Stages that make no progress: entries have waited for long, with a run alive or without."""
    for (app, stage), some in data.by_stage.items():
        old = [(stream, one) for stream, one in some if one.lag and (one.oldest_age_ms or 0) >= data.old_ms]
        if old:
            oldest_ms = max(one.oldest_age_ms or 0 for _, one in old)
            yield Finding(
                check="stages",
                severity="warning",
                since_ms=data.now_ms - oldest_ms,
                what=f"stage {escape(app)}.{escape(stage)}: {pluralize(sum(one.lag or 0 for _, one in old), 'entry waits', 'entries wait')}, "
                f"the oldest for {format_age(oldest_ms)}, on {named_streams(stream for stream, _ in old)}",
                why=_why_late(data, (app, stage), is_alive=any(one.alive for _, one in old)),
                mend=(start_command("spark", app),),
            )


def _why_late(data: Data, stage: tuple[str, str], *, is_alive: bool) -> str:
    if not is_alive:
        return "no run is alive"
    return "its query fails again and again" if stage in _failing(data) else "its run does not keep up"


def check_failed_queries(data: Data) -> Iterator[Finding]:
    """Queries on Spark that have failed in a row, with nothing committed in between."""
    for (app, name), query in _failing(data).items():
        label = f"{app}.{name}"
        is_handler = label in data.by_handler
        yield Finding(
            check="failed-queries",
            handler=label if is_handler else None,
            severity="problem",
            since_ms=query.failing_since_ms,
            what=f"{'' if is_handler else 'stage '}{escape(label)}: its query has failed {query.failures:,} times in a row, "
            "and committed nothing in between",
            why=f"the last failure is {query.last_failure or 'unknown'}; mend its cause, and start a new run, which takes over",
            mend=(start_command("spark", app),),
        )


def _failing(data: Data) -> Mapping[tuple[str, str], QueryProgress]:
    """The queries that have failed in a row, by app and name of the handler or stage."""
    return {query: one for query, one in data.queries.items() if one.failures >= _IN_A_ROW}


def check_overdue(data: Data) -> Iterator[Finding]:
    """Delayed messages that are due and not moved to their streams."""
    late = {stream: due_ms for stream, due_ms in data.due_ms.items() if data.now_ms - due_ms >= _RESTART_MS}
    if late:
        first = min(late, key=lambda stream: late[stream])
        yield Finding(
            check="overdue",
            severity="problem",
            since_ms=late[first],
            what=f"{named_streams(late)}: delayed messages are overdue, the first for {format_age(data.now_ms - late[first])}",
            why="workers and runs that read the stream move them, and none does",
            mend=(f"millstream delayed list {quoted(first)}",),
        )


def _names(consumers: Sequence[tuple[HandlerReport, ConsumerInfo]]) -> str:
    found = sorted({consumer.name for _, consumer in consumers})
    return ", ".join(map(escape, found[:_NAMED])) + (", ..." if len(found) > _NAMED else "")
