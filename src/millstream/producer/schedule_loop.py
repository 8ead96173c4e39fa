"""Schedule loop: publishes the firings of one schedule when they are due, beside the handlers of either engine."""

import logging
import threading
from collections.abc import Callable, Sequence

from millstream.clock import Clock, wait_after
from millstream.errors import MillstreamError, OutOfMemory, Unavailable, text_of
from millstream.handlers.schedule import Schedule
from millstream.producer.firings import FiringRecord, Firings, encode_message
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age, pluralize

logger = logging.getLogger(__name__)

MOST_MISSED = 1_000
"""Most missed firings that are published after a downtime with missed="all"."""

LATE_MS = 60_000
"""With missed="skip", a firing is missed that is not published so many milliseconds after it was due."""

_AHEAD_MS = 60_000
"""The log reports a last firing that lies further in the future: nothing is due until then."""

_LONGEST_WAIT_MS = 60_000
_RETRY_MS = 1_000.0
_LONGEST_RETRY_MS = 60_000.0


class _MessageFailed(Exception):
    """The function of the schedule failed for the firing at `local_time`, by `cause`."""

    def __init__(self, local_time: str, cause: BaseException) -> None:
        super().__init__(local_time)
        self.local_time = local_time
        self.cause = cause


class ScheduleLoop:
    """Publishes the firings of `schedule` until `stopping`. Any number of processes may run it at once.

    It reads the record once for each firing, and sleeps until the next one by the server's clock, at most a minute. The
    function is called before its firing is published, so that of several processes each may call it for the same
    firing; one result is published. If it raises, the firing stays due, and is tried again with a back-off.
    """

    def __init__(self, client: Client, schedule: Schedule, stopping: threading.Event) -> None:
        self._schedule = schedule
        self._firings = Firings(client, schedule)
        self._stopping = stopping
        self._has_begun = False
        self._failures = 0
        self._logged = ""
        self._logged_ahead_ms = 0

    def run(self) -> None:
        """Publish until the stop. Raises nothing that ends by itself or by an operator."""
        wait_ms = 0.0
        while not self._stopping.wait(wait_ms / 1_000):
            try:
                wait_ms = self.publish_due()
                self._failures, self._logged = 0, ""
            except _MessageFailed as error:
                wait_ms = self._on_failed(error)
            except MillstreamError as error:
                wait_ms = _RETRY_MS
                self._on_refused(error)

    def publish_due(self) -> float:
        """Publish the firings that are due; return how long to wait for the next one, in milliseconds.

        Raises RedisError and ConfigError.
        """
        record = self._firings.read()
        if not record.stored or (record.rule != self._schedule.rule and not self._has_begun):
            # It begins now: nothing of the past is fired.
            self._has_begun = self._firings.publish(record, record.now_ms) is not None
            return 0.0
        # From now on another rule in the record is that of an older or newer version of the app, which runs beside.
        self._has_begun = True
        most = MOST_MISSED if self._schedule.missed == "all" else 1
        due = self._schedule.times.last_between(record.last_ms, record.now_ms, most)
        if due:
            self._publish(record, due)
            return 0.0
        self._check_clock(record)
        next_ms = self._schedule.times.next_after(record.last_ms)
        return min(next_ms - record.now_ms, _LONGEST_WAIT_MS)

    def _publish(self, record: FiringRecord, due: Sequence[int]) -> None:
        """Publish the firings of `due`, the last ones that are due; those before them are left out."""
        is_late = self._schedule.missed == "skip" and record.now_ms - due[-1] > LATE_MS
        left_out = (record.last_ms, due[-1] if is_late else due[0] - 1)
        for firing_ms in due:
            items = () if is_late else self._items(firing_ms)
            try:
                published = self._firings.publish(record, firing_ms, items)
            except OutOfMemory:  # nothing was written, nor left out
                raise
            except Unavailable:
                if firing_ms == due[0]:
                    self._on_left_out(*left_out)  # the reply may be lost: the next attempt may find nothing due
                raise
            if published is None:
                return
            if firing_ms == due[0]:
                self._on_left_out(*left_out)
            record = published
            if self._stopping.is_set():
                return

    def _items(self, firing_ms: int) -> Sequence[bytes]:
        try:
            return encode_message(self._schedule.message(firing_ms), firing_ms)
        # The function may raise anything, SystemExit too: the schedule must not end silently.
        except BaseException as error:
            raise _MessageFailed(self._shown(firing_ms), error) from error

    def _shown(self, firing_ms: int) -> str:
        return self._schedule.times.local_time(firing_ms).isoformat()

    def _on_left_out(self, after_ms: int, until_ms: int) -> None:
        """Log the firings later than `after_ms`, up to and with `until_ms`. They are counted here, so only once."""
        times = self._schedule.times
        last = times.last_between(after_ms, until_ms, 1)
        if not last:
            return
        logger.warning(
            "schedule %s: %s left out, from %s to %s: they were not published in time, and missed=%r; continuing with "
            "later ones",
            self._schedule.label,
            pluralize(times.count_between(after_ms, until_ms), "firing"),
            self._shown(times.next_after(after_ms)),
            self._shown(last[-1]),
            self._schedule.missed,
        )

    def _check_clock(self, record: FiringRecord) -> None:
        """Log once that the last firing lies in the future: the server's clock was ahead when it was published."""
        ahead_ms = record.last_ms - record.now_ms
        if ahead_ms <= _AHEAD_MS or record.last_ms == self._logged_ahead_ms:
            return
        self._logged_ahead_ms = record.last_ms
        logger.warning(
            "schedule %s: its last firing is that of %s, %s ahead of the server's clock, which was wrong then, or is now; "
            "publishing nothing until that time, unless you delete the record, to let the schedule begin anew: %s",
            self._schedule.label,
            self._shown(record.last_ms),
            format_age(ahead_ms),
            self._firings.reset_command,
        )

    def _on_failed(self, error: _MessageFailed) -> float:
        self._failures += 1
        wait_ms = wait_after(self._failures, _RETRY_MS, _LONGEST_RETRY_MS)
        cause = error.cause
        logger.error(
            "schedule %s: no message for the firing at %s: %s: %s; trying again in %.0f s",
            self._schedule.label,
            error.local_time,
            type(cause).__name__,
            text_of(cause),
            wait_ms / 1_000,
            exc_info=cause,
        )
        return wait_ms

    def _on_refused(self, error: MillstreamError) -> None:
        if str(error) != self._logged:
            self._logged = str(error)
            logger.warning(
                "schedule %s: its firings cannot be published: %s; trying again", self._schedule.label, error
            )


