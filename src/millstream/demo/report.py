"""The demo's final report: the verdict and two tables."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from millstream.demo.audit import Audit
from millstream.demo.reference import Departure
from millstream.redis_client.formats import pluralize

_SHOWN = 5
_ENOUGH_FLIGHTS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Progress `at_s` seconds after publication began: entries published and entries done."""

    at_s: float
    published: int
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A process killed with SIGKILL: when, which one, and how many entries were done by then."""

    at_s: float
    what: str
    pid: int
    done: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of the whole run.

    * `startup_seconds`: until Spark had started and the pipeline consumed
    * `seconds`: from then, the publication of the first flight, until the commit of the last one
    """

    audit: Audit
    departures: Sequence[Departure]
    startup_seconds: float
    seconds: float
    batches: int
    samples: Sequence[Sample]
    kills: Sequence[Kill] = field(default_factory=tuple)
    chart: Path

    @property
    def rate(self) -> float:
        """Messages per second, including publishing, processing, committing and any restarts."""
        return self.audit.messages / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the object that `millstream demo --json` prints."""
        return {
            **self.audit.figures(),
            "ok": self.audit.ok,
            "startup_seconds": round(self.startup_seconds, 2),
            "seconds": round(self.seconds, 2),
            "rate": round(self.rate),
            "batches": self.batches,
            "kills": [{"what": k.what, "pid": k.pid, "at": round(k.at_s, 2), "done": k.done} for k in self.kills],
            "chart": str(self.chart),
        }


def print_report(console: Console, outcome: Outcome) -> None:
    """Print the verdict and the tables."""
    console.print()
    console.print(_verdict(outcome))
    for example in outcome.audit.examples:
        console.print(f"  {example}", style="red", markup=False)
    for kill in outcome.kills:
        console.print(
            f"{kill.at_s:6.1f} s  kill -9 {kill.pid}: {kill.what}, {kill.done:,} entries done", style="yellow"
        )
    console.print(_aircraft_table(outcome.departures))
    console.print(_hours_table(outcome.departures))
    console.print(f"chart: {outcome.chart}", markup=False, highlight=False, soft_wrap=True)


def _verdict(outcome: Outcome) -> Table:
    audit = outcome.audit
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in audit.dead_letters_by_reason.items())
    wrong = audit.wrong_values + audit.wrong_states
    table = Table(title="Every flight, checked", title_justify="left", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("messages in", f"{audit.messages:,}", "")
    table.add_row("committed", f"{audit.committed:,}", "entries of the stream departures")
    table.add_row("dead letters", f"{audit.dead_letters:,}", reasons)
    faults = (
        ("lost", audit.lost, ""),
        ("duplicated", audit.duplicated, ""),
        ("unexpected", audit.unexpected, ""),
        ("order violations", audit.order_violations, "in the entries of each aircraft"),
        ("wrong values", wrong, "compared with a second computation, states too"),
    )
    for name, count, how in faults:
        table.add_row(name, f"[red]{count:,}[/]" if count else "[green]0[/]", how)
    table.add_row("time", f"{outcome.seconds:,.1f} s", "first publication to last commit")
    table.add_row("throughput", f"{outcome.rate:,.0f}/s", f"in {pluralize(outcome.batches, 'batch', 'batches')}")
    return table


# --- What the flights say -----------------------------------------------------------------------------------


def worst_aircraft(departures: Iterable[Departure], min_flights: int = _ENOUGH_FLIGHTS) -> list[Departure]:
    """The last departure of each aircraft with at least `min_flights` flights, worst mean delay first."""
    last = {flight.tailnum: flight for flight in departures if flight.mean_delay is not None}
    seasoned = [flight for flight in last.values() if flight.number >= min_flights]
    return sorted(seasoned or last.values(), key=lambda flight: flight.mean_delay or 0.0, reverse=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hour:
    """Departures of one scheduled hour of the day: number, mean delay in minutes, share of late ones."""

    hour: int
    flights: int
    mean_delay: float
    late_share: float


def hours_of_day(departures: Iterable[Departure]) -> list[Hour]:
    """Return the delays of each hour of the day, in order. Cancelled flights do not count."""
    delays: dict[int, list[int]] = defaultdict(list)
    for flight in departures:
        if flight.dep_delay is not None:
            delays[flight.hour].append(flight.dep_delay)
    return [
        Hour(
            hour=hour,
            flights=len(found),
            mean_delay=sum(found) / len(found),
            late_share=sum(delay >= 15 for delay in found) / len(found),
        )
        for hour, found in sorted(delays.items())
    ]


def _aircraft_table(departures: Iterable[Departure]) -> Table:
    table = Table(title=f"Aircraft with the worst delays (of those with {_ENOUGH_FLIGHTS} flights or more)")
    for name in ("aircraft", "airline"):
        table.add_column(name)
    for name in ("flights", "cancelled", "mean delay", "worst delay"):
        table.add_column(name, justify="right")
    for flight in worst_aircraft(departures)[:_SHOWN]:
        counts = (f"{flight.number:,}", f"{flight.cancellations:,}")
        table.add_row(
            flight.tailnum,
            flight.carrier,
            *counts,
            f"{flight.mean_delay:.1f} min",
            f"{flight.worst_delay:,} min",
        )
    return table


def _hours_table(departures: Iterable[Departure]) -> Table:
    table = Table(title="Hours of the day with the worst delays")
    table.add_column("scheduled")
    for name in ("flights", "mean delay", "late by 15 min or more"):
        table.add_column(name, justify="right")
    hours = sorted(hours_of_day(departures), key=lambda hour: hour.mean_delay, reverse=True)
    for hour in hours[:_SHOWN]:
        share = f"{hour.late_share:.0%}"
        table.add_row(f"{hour.hour:02}:00", f"{hour.flights:,}", f"{hour.mean_delay:.1f} min", share)
    return table
