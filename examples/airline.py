"""Every departure of 2013 from New York, told aircraft by aircraft.

    millstream run examples/airline.py:app

It reads the flights that `millstream demo` publishes to the stream `flights`, in the order of their
scheduled departure, and writes one entry per flight to the stream `departures`. What it says of a flight
depends on what the aircraft did before: so messages of one aircraft are handled strictly in order, and
`state` remembers what has to be known of it.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from millstream import App, Retry, State

LATE = 15  # minutes; airlines call anything less on time

app = App("airline")


@dataclass
class Flight:
    """One flight. A cancelled one has no delays, one that landed elsewhere has no delay at its arrival."""

    row: int  # its place in the order of publication
    tailnum: str  # the aircraft
    carrier: str
    flight: int
    origin: str
    dest: str
    time_hour: str  # hour of the scheduled departure in UTC: 2013-01-01T10:00:00Z
    hour: int  # the same by New York's clocks
    minute: int
    dep_delay: int | None = None  # minutes; negative = early
    arr_delay: int | None = None


@app.handler("flights", key="tailnum", retry=Retry(attempts=4), into="departures")
def departure(flight: Flight, state: State) -> dict[str, Any]:
    """Say how this flight went, and how the aircraft has done so far."""
    number = state["number"] = state.get("number", 0) + 1
    cancellations = state.get("cancellations", 0)
    told: dict[str, Any] = {
        "row": flight.row,
        "tailnum": flight.tailnum,
        "number": number,
        "carrier": flight.carrier,
        "flight": flight.flight,
        "origin": flight.origin,
        "dest": flight.dest,
        "scheduled": f"{flight.time_hour[:14]}{flight.minute:02}Z",
        "hour": flight.hour,
        "cancellations": cancellations,
    }
    delay, arr_delay = flight.dep_delay, flight.arr_delay
    if delay is None:
        told["cancellations"] = state["cancellations"] = cancellations + 1
        return told

    departed = utc_minutes(flight.time_hour) + flight.minute + delay
    before = state.get("departed")
    total = state["total_delay"] = state.get("total_delay", 0) + delay
    worst = state["worst_delay"] = max(state.get("worst_delay", delay), delay)
    told["dep_delay"] = delay
    told["recovered"] = None if arr_delay is None else delay - arr_delay  # in the air; None is left out
    told["hours_since"] = None if before is None else round((departed - before) / 60, 2)
    told["late_again"] = delay >= LATE and state.get("arrived_late", False)
    told["mean_delay"] = round(total / (number - cancellations), 2)
    told["worst_delay"] = worst
    state["departed"] = departed
    state["arrived_late"] = arr_delay is not None and arr_delay >= LATE
    return told


@cache
def utc_minutes(time_hour: str) -> int:
    """Minutes from 1970 to an hour in UTC: local time would be wrong where the clocks change."""
    return int(datetime.fromisoformat(time_hour).timestamp()) // 60
