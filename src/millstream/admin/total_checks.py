"""Checks of totals: what needs attention on other streams than those of the sample that the overview checks. No I/O."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from millstream.admin.consumption_summary import ReaderReport
from millstream.admin.examined_data import NewLetters
from millstream.admin.failure_checks import letters_finding, parked_finding
from millstream.admin.figure_history import MOST_HANDLERS, HandlerSample, Sample
from millstream.admin.findings import Finding, start_command
from millstream.redis_client.formats import format_age, pluralize


def merge_totals(found: Sequence[Finding], by_totals: Sequence[Finding]) -> list[Finding]:
    """All of them, without those of the sample that totals say more about: of the same check and the same handler."""
    renewed = {(one.check, one.handler) for one in by_totals}
    return [*(one for one in found if (one.check, one.handler) not in renewed), *by_totals]


def old_backlogs(
    readers: Sequence[ReaderReport], totals: Sample, explained: Collection[str], old_ms: int
) -> Iterator[Finding]:
    """Handlers whose oldest entry has waited for `old_ms` on any stream, but for those that are `explained`."""
    by_name: Mapping[str, ReaderReport] = {one.name: one for one in readers if one.kind == "handler"}
    for label, one in totals.handlers.items():
        reader, age_ms = by_name[label], one.oldest_ms or 0
        if label in explained or not one.lag or age_ms < old_ms or one.paused == one.streams:
            continue
        on_spark = bool(one.modes) and all(mode.startswith("spark") for mode in one.modes)
        waits = f"{label}: {pluralize(one.lag, 'entry waits', 'entries wait')} on {pluralize(one.streams, 'stream')}"
        start = start_command("spark" if on_spark else "workers", label.partition(".")[0])
        if reader.alive:
            yield Finding(
                check="late",
                handler=label,
                severity="warning",
                since_ms=totals.at_ms - age_ms,
                what=f"{waits}, the oldest for {format_age(age_ms)}",
                why=f"{'it is paused on some of them, ' if one.paused else ''}its workers do not keep up, or its first messages "
                "are stuck",
                mend=(f"millstream key list {label}", start),
            )
        else:
            yield Finding(
                check="waiting",
                handler=label,
                severity="warning" if on_spark else "problem",
                since_ms=totals.at_ms - age_ms,
                what=f"{waits}, the oldest for {format_age(age_ms)}, and no worker or run is alive",
                why="nothing processes them",
                mend=(start,),
            )


def stuck_elsewhere(found: Sequence[Finding], sampled: Mapping[str, ReaderReport], totals: Sample) -> Iterator[Finding]:
    """Parked keys and pauses of handlers with more of them on all streams than on those of the sample.

    `found`: what the checks of the sample have found, of which a pause keeps its reason and its start.
    """
    pauses = {one.handler: one for one in found if one.check == "paused"}
    for label, one, known in _beyond(sampled, totals):
        if one.parked > (known.parked if known else 0):
            yield parked_finding(label, one.parked)
        if one.paused > (known.paused if known else 0):
            what = f"{label}: paused on {one.paused:,} of its {pluralize(one.streams, 'stream')}"
            yield replace(pauses[label], what=what) if label in pauses else _pause_of(label, what)


def letters_elsewhere(
    samples: Sequence[Sample], sampled: Mapping[str, ReaderReport], totals: Sample
) -> Iterator[Finding]:
    """Dead letters of handlers with more of them on all streams than on those of the sample, while they grow.

    `samples`: the history since `TREND_MS`.
    """
    for label, one, known in _beyond(sampled, totals):
        if one.dead_letters > (known.dead_letters if known else 0):
            new = _new_letters(samples, label, one.dead_letters)
            if new is not None:
                yield letters_finding(label, one.dead_letters, new)


def _beyond(
    sampled: Mapping[str, ReaderReport], totals: Sample
) -> Iterator[tuple[str, HandlerSample, ReaderReport | None]]:
    """The handlers that have other streams than those of the sample, and what is known of these.

    Of the others the sample is newer than the totals.
    """
    for label, one in totals.handlers.items():
        known = sampled.get(label)
        if known is None or known.streams < one.streams:
            yield label, one, known


def _pause_of(label: str, what: str) -> Finding:
    """The finding about a pause whose reason is not read."""
    return Finding(
        check="paused",
        handler=label,
        severity="warning",
        what=what,
        why="an operator or its breaker has paused it; nothing new of it is processed there",
        mend=(f"millstream resume {label}",),
    )


def _new_letters(samples: Sequence[Sample], label: str, most: int) -> NewLetters | None:
    """By how much the total of dead letters has grown from sample to sample; None if it has not. At most `most` are left."""
    dead = [(one.at_ms, one.handlers[label].dead) for one in samples if label in one.handlers]
    dead = [*_before_first(samples, label), *dead]
    known = [(at_ms, count) for at_ms, count in dead if count is not None]
    steps = [(at_ms, count - before) for (_, before), (at_ms, count) in pairwise(known)]
    grown = [(at_ms, more) for at_ms, more in steps if more > 0]
    if not grown:
        return None
    return NewLetters(
        count=min(sum(more for _, more in grown), most),
        is_exact=len(known) == len(dead) and all(more >= 0 for _, more in steps),
        since_ms=grown[0][0],
    )


def _before_first(samples: Sequence[Sample], label: str) -> Iterator[tuple[int, int | None]]:
    """The total in the last sample that does not have the handler yet: it had none of the dead letters that are left.

    A full sample may have left out a handler with dead letters, so it says nothing.
    """
    for before, after in pairwise(samples):
        if label in before.handlers:
            return
        if (one := after.handlers.get(label)) is not None:
            if one.dead is not None and len(before.handlers) < 2 * MOST_HANDLERS:
                yield before.at_ms, one.dead - one.dead_letters
            return
