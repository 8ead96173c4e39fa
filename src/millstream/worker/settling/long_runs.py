"""LongRuns: warns of handlers that may hang, long before their time limit ends them."""

import logging
from collections.abc import Sequence

from millstream.delivery.reliable_stream import Delivery
from millstream.formats import format_age, pluralize
from millstream.handlers.handler import Handler

logger = logging.getLogger(__name__)

_LONG_MS = 60_000.0


class LongRuns:
    """Logs a warning of a message that has run for a minute, and again each time that it has run twice as long.

    One line a minute at most, which names the message that has run longest of those.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._warn_at_ms: dict[Delivery, float] = {}
        self._next_line_ms = 0.0

    def check(self, runs: Sequence[Delivery], now_ms: float) -> None:
        """Look at the runs that have not ended."""
        took_ms = {one: now_ms - one.state_since_ms for one in runs if now_ms - one.state_since_ms >= _LONG_MS}
        self._warn_at_ms = {one: self._warn_at_ms.get(one, _LONG_MS) for one in took_ms}
        due = [one for one, at_ms in self._warn_at_ms.items() if took_ms[one] >= at_ms]
        if not due or now_ms < self._next_line_ms:
            return
        self._next_line_ms = now_ms + _LONG_MS
        self._warn_at_ms |= {one: 2 * took_ms[one] for one in due}
        longest = max(due, key=took_ms.__getitem__)
        logger.warning(
            "%s: message %s of %s has been running for %s (%s for over a minute): the handler may hang; its time limit "
            "ends a run after %s",
            self._handler.label, longest.id.decode(), longest.stream.stream, format_age(took_ms[longest]),
            pluralize(len(took_ms), "message"), format_age(self._handler.time_limit_ms),
        )  # fmt: skip
