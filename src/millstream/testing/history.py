"""The history checker: finds lost, duplicated, out-of-order, overlapping and stale effects in a log of events.

There are two entry points: `check` verifies a log of `Event`s that producers and workers wrote with `Recorder`;
`check_outputs` verifies the effects in an output stream. Both are pure functions.

Order never comes from the clocks of different machines. Events are ordered

1. by `position`, the index of the effect in the log that it was written to, which its server assigned;
2. without positions, by `at`, if every event to be compared has it: a monotonic clock that all their writers
   share (on Linux, processes of one boot of one machine);
3. otherwise in the order given: lines of one file in order, and files one after the other.

An event with a position is never compared with one without. Ties keep the order given.

The ideas: verifying a queue by its recorded history, Jepsen's `total-queue` checker (K. Kingsbury); positions
instead of clocks, L. Lamport, "Time, Clocks, and the Ordering of Events", 1978; fencing tokens, M. Kleppmann,
"How to do distributed locking", 2016.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from os import SEEK_END, PathLike, fspath, fsync
from pathlib import Path
from sys import intern
from typing import Any, Literal, TypeVar, get_args

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, MillstreamError
from millstream.model import EntryId

Kind = Literal["enqueued", "started", "ended", "committed", "fenced", "dead"]
Fault = Literal["lost", "unexpected", "duplicated", "out_of_order", "overlapping", "stale"]
Key = TypeVar("Key", bound=bytes | str | None)

_FAULTS: tuple[Fault, ...] = get_args(Fault)
_EFFECTS = ("committed", "dead")
_RUNS = ("started", "ended")
_COUNTS = ("enqueued", "committed", "dead", "fenced", "started", "retries")
_SHOWN = 5
_TORN = b"#torn"
_ESCAPE = re.compile(rb"\\(?:\\|x[0-9a-f]{2})?")


class HistoryError(MillstreamError, AssertionError):
    """A history breaks a guarantee. The message has the first findings of each kind, `report` all of them."""

    def __init__(self, message: str, report: "Report") -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type["HistoryError"], tuple[str, "Report"]]:
        return type(self), (str(self), self.report)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a history.

    * `kind`: `enqueued` into the stream; `started` and `ended`: one run of the handler; its effects:
      `committed`, or `dead` (the dead letter is written); `fenced`: a commit that the server refused
    * `stream`, `id`: the entry; `id` is the text `ms-seq`
    * `key`: the key that orders it; None = unordered or, for a handler's event, the key of the `enqueued` event
    * `handler`: name of the handler; unused in `enqueued`
    * `worker`: name of the owner, unique among concurrent ones
    * `token`: its fencing token: every later owner of the key has a higher one
    * `at`: time in milliseconds of a monotonic clock that the compared writers share; None without one
    * `position`: index of an effect in the log that orders the effects of its key, such as the output stream
    * `note`: free text for the reader
    """

    kind: Kind
    stream: str
    id: str
    key: bytes | None = None
    handler: str = ""
    worker: str = ""
    token: int | None = None
    at: float | None = None
    position: int | None = None
    note: str = ""


_FIELDS = tuple((field.name, field.default) for field in fields(Event))


