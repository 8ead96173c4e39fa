"""Overview of a deployment for operators: the findings that need attention, as sentences, and all readers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from millstream.admin.consumption_summary import ReaderReport, summarize_readers
from millstream.admin.data_checks import DATA_CHECKS
from millstream.admin.doctor import Diagnosis, diagnose
from millstream.admin.figure_history import FigureHistory, Sample
from millstream.admin.findings import Finding, run_check
from millstream.admin.lag_trend import TREND_MS, rising_lags
from millstream.admin.total_checks import letters_elsewhere, merge_totals, old_backlogs, stuck_elsewhere
from millstream.admin.total_readers import newest_totals, with_totals
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age
from millstream.redis_client.pipelining import server_time_ms

_RISING = "rising"
_OF_DATA = frozenset((*DATA_CHECKS, _RISING))
_OF_REDIS = ("reachable", "access", "role", "cluster", "eviction", "persistence", "memory", "disk", "data")
"""Checks of Redis itself that concern the messages of today. `millstream doctor` makes all of them."""

LISTED = frozenset((*_OF_DATA, *_OF_REDIS))
"""The checks whose findings may be in the attention list."""

QUOTING_ERRORS = frozenset(("paused", "restarts", "failed-queries"))
"""Checks whose findings quote errors, in what follows from the fact."""

_LONG_RUNS = "long-runs"
"""The check whose fact itself quotes a message."""

_EXPLAINING_LAG = frozenset(("late", "waiting", "paused", "failed-queries"))
"""Checks whose findings say why entries of a handler wait."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The findings that need attention, and the readers. Problems come first, and those of data before those of Redis.

    `diagnosis`: all findings. `totals`: where these are of a sample of streams, the figures of handlers on all streams, which
    the readers have, too; None if there are none yet.
    """

    attention: tuple[Finding, ...]
    readers: tuple[ReaderReport, ...]
    diagnosis: Diagnosis
    totals: Sample | None = None

    @property
    def needs_attention(self) -> bool:
        """Whether a finding concerns messages now or soon, and not only a setting that may matter later."""
        return any(one.severity == "problem" or one.check in _OF_DATA for one in self.attention)

    @property
    def state_of_health(self) -> str:
        """One sentence for a deployment that needs no attention."""
        waiting = [one.oldest_age_ms for one in self.readers if one.lag and one.oldest_age_ms is not None]
        sample = f" on the {self.diagnosis.streams:,} streams of the sample" if self.diagnosis.is_sample else ""
        if not self.readers:
            return f"No handler has run{sample or ' on this Redis'} yet."
        sample = f"{sample}, which were checked" if sample and self.totals else sample
        oldest = f"The oldest entry that waits is {format_age(max(waiting))} old." if waiting else "No entry waits."
        letters = sum(one.dead_letters for one in self.readers)
        old = f" Older dead letters that wait for an operator: {letters:,}." if letters else ""
        return f"All handlers keep up{sample}. {oldest}{old}"


def read_overview(client: Client, *, max_streams: int = 1_000, old_ms: int = 600_000) -> Overview:
    """Run the checks of `millstream doctor` and sum up the readers. Changes nothing.

    * `max_streams`: of more streams, examine a sample of this size
    * `old_ms`: from which age on entries that wait and silent consumers need attention, in milliseconds

    A check that Redis refuses is a finding. Raises ConfigError for an invalid URL.
    """
    diagnosis = diagnose(client, max_streams=max_streams, old_ms=old_ms)
    readers = () if diagnosis.inspection is None else summarize_readers(diagnosis.inspection)
    totals = newest_totals(client) if diagnosis.is_sample else None
    urgent = [one for one in diagnosis.findings if one.severity != "ok" and one.check in LISTED and not _is_old(one)]
    sampled = {one.name: one for one in readers if one.kind == "handler"}
    if totals is not None:
        readers = with_totals(client, readers, totals)
        urgent += old_backlogs(readers, totals, _explained(urgent), old_ms)
        urgent = merge_totals(urgent, [*stuck_elsewhere(urgent, sampled, totals)])
    trends = run_check(_RISING, partial(_trends, client, readers, _explained(urgent), sampled, totals))
    urgent = merge_totals(urgent, [*trends])
    return Overview(
        attention=tuple(sorted(urgent, key=_urgency)),
        readers=readers,
        diagnosis=diagnosis,
        totals=totals,
    )


def sentence_of(found: Finding, *, with_content: bool) -> str:
    """A finding as a sentence; without `with_content` it quotes no message and no error."""
    if not with_content and found.check == _LONG_RUNS:
        return f"{found.handler}: a message has been running for long."
    is_short = not found.why or (not with_content and found.check in QUOTING_ERRORS)
    return f"{found.what}." if is_short else f"{found.what}: {found.why}."


def _is_old(found: Finding) -> bool:
    """Whether it is of dead letters to which none was added: the table of readers has them, and `millstream doctor`."""
    return found.check == "dead-letters" and found.severity == "warning" and found.is_checked


def _explained(found: Sequence[Finding]) -> set[str]:
    """The handlers of which a finding says why their entries wait."""
    return {one.handler for one in found if one.handler is not None and one.check in _EXPLAINING_LAG}


def _trends(
    client: Client,
    readers: Sequence[ReaderReport],
    explained: Collection[str],
    sampled: Mapping[str, ReaderReport],
    totals: Sample | None,
) -> Iterator[Finding]:
    """What the history shows: lags of handlers that work and are not `explained`, and dead letters outside of the sample."""
    running = {one.name for one in readers if one.kind == "handler" and one.alive}.difference(explained)
    if running or totals is not None:
        samples = FigureHistory(client).read(server_time_ms(client) - TREND_MS)
        yield from rising_lags(samples, running)
        if totals is not None:
            yield from letters_elsewhere(samples, sampled, totals)


def _urgency(found: Finding) -> tuple[bool, bool, float]:
    return found.severity != "problem", found.check not in _OF_DATA, found.since_ms or float("inf")
