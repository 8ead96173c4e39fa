"""Orderings of a worker: how entries are fetched, renewed and committed, without order or in the order of each key."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from millstream.delivery.keyed_stream import KeyedStream
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import MillstreamError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.worker.fetching.fetcher import Fetcher
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.lease_watchdog import LeaseWatchdog
from millstream.worker.settling.maintenance import Maintenance

logger = logging.getLogger(__name__)


BackgroundLoop = Callable[[threading.Event], None]
S = TypeVar("S", bound=KeyedStream)


class Ordering(Protocol):
    """The parts of a reading loop that depend on the order of a handler, and the streams they share."""

    @property
    def fetcher(self) -> Fetcher[ReliableStream]:
        """Fetches entries."""

    @property
    def maintenance(self) -> Maintenance[Any]:
        """Renews entries in flight, follows the streams, and ends runs that hang."""

    @property
    def lease_watchdog(self) -> LeaseWatchdog | None:
        """Ends runs whose lease expires; None where an expired claim stops no run."""

    @property
    def committer(self) -> Committer:
        """Commits the outcomes of runs."""

    @property
    def streams(self) -> Mapping[str, ReliableStream]:
        """The streams that this worker has joined, by name."""

    def discover(self, scan_client: Client) -> Sequence[str]:
        """Return the streams that exist now, in the order in which to join them. Raises RedisError."""

    def join(self, name: str) -> None:
        """Join the workers of a stream. Raises ConfigError for a name that cannot be used, RedisError."""

    def background_loops(self) -> Mapping[str, BackgroundLoop]:
        """Return further loops by name: each runs in a thread of its own until the reading loop stops."""

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Release entries that were dropped from flight, so that other workers get them."""

    def close(self) -> None:
        """Close the connections that this ordering opened."""


def existing_streams(handler: Handler, scan_client: Client) -> Sequence[str]:
    """Return the streams of the handler that exist now."""
    return handler.streams or scan_client.scan_streams(handler.pattern or "*")


def names_to_work_on(streams: Mapping[str, ReliableStream]) -> list[str]:
    """Return the names of the streams that this worker is not about to leave. Other threads may add some meanwhile.

    A copy of the items would not be atomic: the tuple made for each of them may start the garbage collector, which runs
    Python code, and then another thread may add a stream. A copy of the values allocates nothing on its way.
    """
    return [one.stream for one in list(streams.values()) if not one.leaving]


def _warn_not_released(handler: Handler, count: int, error: MillstreamError) -> None:
    logger.warning(
        "%s: cannot release %d messages: %s; other workers claim them when they expire", handler.label, count, error
    )
