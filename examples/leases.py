"""Sensors, each with a stream of its own, shared among any number of workers: every stream has one owner at a time.

Start as many workers as you like, on any machine, with readings like `XADD sensor:cellar * celsius 11.5`:

    millstream worker examples/leases.py:app
    millstream lease list sensors.watch        # the owner and the lag of each sensor

Kill a worker: once its leases expire, the others own its sensors. Readings of a sensor are processed in order.
"""

from dataclasses import dataclass

from millstream import App, Message, Reject, Retry, State

app = App("sensors")

_WEIGHT = 0.2
_JUMP = 5.0
_COLDEST = -273.15


@dataclass
class Reading:
    """One reading, an entry of a sensor's stream."""

    celsius: float


@app.handler(pattern="sensor:*", order="stream", into="alarms", retry=Retry(attempts=3, then="park"))
def watch(reading: Reading, message: Message, state: State) -> dict[str, object] | None:
    """Track the moving mean of one sensor, and report a reading that is far from it."""
    if reading.celsius < _COLDEST:
        raise Reject("below absolute zero")
    mean = state.get("mean", reading.celsius)
    jump = reading.celsius - mean
    state["mean"] = mean + _WEIGHT * jump
    state["readings"] = state.get("readings", 0) + 1
    if abs(jump) < _JUMP:
        return None
    # A store that compares `fence` refuses writes of an owner that has lost the sensor without knowing it yet.
    return {"sensor": message.stream, "celsius": reading.celsius, "mean": round(mean, 2), "fence": message.fence}
