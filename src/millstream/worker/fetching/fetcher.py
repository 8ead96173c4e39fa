"""Fetcher: base of the fetchers of a worker; reads what the rate limiter permits, and waits if it permits nothing."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from millstream.delivery.reliable_stream import ReliableStream
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.rate_limiter import RateLimiter, ReadQuota

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

    def _acquire_quota(self, streams: Sequence[ReliableStream]) -> ReadQuota:
        """Return a quota for those of `streams` that may be read now, which may be none."""
        quota = self._rate_limiter.acquire(streams)
        self._loop_metrics.set_waiting_for_rate(self._rate_limiter.is_waiting)
        return quota

    def _await_quota(self, stopping: threading.Event) -> ReadQuota | None:
        """Return a quota for at least one of the streams; None, after a while, if no stream may be read."""
        self._loop_metrics.on_poll_wanted()
        quota = self._acquire_quota([one for one in list(self._streams.values()) if one.readable])
        if quota.counts:
            return quota
        self._loop_metrics.on_idle()
        stopping.wait(min(self._policy.sweep_ms, quota.until_ms) / 1000)
        return None
