"""FlightPublisher: publishes the flights in a thread of its own while the pipeline runs."""

import threading
from collections.abc import Iterator

from millstream.demo.audit import KEYS
from millstream.demo.flights import Flights
from millstream.producer.bulk import Publisher
from millstream.redis_client.client import Client


class FlightPublisher:
    """Publishes `flights` once `start` is called. `check` raises a failure; `stop` ends it early.

    Flights from row `hold_at` on wait for `release`, so that kills in mid-run do happen in mid-run.
    """

    def __init__(self, url: str, flights: Flights, *, hold_at: int | None = None) -> None:
        self._client = Client(url)
        self._flights = flights
        self._hold_at = hold_at
        self._released = threading.Event()
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="millstream-demo-flights", daemon=True)

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def release(self) -> None:
        """Publish the flights from row `hold_at` on."""
        self._released.set()

    def check(self) -> bool:
        """Whether all flights are published. Raises RedisError if that failed."""
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread, whether all flights are published or not."""
        self._stopped.set()
        self._released.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        self._client.close()

    def _run(self) -> None:
        try:
            with Publisher(self._client, KEYS.stream) as publisher:
                publisher.send(self._in_time(publisher))
        except Exception as failure:  # noqa: BLE001 - raised by `check`
            self._failure = failure

    def _in_time(self, publisher: Publisher) -> Iterator[dict[str, str]]:
        for row, flight in enumerate(self._flights):
            if row == self._hold_at:
                publisher.flush()
                self._released.wait()
            if self._stopped.is_set():
                return
            yield flight
