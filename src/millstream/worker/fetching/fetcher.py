"""What the ways in which a worker gets its messages have in common: they ask what may be read now, and wait if nothing may."""

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
    """Takes into the hand what there is room for. Used by one thread.

    * `client`: one whose timeout is longer than reads wait
    * `streams`: those that the worker has joined so far; others add to them
    """

    def __init__(
        self, client: Client, hand: InFlight, report: LoopMetrics, clock: Clock, policy: WorkerPolicy, *,
        streams: Mapping[str, S_co], allowance: RateLimiter,
    ) -> None:  # fmt: skip
        self._client = client
        self._hand = hand
        self._report = report
        self._clock = clock
        self._policy = policy
        self._streams = streams
        self._allowance = allowance

    @abstractmethod
    def take(self, room: int, stopping: threading.Event) -> None:
        """Take as much as there is `room` for, or wait for a while. Raises RedisError."""

    @abstractmethod
    def look_again(self) -> None:
        """Streams were joined again, or a reply was lost."""

    def _ask_all(self, stopping: threading.Event) -> Permit | None:
        """What may be read of all streams, which is one at least; None, after a while, if nothing may."""
        self._report.polling()
        allowed = self._allowance.ask([one for one in list(self._streams.values()) if one.readable])
        if allowed.streams:
            return allowed
        self._report.resting()
        stopping.wait(min(self._policy.sweep_ms, allowed.until_ms) / 1000)
        return None
