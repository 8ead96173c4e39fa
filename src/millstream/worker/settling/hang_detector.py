"""HangDetector: warns of handlers that may hang, long before their time limit ends them."""

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from millstream.clock import Every
from millstream.delivery.long_runs import HELD_MS, LONG_ISOLATED_MS, LONG_MS, LongRun
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.handler import Handler
from millstream.handlers.live_traceback import describe_traceback
from millstream.observability.failure_log import log_with_traceback, message_name
from millstream.redis_client.escaping import escape, json_value
from millstream.redis_client.formats import format_age, pluralize

logger = logging.getLogger(__name__)

_REPEATS = 3


class HangDetector:
    """Logs a warning of a message that has run for a minute, and again each time that it has run twice as long.

    One record a minute at most, which names the message that has run longest of those, and shows where its handler is.

    * `consumer`: the worker's name
    * `traceback_of_run`: returns where the handler is in its run on a message, if that is known
    """

    def __init__(
        self,
        handler: Handler,
        consumer: str = "",
        traceback_of_run: Callable[[Delivery], TracebackType | None] = lambda delivery: None,
    ) -> None:
        self._handler = handler
        self._consumer = consumer
        self._traceback_of_run = traceback_of_run
        self._warn_at_ms: dict[Delivery, float] = {}
        self._warning = Every(LONG_MS)
        self._long: dict[Delivery, LongRun] = {}
        self._reported: set[LongRun] = set()
        self._report_due_ms = 0.0

    def check(self, runs: Sequence[Delivery], now_ms: float) -> None:
        """Look at the runs that have not ended."""
        took_ms = {one: now_ms - one.state_since_ms for one in runs}
        self._long = {
            one: self._long.get(one) or self._report(one, ran_ms)
            for one, ran_ms in took_ms.items()
            if ran_ms >= (LONG_ISOLATED_MS if one.isolated_by else LONG_MS)
        }
        self._warn_at_ms = {
            one: self._warn_at_ms.get(one, LONG_MS) for one, ran_ms in took_ms.items() if ran_ms >= LONG_MS
        }
        due = [one for one, at_ms in self._warn_at_ms.items() if took_ms[one] >= at_ms]
        if due and self._warning.is_due(now_ms):
            self._warn_at_ms |= {one: 2 * took_ms[one] for one in due}
            longest = max(due, key=took_ms.__getitem__)
            self._warn(longest, took_ms[longest])

    def due_reports(self, now_ms: float) -> tuple[list[LongRun], list[LongRun]]:
        """Return what operators have to see now: all long runs, several times within `HELD_MS`, and those that ended."""
        long = set(self._long.values())
        ended = self._reported - long
        is_due = now_ms >= self._report_due_ms or not long <= self._reported
        if is_due and long:
            self._report_due_ms = now_ms + HELD_MS / _REPEATS
        self._reported = long
        return list(long) if is_due else [], list(ended)

    def end(self) -> list[LongRun]:
        """Return the runs that operators see: none goes on once the worker has ended."""
        ended, self._reported = self._reported, set()
        return list(ended)

    def _warn(self, delivery: Delivery, ran_ms: float) -> None:
        stream, entry_id = delivery.stream.stream, delivery.id.decode()
        key = None if delivery.lease is None else delivery.lease.key
        log_with_traceback(
            logger,
            logging.WARNING,
            f"{self._handler.label}: {message_name(stream, entry_id, key)} has been running for {format_age(ran_ms)} "
            f"({pluralize(len(self._warn_at_ms), 'message')} for over a minute): the handler may hang; its time limit "
            f"ends a run after {format_age(self._handler.time_limit_ms)}",
            describe_traceback(self._traceback_of_run(delivery)),
            handler=self._handler.label,
            stream=escape(stream),
            id=entry_id,
            key=json_value(key),
            attempt=delivery.attempt,
        )

    def _report(self, delivery: Delivery, ran_ms: float) -> LongRun:
        key = None if delivery.lease is None else delivery.lease.key
        return LongRun(
            handler=self._handler.label,
            stream=escape(delivery.stream.stream),
            id=delivery.id.decode(),
            key=None if key is None else escape(key),
            worker=self._consumer,
            started_ms=round(time.time() * 1000 - ran_ms),
            time_limit_ms=round(self._handler.time_limit_ms),
            isolated=bool(delivery.isolated_by),
        )
