"""WaitingMessages: how many messages of an app wait, whichever engine runs it."""

from collections.abc import Iterable
from functools import partial

from millstream.admin.handler_figures import HandlerFigures, read_figures
from millstream.admin.redis_metrics import KnownPlaces, places_of
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client

_DISCOVER_EVERY_MS = 10_000.0


class WaitingMessages:
    """Reads how many messages of `handlers` are not committed: unread, in key queues or in flight."""

    def __init__(self, client: Client, handlers: Iterable[Handler], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._clock = clock
        discover = partial(places_of, handlers=tuple(handlers))
        self._known = KnownPlaces(discover, every_ms=_DISCOVER_EVERY_MS, clock=clock)

    def count(self) -> int:
        """The messages that wait now. Those of a handler that is paused on all its streams do not count.

        Raises RedisError.
        """
        self._known.refresh(self._client)
        found = [read_figures(self._client, places, self._clock) for places in self._known.places.values()]
        return sum(one.waiting for one in found if not _is_paused(one))


def _is_paused(one: HandlerFigures) -> bool:
    return 0 < one.streams == one.paused
