"""Sensors, each with a stream of its own, shared among any number of workers: every stream has one owner at a time.

Start as many as you like, on any machine, with readings like `XADD sensor:cellar * celsius 11.5`:

    millstream worker examples/leases.py:app
    millstream streams sensors.watch        # who has which sensor, and how far behind it is

Kill one: the others have its sensors a lease later. Readings of a sensor are processed one after another, in order.
"""

from dataclasses import dataclass

from millstream import App, Message, Reject, Retry, State

app = App("sensors")

_WEIGHT = 0.2
_JUMP = 5.0
_COLDEST = -273.15


@dataclass
class Reading:
    """What a sensor adds to its stream."""

    celsius: float


@app.handler(pattern="sensor:*", order="stream", into="alarms", retry=Retry(attempts=3, then="park"))
def watch(reading: Reading, message: Message, state: State) -> dict[str, object] | None:
    """Follow the mean of one sensor, and report a reading that is far from it."""
    if reading.celsius < _COLDEST:
        raise Reject("colder than anything can be")
    mean = state.get("mean", reading.celsius)
    jump = reading.celsius - mean
    state["mean"] = mean + _WEIGHT * jump
    state["readings"] = state.get("readings", 0) + 1
    if abs(jump) < _JUMP:
        return None
    # Of two writes, a store that compares `fence` refuses the one of an owner that does not know yet that it lost the sensor.
    return {"sensor": message.stream, "celsius": reading.celsius, "mean": round(mean, 2), "fence": message.fence}