class Recorder:
    """Appends events to a file, one JSON line each, so that a killed process leaves complete lines.

    * `path`: a file of this process alone; a restarted process may append to the same one
    * `sync`: fsync after each event, so that it survives a power failure too, at about a millisecond each
    * `clock`: stamps events that have no `at`; None if the writers are on several machines

    Each event is one unbuffered `write` to a file opened with O_APPEND: threads may share a recorder, and SIGKILL
    truncates the last line at most. Raises OSError if the disk takes only part of a line.
    """

    def __init__(self, path: str | PathLike[str], *, sync: bool = False, clock: Clock | None = SYSTEM_CLOCK) -> None:
        self._sync = sync
        self._clock = clock
        self._file = Path(path).open("ab+", buffering=0)  # noqa: SIM115 - closed by close()
        self._mark_torn_line()

    def record(self, event: Event) -> None:
        """Write `event`; once this returns, the event survives the process."""
        line = {name: value for name, default in _FIELDS if (value := getattr(event, name)) != default}
        if event.key is not None:
            line["key"] = _escape(event.key)
        if event.at is None and self._clock is not None:
            line["at"] = self._clock.monotonic_ms()
        data = msgspec.json.encode(line) + b"\n"
        if self._file.write(data) != len(data):
            raise OSError(f"{self._file.name}: only part of an event was written: is the disk full?")
        if self._sync:
            fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Events are not buffered until then."""
        self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark_torn_line(self) -> None:
        size = self._file.seek(0, SEEK_END)
        if size == 0:
            return
        self._file.seek(size - 1)
        if self._file.read(1) != b"\n":
            # Appended to a torn line, the next event would be lost with it.
            self._file.write(_TORN + b"\n")


@dataclass(frozen=True, kw_only=True)
class EventLog:
    """The events read, and the torn lines between them, as `source:line`."""

    events: Sequence[Event]
    torn: Sequence[str]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)


def read_events(*sources: str | PathLike[str] | Iterable[str | bytes]) -> EventLog:
    """Read JSON lines from paths of files and iterables of lines, one after the other.

    A line is an object with the fields of `Event`. Fields at their default may be absent; unknown fields are ignored.
    `key` is UTF-8 text; in it, a backslash is `\\\\`, and a byte that is not UTF-8 is `\\xNN`.
    An incomplete line of a killed process is skipped and listed in `torn`.
    Raises OSError for an unreadable file, ConfigError for any other line that is not an event.
    """
    events: list[Event] = []
    torn: list[str] = []
    for source in sources:
        if isinstance(source, str | PathLike):
            with Path(source).open("rb") as lines:
                _read_lines(str(fspath(source)), lines, events, torn)
        else:
            _read_lines("lines", source, events, torn)
    return EventLog(events=events, torn=torn)


def _read_lines(name: str, lines: Iterable[str | bytes], events: list[Event], torn: list[str]) -> None:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    rest = iter(lines)
    for number, text in enumerate(rest, 1):
        line = text.encode() if isinstance(text, str) else text
        content = line.rstrip()
        if not content:
            continue
        try:
            events.append(_event(decode(content.removesuffix(_TORN))))
        except msgspec.DecodeError as error:
            marked = content.endswith(_TORN)
            cut_off = not line.endswith(b"\n") and next(rest, None) is None
            if isinstance(error, msgspec.ValidationError) or not (marked or cut_off):
                raise ConfigError(f"{name}:{number}: {error}; correct or remove this line") from error
            torn.append(f"{name}:{number}")


def _event(line: dict[str, Any]) -> Event:
    for name, value in line.items():
        if not isinstance(value, str):
            continue
        if name == "key":
            line[name] = _unescape(value)
        elif name != "id":
            # A million events share a few names: one object for each name, not a million.
            line[name] = intern(value)
    return msgspec.convert(line, Event, builtin_types=(bytes,))


def _escape(key: bytes) -> str:
    return key.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def _unescape(text: str) -> bytes:
    data = text.encode()
    return _ESCAPE.sub(_unescaped, data) if b"\\" in data else data


def _unescaped(match: re.Match[bytes]) -> bytes:
    escape = match[0]
    if escape == b"\\\\":
        return b"\\"
    if len(escape) < 4:
        raise msgspec.ValidationError("the key has a backslash that is neither \\\\ nor \\xNN")
    return bytes.fromhex(escape[2:].decode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One broken guarantee.

    * `fault`: its kind, which is also the list of the report that has it
    * `handler`, `stream`, `key`: where
    * `ids`: the entry concerned, then the entry that it conflicts with, if any
    * `expected`, `found`: as text
    """

    fault: Fault
    handler: str
    stream: str
    key: bytes | None
    ids: tuple[str, ...]
    expected: str
    found: str

    def __str__(self) -> str:
        location = " ".join(word for word in (self.handler, self.stream, self.ids[0]) if word)
        key = "" if self.key is None else f" of key {_escape(self.key)}"
        return f"{self.fault}: {location}{key}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of a check: findings of each kind, and the number of events of each kind.

    * `lost`: enqueued, but neither committed nor dead at the end
    * `unexpected`: committed or dead, but never enqueued (for this handler, if the handlers are given)
    * `duplicated`: more than one effect of one handler on one entry
    * `out_of_order`: entries of a key that a later one overtook
    * `overlapping`: runs that started during another run of their key
    * `stale`: effects with a lower token than an earlier event of the key
    * `retries`: starts of a handler on an entry after the first
    * `torn`: incomplete lines of killed writers, as `source:line`: an event may be missing there
    """

    lost: Sequence[Finding] = ()
    unexpected: Sequence[Finding] = ()
    duplicated: Sequence[Finding] = ()
    out_of_order: Sequence[Finding] = ()
    overlapping: Sequence[Finding] = ()
    stale: Sequence[Finding] = ()
    enqueued: int = 0
    committed: int = 0
    dead: int = 0
    fenced: int = 0
    started: int = 0
    retries: int = 0
    torn: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no findings. Torn lines alone are not a fault."""
        return not any(self.findings(fault) for fault in _FAULTS)

    def findings(self, fault: Fault) -> Sequence[Finding]:
        """Return the findings of one kind."""
        found: Sequence[Finding] = getattr(self, fault)
        return found

    def summary(self) -> str:
        """Return one line of plain text: the faults, then the counts."""
        faults = [f"{len(self.findings(f))} {f.replace('_', ' ')}" for f in _FAULTS if self.findings(f)]
        counts = [f"{getattr(self, name)} {name}" for name in _COUNTS]
        torn = [f"{len(self.torn)} torn lines"] if self.torn else []
        return f"{', '.join(faults) or 'ok'} ({', '.join(counts + torn)})"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; keys are escaped as in the log (see `read_events`)."""
        report: dict[str, Any] = {"ok": self.ok}
        for fault in _FAULTS:
            report[fault] = [
                asdict(finding)
                | {"key": None if finding.key is None else _escape(finding.key), "ids": list(finding.ids)}
                for finding in self.findings(fault)
            ]
        report.update({name: getattr(self, name) for name in _COUNTS}, torn=list(self.torn))
        return report

    def raise_if_bad(self) -> None:
        """Raise HistoryError, with the first findings of each kind, if there are any."""
        if self.ok:
            return
        lines = [self.summary()]
        for fault in _FAULTS:
            found = self.findings(fault)
            lines += [f"  {finding}" for finding in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  {fault}: and {len(found) - _SHOWN} more")
        raise HistoryError("\n".join(lines), self)


def check(
    events: Iterable[Event],
    *,
    handlers: Mapping[str, Iterable[str]] | None = None,
    drained: bool = True,
    overlap: bool = True,
) -> Report:
    """Verify a history.

    * `events`: all events of all processes, in any order between files (the module docstring says what orders them)
    * `handlers`: stream -> the handlers that each must complete every entry of it, and no other handler;
      for a stream not listed: the handlers that the log has for it
    * `drained`: the system has finished, so an incomplete entry is lost. While it runs, an incomplete entry is a fault
      only if a later one of its key is complete: it was overtaken
    * `overlap`: whether overlapping runs of one key are faults; False for Spark, which may run a task twice at once

    An entry is at most once in `lost` and `out_of_order`, and repeated effects do not count for the order: one mistake
    is one finding. A run without an end (its process was killed) overlaps only the run that it started in.
    An effect's key is that of the handler's own events on the entry, else that of its `enqueued` event.
    Time and memory grow with the number of events. Raises ConfigError for an unknown kind or an invalid entry id.
    """
    entries: dict[str, dict[str, bytes | None]] = {}
    actions: dict[tuple[str, str], list[Event]] = {}
    counts: Counter[str] = Counter()
    for event in events:
        counts[event.kind] += 1
        if event.kind == "enqueued":
            entries.setdefault(event.stream, {}).setdefault(event.id, event.key)
        else:
            actions.setdefault((event.stream, event.handler), []).append(event)
    if unknown := counts.keys() - set(get_args(Kind)):
        raise ConfigError(f"unknown kinds of events: {sorted(unknown)}; use {', '.join(get_args(Kind))}")
    findings: list[Finding] = []
    for (stream, handler), source in _accounts(entries, actions, handlers or {}).items():
        mine = actions.get((stream, handler), [])
        account = _Account(handler, stream, source, EntryId.parse)
        findings += account.verify(mine, drained=drained, overlap=overlap)
        starts = [event.id for event in mine if event.kind == "started"]
        counts["retries"] += len(starts) - len(set(starts))
    return _report(findings, counts, events.torn if isinstance(events, EventLog) else ())


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
    account = _Account("", "", source, rank.__getitem__)
    known: list[Event] = []
    unknown: list[Event] = []
    for effect in effects + deaths:
        is_known = effect.id in source and source[effect.id] == effect.key
        (known if is_known else unknown).append(effect)
    findings = [*account.match_effects(known, unknown), *account.lost()]
    findings += account.out_of_order([effect for effect in known if effect.kind == "committed"])
    counts = Counter(enqueued=len(source), committed=len(effects), dead=len(deaths))
    return _report(findings, counts, ())


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


def _report(findings: Iterable[Finding], counts: Mapping[str, int], torn: Sequence[str]) -> Report:
    found: dict[str, Any] = {fault: [] for fault in _FAULTS}
    for finding in findings:
        found[finding.fault].append(finding)
    numbers: dict[str, Any] = {name: counts.get(name, 0) for name in _COUNTS}
    return Report(**found, **numbers, torn=torn)


class _Account:
    """One handler on one stream: `source` has the entries that it must complete, `rank` an entry's position in it."""

    def __init__(
        self, handler: str, stream: str, source: Mapping[str, bytes | None], rank: Callable[[str], Any]
    ) -> None:
        self._place = handler, stream
        self._source = source
        self._rank = rank
        self._keys = dict(source)
        self._completed: set[str] = set()

    # The methods are generators: `lost` relies on the state that `match_effects` leaves once it is exhausted.

    def verify(self, events: Sequence[Event], *, drained: bool, overlap: bool) -> Iterator[Finding]:
        self._keys.update({event.id: event.key for event in events if event.key is not None})
        effects = [event for event in events if event.kind in _EFFECTS]
        known = [event for event in effects if event.id in self._source]
        yield from self.match_effects(known, [event for event in effects if event.id not in self._source])
        if drained:
            yield from self.lost()
            yield from self.out_of_order(known)
        else:
            incomplete = [entry for entry in self._source if entry not in self._completed]
            yield from self.out_of_order(known, incomplete)
        if overlap:
            for key, runs in self._by_key(event for event in events if event.kind in _RUNS).items():
                yield from self._overlaps(key, runs)
        for key, holders in self._by_key(event for event in events if event.token is not None).items():
            yield from self._stale(key, holders)

    def match_effects(self, known: Iterable[Event], unknown: Iterable[Event]) -> Iterator[Finding]:
        known_by_id, unknown_by_id = _by_id(known), _by_id(unknown)
        self._completed = set(known_by_id)
        for entry, effects in unknown_by_id.items():
            expected = "no effect: it was not enqueued here"
            yield self._finding("unexpected", effects[0].key, (entry,), expected, _kinds(effects))
        for by_id in (known_by_id, unknown_by_id):
            for entry, effects in by_id.items():
                if len(effects) > 1:
                    key = self._keys.get(entry, effects[0].key)
                    yield self._finding("duplicated", key, (entry,), "one effect", _kinds(effects))

    def lost(self) -> Iterator[Finding]:
        for entry in self._source:
            if entry not in self._completed:
                yield self._finding("lost", self._keys[entry], (entry,), "an effect", "none")

    def out_of_order(self, effects: Iterable[Event], incomplete: Iterable[str] = ()) -> Iterator[Finding]:
        incomplete_of: dict[bytes | None, list[str]] = defaultdict(list)
        for entry in incomplete:
            incomplete_of[self._keys[entry]].append(entry)
        for key, of_key in self._by_key(effects).items():
            if len(of_key) > 1 or key in incomplete_of:
                yield from self._overtaken(key, of_key, incomplete_of[key])

    def _overtaken(self, key: bytes, effects: Sequence[Event], incomplete: list[str]) -> Iterator[Finding]:
        seen: set[str] = set()
        for chain in _chains(effects):
            heights: list[Any] = []
            peaks: list[str] = []
            late: list[tuple[str, Any, str]] = []
            for effect in chain:
                if effect.id in seen:
                    continue
                seen.add(effect.id)
                rank = self._rank(effect.id)
                if not heights or rank >= heights[-1]:
                    heights.append(rank)
                    peaks.append(effect.id)
                else:
                    late.append((effect.id, rank, f"{effect.kind} after it"))
            for entry in incomplete:
                rank = self._rank(entry)
                if heights and rank < heights[-1] and entry not in seen:
                    seen.add(entry)
                    late.append((entry, rank, "incomplete"))
            for entry, rank, found in late:
                overtaker = peaks[bisect_right(heights, rank)]
                expected = f"an effect before that on {overtaker}"
                yield self._finding("out_of_order", key, (entry, overtaker), expected, found)

    def _overlaps(self, key: bytes, runs: Iterable[Event]) -> Iterator[Finding]:
        last: _Run | None = None
        for run in _runs(runs):
            if last is not None and run.begin < last.end:
                expected = f"a start after the run of {last.start.id} by {last.start.worker or '?'}"
                found = f"a start during it by {run.start.worker or '?'}"
                yield self._finding("overlapping", key, (run.start.id, last.start.id), expected, found)
            if last is None or run.end > last.end:
                last = run

    def _stale(self, key: bytes, holders: Sequence[Event]) -> Iterator[Finding]:
        for chain in _chains(holders):
            highest = 0
            for event in chain:
                token = event.token or 0
                if token < highest and event.kind in _EFFECTS:
                    found = f"{event.kind} by {event.worker or '?'} with token {token}"
                    yield self._finding("stale", key, (event.id,), f"token {highest} or higher", found)
                highest = max(highest, token)

    def _finding(self, fault: Fault, key: bytes | None, ids: tuple[str, ...], expected: str, found: str) -> Finding:
        handler, stream = self._place
        return Finding(fault=fault, handler=handler, stream=stream, key=key, ids=ids, expected=expected, found=found)

    def _by_key(self, events: Iterable[Event]) -> dict[bytes, list[Event]]:
        by_key: dict[bytes, list[Event]] = defaultdict(list)
        for event in events:
            key = self._keys.get(event.id)
            if key is not None:
                by_key[key].append(event)
        return by_key


