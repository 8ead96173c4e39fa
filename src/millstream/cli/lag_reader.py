"""LagReader: reads the lag of an app again and again, in a thread, so that a Redis that hangs delays nothing else."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from millstream.admin.redis_metrics import REST
from millstream.admin.waiting_messages import Waiting
from millstream.clock import Clock
from millstream.errors import Unavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LagReading:
    """A lag, and when reading it began, in milliseconds of the clock."""

    lag: Waiting
    at_ms: float


class LagReader:
    """Calls `read` every `poll_ms` milliseconds, but for at most a tenth of the time.

    `read`: returns how many messages wait; raises Unavailable while Redis is
    """

    def __init__(self, read: Callable[[], Waiting], *, poll_ms: float, clock: Clock) -> None:
        self._read = read
        self._poll_ms = poll_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: LagReading | None = None
        self._error: Exception | None = None
        self._is_known = True

    def start(self, stopping: threading.Event) -> None:
        """Read until `stopping`, in a thread that does not keep the process alive."""
        threading.Thread(target=self._run, args=(stopping,), name="millstream-lag", daemon=True).start()

    def take(self) -> LagReading | None:
        """The newest reading since the last call; None if there is none, for example as Redis is unavailable.

        Raises the error that ended the reading.
        """
        with self._lock:
            found, self._newest = self._newest, None
            if self._error is not None:
                raise self._error
            return found

    def _run(self, stopping: threading.Event) -> None:
        rest_ms = 0.0
        while not stopping.wait(rest_ms / 1000):
            began_ms = self._clock.monotonic_ms()
            try:
                lag = self._read()
            except Unavailable as error:
                log = logger.warning if self._is_known else logger.debug
                log("cannot read the lag, Redis is unavailable: %s; the engine does not change meanwhile", error)
                self._is_known = False
            except Exception as error:  # noqa: BLE001 - the caller of `take` gets it, whatever it is
                with self._lock:
                    self._error = error
                return
            else:
                self._is_known = True
                with self._lock:
                    self._newest = LagReading(lag, began_ms)
            rest_ms = max(self._poll_ms, REST * (self._clock.monotonic_ms() - began_ms))
