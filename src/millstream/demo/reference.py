"""Reference: the demo's expected results, computed a second time in plain Python, without millstream.

It shares no code with `examples/airline.py` and computes differently where possible: aircraft by aircraft instead of
message by message, local times with their zone instead of UTC, lists instead of a state.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import accumulate, count
from typing import NamedTuple
from zoneinfo import ZoneInfo

_NEW_YORK = ZoneInfo("America/New_York")
_LATE = 15

Row = Mapping[str, str]


class Departure(NamedTuple):
    """One entry of `departures`; None stands for an absent field."""

    row: int
    tailnum: str
    number: int
    carrier: str
    flight: int
    origin: str
    dest: str
    scheduled: str
    hour: int
    cancellations: int
    hours_since: float | None = None
    recovered: int | None = None
    dep_delay: int | None = None
    late_again: bool | None = None
    mean_delay: float | None = None
    worst_delay: int | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected results.

    * `departures`: aircraft -> its entries in order
    * `states`: aircraft -> its final state
    * `unkeyed`: rows without a tail number, each of them a dead letter
    """

    departures: dict[str, list[Departure]]
    states: dict[str, dict[str, int]]
    unkeyed: set[int]


def expected_results(flights: Iterable[Row]) -> Expected:
    """Compute the results of `flights`, the fields of each message in order of publication."""
    by_aircraft: dict[str, list[Row]] = defaultdict(list)
    unkeyed = set()
    for flight in flights:
        if "tailnum" in flight:
            by_aircraft[flight["tailnum"]].append(flight)
        else:
            unkeyed.add(int(flight["row"]))
    departures = {tailnum: _departures_of(rows) for tailnum, rows in by_aircraft.items()}
    states = {tailnum: _final_state(entries) for tailnum, entries in departures.items()}
    return Expected(departures, states, unkeyed)


def _departures_of(flights: list[Row]) -> list[Departure]:
    """Return the entries of one aircraft: first the fields of all flights, then those of flights not cancelled."""
    cancellations = accumulate("dep_delay" not in flight for flight in flights)
    entries = [_basics(*each) for each in zip(flights, count(1), cancellations, strict=False)]
    flown = [number for number, flight in enumerate(flights) if "dep_delay" in flight]
    delays = [int(flights[number]["dep_delay"]) for number in flown]
    arrivals = [int(flights[number]["arr_delay"]) if "arr_delay" in flights[number] else None for number in flown]
    left = [_scheduled(flights[number]) + timedelta(minutes=delay) for number, delay in zip(flown, delays, strict=True)]
    totals = list(accumulate(delays))
    worst = list(accumulate(delays, max))
    for nth, number in enumerate(flown):
        came_late = nth > 0 and (arrivals[nth - 1] or 0) >= _LATE
        arrival = arrivals[nth]
        entries[number] = entries[number]._replace(
            dep_delay=delays[nth],
            recovered=None if arrival is None else delays[nth] - arrival,
            hours_since=round((left[nth] - left[nth - 1]) / timedelta(hours=1), 2) if nth else None,
            late_again=came_late and delays[nth] >= _LATE,
            mean_delay=round(totals[nth] / (nth + 1), 2),
            worst_delay=worst[nth],
        )
    return entries


def _basics(flight: Row, number: int, cancellations: int) -> Departure:
    return Departure(
        row=int(flight["row"]),
        tailnum=flight["tailnum"],
        number=number,
        carrier=flight["carrier"],
        flight=int(flight["flight"]),
        origin=flight["origin"],
        dest=flight["dest"],
        scheduled=f"{_scheduled(flight).isoformat()[:16]}Z",
        hour=int(flight["sched_dep_time"]) // 100,
        cancellations=cancellations,
    )


@cache
def _utc(year: str, month: str, day: str, clock: str) -> datetime:
    hour, minute = divmod(int(clock), 100)
    return datetime(int(year), int(month), int(day), hour, minute, tzinfo=_NEW_YORK).astimezone(UTC)


def _scheduled(flight: Row) -> datetime:
    """Return the scheduled departure in UTC: differences of local times are wrong across clock changes."""
    return _utc(flight["year"], flight["month"], flight["day"], flight["sched_dep_time"])


def _final_state(entries: list[Departure]) -> dict[str, int]:
    delays = [flight.dep_delay for flight in entries if flight.dep_delay is not None]
    state = {"number": len(entries)}
    if len(delays) < len(entries):
        state["cancellations"] = len(entries) - len(delays)
    if delays:
        state |= {"total_delay": sum(delays), "worst_delay": max(delays)}
    return state
