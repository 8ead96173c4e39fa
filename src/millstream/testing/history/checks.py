"""The checks of a history, of a log of events or of an output stream."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, get_args

from millstream.errors import ConfigError
from millstream.model import EntryId, Limit
from millstream.testing.history.account import Account
from millstream.testing.history.events import Event, EventLog, Kind
from millstream.testing.history.limits import LimitedRuns
from millstream.testing.history.report import Finding, Report, report_of
from millstream.testing.history.timers import Timers

Key = TypeVar("Key", bound=bytes | str | None)

_TIMER_COUNTS = {"timer_set": "timers_set", "timer_canceled": "timers_canceled", "timer_came": "timers_came"}
"""The kinds of events of timers, and the names of their counts in the report."""


def check(
    events: Iterable[Event],
    *,
    handlers: Mapping[str, Iterable[str]] | None = None,
    drained: bool = True,
    overlap: bool = True,
    late_ms: float | None = None,
    limits: Mapping[str, Limit] | None = None,
    rate_excess_ms: float = 100.0,
) -> Report:
    """Verify a history.

    * `events`: all events of all processes, in any order between files (the package's docstring says what orders them)
    * `handlers`: stream -> the handlers that each must complete every entry of it, and no other handler;
      for a stream not listed: the handlers that the log has for it
    * `drained`: the system has finished, so an incomplete entry is lost. While it runs, an incomplete entry is a fault
      only if a later one of its key is complete: it was overtaken
    * `overlap`: whether overlapping runs of one key are faults; False for Spark, which may run a task twice at once
    * `late_ms`: how long after it is due a timer may come; None: as long as no other one overtakes it
    * `limits`: handler -> its limit, of each stream and each value of `Event.limited`; of the limit only `at_once` and
      `rate` count
    * `rate_excess_ms`: of the rate of how many milliseconds the limit's rate may be exceeded, beside one message

    An entry is at most once in `lost` and `out_of_order`, and repeated effects do not count for the order: one mistake
    is one finding. A run without an end (its process was killed) overlaps only the run that it started in.
    An effect's key is that of the handler's own events on the entry, else that of its `enqueued` event.
    Time and memory grow with the number of events. Raises ConfigError for an unknown kind or an invalid entry id, and for
    events that lack a time which the check of timers or of a rate needs.
    """
    entries: dict[str, dict[str, bytes | None]] = {}
    actions: dict[tuple[str, str], list[Event]] = {}
    timers: dict[tuple[str, str], list[Event]] = {}
    counts: Counter[str] = Counter()
    for event in events:
        counts[event.kind] += 1
        if event.kind == "enqueued":
            entries.setdefault(event.stream, {}).setdefault(event.id, event.key)
        else:
            found = timers if event.kind in _TIMER_COUNTS else actions
            found.setdefault((event.stream, event.handler), []).append(event)
    if unknown := counts.keys() - set(get_args(Kind)):
        raise ConfigError(f"unknown kinds of events: {sorted(unknown)}; use {', '.join(get_args(Kind))}")
    findings: list[Finding] = []
    for (stream, handler), source in _accounts(entries, actions, handlers or {}).items():
        mine = actions.get((stream, handler), [])
        account = Account(handler, stream, source, EntryId.parse)
        findings += account.verify(mine, drained=drained, overlap=overlap)
        starts = [event.id for event in mine if event.kind == "started"]
        counts["retries"] += len(starts) - len(set(starts))
        if limits and handler in limits:
            runs = LimitedRuns(handler, stream, mine, limits[handler])
            findings += runs.verify(rate_excess_ms)
            counts["most_at_once"] = max(counts["most_at_once"], runs.most_at_once)
    for (stream, handler), changes in timers.items():
        findings += Timers(handler, stream, changes).verify(drained=drained, late_ms=late_ms)
    counts.update({name: counts[kind] for kind, name in _TIMER_COUNTS.items()})
    return report_of(findings, counts, events.torn if isinstance(events, EventLog) else ())


def check_outputs(
    expected: Mapping[Key, Sequence[str]],
    committed: Iterable[tuple[Key, str]],
    dead: Iterable[str] = (),
) -> Report:
    """Verify the effects in an output stream against their source.

    * `expected`: key -> the ids of its entries in source order, in any format: only their position counts, so entries
      of equal time keep their source order. Entries of the key None are unordered
    * `committed`: (key, id) of each effect, in the order of the output stream
    * `dead`: ids of the dead letters, in any order: they complete their entry and do not count for the order

    Keys are bytes, or text for its UTF-8. An effect under another key than its source's is unexpected.
    Raises ConfigError if an id occurs twice in `expected`.
    """
    source: dict[str, bytes | None] = {}
    for key, ids in expected.items():
        for entry in ids:
            if entry in source:
                raise ConfigError(f"expected: {entry!r} occurs twice; give each entry an id of its own")
            source[entry] = _as_bytes(key)
    rank = {entry: index for index, entry in enumerate(source)}
    effects = [Event(kind="committed", stream="", id=entry, key=_as_bytes(key)) for key, entry in committed]
    deaths = [Event(kind="dead", stream="", id=entry, key=source.get(entry)) for entry in dead]
    account = Account("", "", source, rank.__getitem__)
    known: list[Event] = []
    unknown: list[Event] = []
    for effect in effects + deaths:
        is_known = effect.id in source and source[effect.id] == effect.key
        (known if is_known else unknown).append(effect)
    findings = [*account.match_effects(known, unknown), *account.lost()]
    findings += account.out_of_order([effect for effect in known if effect.kind == "committed"])
    counts = Counter(enqueued=len(source), committed=len(effects), dead=len(deaths))
    return report_of(findings, counts, ())


def _accounts(
    entries: Mapping[str, Mapping[str, bytes | None]],
    actions: Iterable[tuple[str, str]],
    handlers: Mapping[str, Iterable[str]],
) -> dict[tuple[str, str], Mapping[str, bytes | None]]:
    """Return what each (stream, handler) must complete: all entries of the stream, or none for an unlisted handler."""
    accounts: dict[tuple[str, str], Mapping[str, bytes | None]] = {}
    seen: dict[str, list[str]] = defaultdict(list)
    for stream, handler in actions:
        accounts[stream, handler] = {}
        seen[stream].append(handler)
    for stream, source in entries.items():
        # A stream without events of a handler is lost, not fine: it is assigned to a handler without a name.
        for handler in handlers.get(stream, seen.get(stream, [""])):
            accounts[stream, handler] = source
    return accounts


def _as_bytes(key: bytes | str | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key
