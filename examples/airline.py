"""Every departure of 2013 from New York, with the history of its aircraft.

    millstream run examples/airline.py:app

It reads the flights that `millstream demo` publishes to the stream `flights`, in the order of their
scheduled departure, and writes one entry per flight to the stream `departures`. An entry depends on the
aircraft's earlier flights, so the messages of one aircraft are handled strictly in order, and `state` keeps
its totals.
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
    """One flight. A cancelled flight has no delays; one that landed elsewhere has no arrival delay."""

    row: int  # its position in the order of publication
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
    """Return the flight's delays, and the aircraft's totals so far."""
    number = state["number"] = state.get("number", 0) + 1
    cancellations = state.get("cancellations", 0)
    output: dict[str, Any] = {
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
        output["cancellations"] = state["cancellations"] = cancellations + 1
        return output

    departed = utc_minutes(flight.time_hour) + flight.minute + delay
    last_departed = state.get("departed")
    total = state["total_delay"] = state.get("total_delay", 0) + delay
    worst = state["worst_delay"] = max(state.get("worst_delay", delay), delay)
    output["dep_delay"] = delay
    output["recovered"] = None if arr_delay is None else delay - arr_delay  # in the air; None is left out
    output["hours_since"] = None if last_departed is None else round((departed - last_departed) / 60, 2)
    output["late_again"] = delay >= LATE and state.get("arrived_late", False)
    output["mean_delay"] = round(total / (number - cancellations), 2)
    output["worst_delay"] = worst
    state["departed"] = departed
    state["arrived_late"] = arr_delay is not None and arr_delay >= LATE
    return output


@cache
def utc_minutes(time_hour: str) -> int:
    """Minutes from 1970 to an hour in UTC: local time would be wrong across clock changes."""
    return int(datetime.fromisoformat(time_hour).timestamp()) // 60
