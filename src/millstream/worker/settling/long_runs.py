"""LongRuns: warns of handlers that may hang, long before their time limit ends them."""

import logging
from collections.abc import Sequence

from millstream.delivery.reliable_stream import Delivery
from millstream.formats import format_age, pluralize
from millstream.handlers.handler import Handler

logger = logging.getLogger(__name__)

_LONG_MS = 60_000.0


class LongRuns:
    """Logs a warning when a run takes a minute, and again each time that the longest run has taken twice as long."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._warn_at_ms = _LONG_MS

    def check(self, runs: Sequence[Delivery], now_ms: float) -> None:
        """Look at the runs that have not ended."""
        long = [one for one in runs if now_ms - one.state_since_ms >= _LONG_MS]
        if not long:
            self._warn_at_ms = _LONG_MS
            return
        longest = min(long, key=lambda one: one.state_since_ms)
        took_ms = now_ms - longest.state_since_ms
        if took_ms < self._warn_at_ms:
            return
        self._warn_at_ms = 2 * took_ms
        logger.warning(
            "%s: %s for over a minute, the longest, on message %s of %s, for %s: the handler may hang; "
            "its time limit ends a run after %s",
            self._handler.label, pluralize(len(long), "run goes on", "runs go on"), longest.id.decode(),
            longest.stream.stream, format_age(took_ms), format_age(self._handler.time_limit_ms),
        )  # fmt: skip