class ScheduleThreads:
    """The loops of an app's schedules, each in a thread of its own; they share a client. Both engines start them.

    `on_error` is called with an error that ends a loop.
    """

    def __init__(
        self, url: str, schedules: Sequence[Schedule], on_error: Callable[[BaseException], object], clock: Clock
    ) -> None:
        self._url = url
        self._schedules = schedules
        self._on_error = on_error
        self._clock = clock
        self._client: Client | None = None
        self._stopping = threading.Event()
        self._threads: list[tuple[Schedule, threading.Thread]] = []

    def start(self) -> None:
        """Start the threads."""
        if not self._schedules:
            return
        self._client = Client(self._url)
        for schedule in self._schedules:
            loop = ScheduleLoop(self._client, schedule, self._stopping)
            name = f"millstream-schedule-{schedule.name}"
            thread = threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            thread.start()
            self._threads.append((schedule, thread))

    def stop(self) -> None:
        """Let the threads end after the firing that they publish."""
        self._stopping.set()

    def join(self, deadline_ms: float) -> None:
        """Wait for the threads that were started until the deadline, in milliseconds of the clock."""
        for schedule, thread in self._threads:
            thread.join(max(0.0, deadline_ms - self._clock.monotonic_ms()) / 1_000)
            if thread.is_alive():
                logger.warning(
                    "schedule %s: a firing was under way at the stop; another process publishes it, unless this one does",
                    schedule.label,
                )
        if self._client is not None and not any(thread.is_alive() for _, thread in self._threads):
            self._client.close()

    def _run(self, loop: ScheduleLoop) -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001 - the process raises it, after it has ended its handlers
            self._on_error(error)
