"""Fetcher: base of the fetchers of a worker; asks the rate limiter what may be read now, and waits if nothing may."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from millstream.clock import Clock
from millstream.delivery.reliable_stream import ReliableStream
from millstream.redis_client.client import Client
from millstream.worker.fetching.rate_limit import Permit, RateLimiter
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.policy import WorkerPolicy

S_co = TypeVar("S_co", bound=ReliableStream, covariant=True)


class Fetcher(ABC, Generic[S_co]):
    """Fetches entries as far as there is room in flight. Used by one thread.

    * `client`: a client with a timeout longer than blocking reads take
    * `streams`: the streams that the worker has joined; other threads add to it
    """

    def __init__(
        self, client: Client, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock, policy: WorkerPolicy, *,
        streams: Mapping[str, S_co], rate_limiter: RateLimiter,
    ) -> None:  # fmt: skip
        self._client = client
        self._in_flight = in_flight
        self._loop_metrics = loop_metrics
        self._clock = clock
        self._policy = policy
        self._streams = streams
        self._rate_limiter = rate_limiter

    @abstractmethod
    def fetch(self, room: int, stopping: threading.Event) -> None:
        """Fetch up to `room` entries or keys, or wait for a while. Raises RedisError."""

    @abstractmethod
    def refresh(self) -> None:
        """Poll all streams afresh: streams were joined again, or a reply was lost."""

    def _await_permit(self, stopping: threading.Event) -> Permit | None:
        """Return a permit for at least one of the streams; None, after a while, if no stream may be read."""
        self._loop_metrics.on_poll_wanted()
        permit = self._rate_limiter.acquire([one for one in list(self._streams.values()) if one.readable])
        if permit.streams:
            return permit
        self._loop_metrics.on_idle()
        stopping.wait(min(self._policy.sweep_ms, permit.until_ms) / 1000)
        return None
