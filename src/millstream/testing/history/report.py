"""The result of a check: its findings, and the number of events of each kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from millstream.errors import MillstreamError
from millstream.testing.history.events import escape

Fault = Literal[
    "lost",
    "unexpected",
    "duplicated",
    "out_of_order",
    "overlapping",
    "stale",
    "early",
    "late",
    "not_canceled",
    "over_limit",
]

_FAULTS: tuple[Fault, ...] = get_args(Fault)
_COUNTS = ("enqueued", "committed", "dead", "fenced", "started", "retries")
_MORE_COUNTS = ("timers_set", "timers_canceled", "timers_came", "most_at_once")
"""Those that only some histories have."""
_SHOWN = 5


class HistoryError(MillstreamError, AssertionError):
    """A history breaks a guarantee. The message has the first findings of each kind, `report` all of them."""

    def __init__(self, message: str, report: "Report") -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type["HistoryError"], tuple[str, "Report"]]:
        return type(self), (str(self), self.report)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One broken guarantee.

    * `fault`: its kind, which is also the list of the report that has it
    * `handler`, `stream`, `key`: where
    * `ids`: the entry concerned, then those that it conflicts with, if any. Of a timer: the entry that has set it
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
        key = "" if self.key is None else f" of key {escape(self.key)}"
        return f"{self.fault}: {location}{key}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of a check: findings of each kind, and the number of events of each kind.

    * `lost`: enqueued, but neither committed nor dead at the end; timers that were set and have not come
    * `unexpected`: committed or dead, but never enqueued (for this handler, if the handlers are given); timers that came
      and were never set
    * `duplicated`: more than one effect of one handler on one entry; timers that came more than once
    * `out_of_order`: entries of a key that a later one overtook; timers that a later one overtook
    * `overlapping`: runs that started during another run of their key
    * `stale`: effects with a lower token than an earlier event of the key
    * `early`, `late`: timers that came before they were due, or later than allowed
    * `not_canceled`: timers that came after they were canceled or replaced
    * `over_limit`: runs that a limit should not have permitted
    * `retries`: starts of a handler on an entry after the first
    * `most_at_once`: of the values that a handler is limited by, the most runs of one at once
    * `torn`: incomplete lines of killed writers, as `source:line`: an event may be missing there
    """

    lost: Sequence[Finding] = ()
    unexpected: Sequence[Finding] = ()
    duplicated: Sequence[Finding] = ()
    out_of_order: Sequence[Finding] = ()
    overlapping: Sequence[Finding] = ()
    stale: Sequence[Finding] = ()
    early: Sequence[Finding] = ()
    late: Sequence[Finding] = ()
    not_canceled: Sequence[Finding] = ()
    over_limit: Sequence[Finding] = ()
    enqueued: int = 0
    committed: int = 0
    dead: int = 0
    fenced: int = 0
    started: int = 0
    retries: int = 0
    timers_set: int = 0
    timers_canceled: int = 0
    timers_came: int = 0
    most_at_once: int = 0
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
        counts += [f"{count} {name.replace('_', ' ')}" for name in _MORE_COUNTS if (count := getattr(self, name))]
        torn = [f"{len(self.torn)} torn lines"] if self.torn else []
        return f"{', '.join(faults) or 'ok'} ({', '.join(counts + torn)})"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; keys are escaped as in the log (see `read_events`)."""
        report: dict[str, Any] = {"ok": self.ok}
        for fault in _FAULTS:
            report[fault] = [
                asdict(finding)
                | {"key": None if finding.key is None else escape(finding.key), "ids": list(finding.ids)}
                for finding in self.findings(fault)
            ]
        report.update({name: getattr(self, name) for name in (*_COUNTS, *_MORE_COUNTS)}, torn=list(self.torn))
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


def report_of(findings: Iterable[Finding], counts: Mapping[str, int], torn: Sequence[str]) -> Report:
    """Return the report with these findings, and these counts by their names in it."""
    found: dict[str, Any] = {fault: [] for fault in _FAULTS}
    for finding in findings:
        found[finding.fault].append(finding)
    numbers: dict[str, Any] = {name: counts.get(name, 0) for name in (*_COUNTS, *_MORE_COUNTS)}
    return Report(**found, **numbers, torn=torn)
