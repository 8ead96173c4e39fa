"""DrainWatch: detects when handlers have processed all their messages, for `millstream worker --once`."""

from collections.abc import Sequence

from millstream.admin.handler_figures import HandlerFigures, read_figures
from millstream.admin.redis_metrics import places_of
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client


class DrainWatch:
    """Reads the remaining messages of handlers from Redis, so that the result does not depend on a process that dies.

    A handler is drained when its streams have no unread entry, no worker has a message of it, and no key is ready or
    waits for its next attempt. Parked keys, delayed messages that are not due, and what a paused handler has not begun
    count as done: they wait for an operator, or for a time. Raises ConfigError for handlers of announced streams, of
    which Redis cannot say whether more will come.
    """

    def __init__(self, client: Client, handlers: Sequence[Handler], *, clock: Clock = SYSTEM_CLOCK) -> None:
        for one in handlers:
            if one.announced:
                raise ConfigError(
                    f"handler {one.name!r} reads announced streams, of which more may come: run it without --once, or "
                    "name the other handlers with --only"
                )
        self.paused: list[str] = []
        """The labels of handlers that are paused on any of their streams, at the last check."""
        self._client = client
        self._handlers = handlers
        self._clock = clock
        self._delivered: list[int] | None = None

    def check(self) -> bool:
        """Check all handlers. Raises RedisError.

        True if two checks in a row found all of them drained and no delivery in between: a message can then not have
        passed from one handler to another that had been checked before.
        """
        found = {
            label: read_figures(self._client, places, self._clock)
            for label, places in places_of(self._client, self._handlers).items()
        }
        self.paused = [label for label, one in found.items() if one.paused]
        delivered = [one.delivered for one in found.values()] if all(map(_is_drained, found.values())) else None
        drained = delivered is not None and delivered == self._delivered
        self._delivered = delivered
        return drained


def _is_drained(one: HandlerFigures) -> bool:
    if one.in_flight or one.keys["leased"]:
        return False
    return one.paused > 0 or not (
        one.unread or one.nacked or one.awaiting or one.keys["ready"] or one.keys["backing_off"]
    )
