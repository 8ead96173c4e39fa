"""WaitingMessages: how many messages of an app wait, whichever engine runs it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from millstream.admin.handler_figures import HandlerFigures, read_figures
from millstream.admin.redis_metrics import KnownPlaces, places_of
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client

_DISCOVER_EVERY_MS = 10_000.0


@dataclass(frozen=True)
class Waiting:
    """How many messages wait; if `is_partial`, `count` is a lower bound."""

    count: int
    is_partial: bool = False


class WaitingMessages:
    """Reads how many messages of `handlers` are not committed: unread, in key queues or in flight."""

    def __init__(self, client: Client, handlers: Iterable[Handler], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._clock = clock
        discover = partial(places_of, handlers=tuple(handlers))
        self._known = KnownPlaces(discover, every_ms=_DISCOVER_EVERY_MS, clock=clock)

    def count(self, at_least: int) -> Waiting:
        """The messages that wait now. Those of a handler that is paused on all its streams do not count.

        Where Redis does not know the lag of a group, entries are counted one by one. Unless all of them are counted,
        the count is `at_least` or more. Raises RedisError.
        """
        self._known.refresh(self._client)
        count, is_partial = 0, False
        for places in self._known.places.values():
            found = read_figures(self._client, places, self._clock, at_least=at_least - count)
            if not _is_paused(found):
                count += found.waiting
                is_partial |= found.is_partial
        return Waiting(count, is_partial)


def _is_paused(one: HandlerFigures) -> bool:
    return 0 < one.streams == one.paused