@dataclass(slots=True)
class _Run:
    """One run of a handler; without a known end it has no duration."""

    start: Event
    begin: float
    end: float


def _runs(events: Iterable[Event]) -> list[_Run]:
    """Pair the starts and ends of one key, in the order of the starts."""
    ordered = _in_log_order(events)
    times: Sequence[Any] = [event.at for event in ordered]
    if None in times:
        times = range(len(ordered))
    runs: list[_Run] = []
    running: dict[tuple[str, str], _Run] = {}
    for event, time in zip(ordered, times, strict=True):
        owner = event.worker, event.id
        if event.kind == "started":
            running[owner] = _Run(event, time, time)
            runs.append(running[owner])
        elif owner in running:
            running.pop(owner).end = time
    return runs


def _chains(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Return the events with a position and those without, each in its own order; the two do not compare."""
    placed = [event for event in events if event.position is not None]
    placed.sort(key=attrgetter("position"))
    return placed, _in_log_order(event for event in events if event.position is None)


def _in_log_order(events: Iterable[Event]) -> list[Event]:
    ordered = list(events)
    if None not in [event.at for event in ordered]:
        ordered.sort(key=attrgetter("at"))
    return ordered


def _by_id(effects: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for effect in effects:
        found[effect.id].append(effect)
    return found


def _kinds(effects: Iterable[Event]) -> str:
    return " and ".join(f"{times} x {kind}" for kind, times in Counter(e.kind for e in effects).items())


def _as_bytes(key: bytes | str | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key
