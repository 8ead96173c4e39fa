"""Fetcher: base of the fetchers of a worker; reads what the rate limiter permits, and waits if it permits nothing."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from millstream.delivery.reliable_stream import ReliableStream
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.rate_limit import Permit, RateLimiter

S_co = TypeVar("S_co", bound=ReliableStream, covariant=True)


class Fetcher(ABC, Generic[S_co]):
    """Fetches entries as far as there is room in flight. Used by one thread.

    `streams`: the streams that the worker has joined; other threads add to it.
    """

    def __init__(self, context: WorkerContext, streams: Mapping[str, S_co]) -> None:
        self._context = context
        self._client = context.blocking_client
        self._in_flight = context.in_flight
        self._loop_metrics = context.loop_metrics
        self._clock = context.clock
        self._policy = context.policy
        self._streams = streams
        self._rate_limiter = RateLimiter(context.handler.rate, context.clock, streams)

    @abstractmethod
    def fetch(self, room: int, stopping: threading.Event) -> None:
        """Fetch up to `room` entries or keys, or wait for a while. Raises RedisError."""

    @abstractmethod
    def refresh(self) -> None:
        """Poll all streams afresh: streams were joined again, or a reply was lost."""

    def close(self) -> None:
        """Close the connections that it has beside that of the context."""

    def _acquire_permit(self, streams: Sequence[ReliableStream]) -> Permit:
        """Return a permit for those of `streams` that may be read now, which may be none."""
        permit = self._rate_limiter.acquire(streams)
        self._loop_metrics.set_waiting_for_rate(self._rate_limiter.is_waiting)
        return permit

    def _await_permit(self, stopping: threading.Event) -> Permit | None:
        """Return a permit for at least one of the streams; None, after a while, if no stream may be read."""
        self._loop_metrics.on_poll_wanted()
        permit = self._acquire_permit([one for one in list(self._streams.values()) if one.readable])
        if permit.counts:
            return permit
        self._loop_metrics.on_idle()
        stopping.wait(min(self._policy.sweep_ms, permit.until_ms) / 1000)
        return None
