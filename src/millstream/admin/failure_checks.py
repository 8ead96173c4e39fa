"""Checks of what fails or is held back: processes that end, messages and keys that do not go on, paused handlers."""

from collections.abc import Iterator

from millstream.admin.examined_data import Data, NewLetters
from millstream.admin.findings import Finding, named_streams, start_command
from millstream.admin.lag_trend import TREND_MS
from millstream.delivery.restarts import CANNOT_CONTINUE, CRASH_LOOP
from millstream.redis_client.formats import format_age, pluralize


def check_restarts(data: Data) -> Iterator[Finding]:
    """Worker processes that have ended unrequested."""
    for one in data.found.restarts:
        is_final = CANNOT_CONTINUE in one.cause
        yield Finding(
            check="restarts",
            severity="problem" if one.count >= CRASH_LOOP else "warning",
            since_ms=data.now_ms - one.first_age_ms,
            what=one.number,
            why=one.last
            if is_final
            else f"{one.last}; the messages that a process ran are run again each time, and one that crashes its process "
            "becomes a dead letter in the end; its log has the cause",
            mend=(f"{start_command('workers', one.app)}; once its cause is mended",)
            if is_final
            else ("millstream dlq list --reason crashed",),
        )


def check_long_runs(data: Data) -> Iterator[Finding]:
    """Messages that workers have been running for long."""
    runs = data.found.long_runs
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
            what=f"{some[0].describe(data.now_ms)}{more}",
            why="no other process of the app is alive: all its handlers wait until the run has ended"
            if stands_still
            else "the handler may hang, and the messages behind it wait; the log of that worker shows where the handler is",
            mend=(
                *((start_command("workers", app),) if stands_still else ()),
                *((f"millstream key list {label}",) if any(one.key is not None for one in some) else ()),
                f"py-spy dump --pid PID  # of the worker {some[0].worker}",
            ),
        )


def check_dead_letters(data: Data) -> Iterator[Finding]:
    """Dead letters that wait for an operator: a problem while more of them come."""
    for label, some in data.by_handler.items():
        if count := sum(one.dead_letters for one in some):
            yield letters_finding(label, count, data.new_letters.get(label), data.letters_since_ms.get(label))


def letters_finding(label: str, count: int, new: NewLetters | None, since_ms: int | None = None) -> Finding:
    """The finding about `count` dead letters of a handler, some of them `new`; `since_ms`: its start if none is."""
    return Finding(
        check="dead-letters",
        handler=label,
        severity="problem" if new else "warning",
        since_ms=new.since_ms if new else since_ms,
        what=f"{label}: {pluralize(count, 'dead letter')}{_growth_of(new) if new else ''}",
        why="these messages were not processed, and stay in Redis until they are redriven or purged",
        mend=(f"millstream dlq list {label}", f"millstream dlq redrive {label}"),
    )


def _growth_of(new: NewLetters) -> str:
    return f", {new.count:,}{'' if new.is_exact else ' or more'} of them new within {format_age(TREND_MS)}"


def check_parked(data: Data) -> Iterator[Finding]:
    """Keys that are parked."""
    for label, some in data.by_handler.items():
        if count := sum(one.parked for one in some):
            yield parked_finding(label, count, data.parked_since_ms.get(label))


def parked_finding(label: str, count: int, since_ms: int | None = None) -> Finding:
    """The finding about `count` parked keys of a handler."""
    return Finding(
        check="parked",
        handler=label,
        severity="warning",
        since_ms=since_ms,
        what=f"{label}: {pluralize(count, 'parked key')}",
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
                since_ms=min(filter(None, (one.blocked_since_ms for one in some)), default=None),
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
                what=f"{label}: paused on {named_streams(paused)}",
                why=f"it is {(opened or pauses[0]).reason}; nothing new of it is processed",
                mend=(f"millstream resume {label}{'  # once the cause is mended' if opened else ''}",),
            )
