"""PacedRedrives: redrives of dead letters at a rate, which go on in this console when their request is answered."""

import atexit
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from millstream.admin.audit_log import AuditLog, failed_result
from millstream.clock import SYSTEM_CLOCK, Every
from millstream.delivery.dead_letter_queue import DeadLetterQueue, DeadLetterRef
from millstream.delivery.paced_redrives import PacedRedrive, read_stops, report_redrive
from millstream.delivery.rate_override import format_rate
from millstream.delivery.redrive_pacing import portions_at
from millstream.errors import MillstreamError, RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize
from millstream.services.web.errors import Refused

logger = logging.getLogger(__name__)

MOST_REDRIVES = 8
"""The most redrives at a rate that one console does at the same time."""

STOP_S = 5.0
"""How long the end of a console waits for all of them together."""

_REPORT_MS = 2_000.0
_RETRY_S = 2.0
_TIMEOUT_MS = 10_000
_BY_AN_OPERATOR = "stopped by an operator"


class PacedRedrives:
    """The redrives of one console that are under way, each in a thread with a client of its own. For any thread.

    `stop` ends them. A console that is mounted in another application gets no call at the shutdown: its redrives end in
    the same way at the exit of the interpreter.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._running = _Running()
        weakref.finalize(self, self._running.begin_stop, STOP_S)

    def start(
        self,
        client: Client,
        refs: Sequence[DeadLetterRef],
        *,
        rate: float,
        by: str,
        about: Mapping[str, str],
    ) -> None:
        """Begin to redrive dead letters of one handler in the order of `refs`, at most `rate` a second.

        `by` and `about` are for the audit, which has one record: from now on, and with a result at the end. Raises
        Refused if too many redrives are under way, or the console stops, and RedisError.
        """
        redrive = _Redrive(self._url, refs, self._running)
        self._running.add(redrive)
        try:
            redrive.begin(client, rate=rate, by=by, about=about)
        except BaseException:
            self._running.remove(redrive)
            raise

    async def begin_stop(self) -> None:
        """Let all redrives end after the dead letters they are at, and begin no more. Returns at once."""
        self._running.begin_stop(STOP_S)

    def stop(self) -> None:
        """The same, and wait until they have ended: at most five seconds from the first call of either."""
        self._running.stop(STOP_S)


class _Running:
    """The redrives that are under way; what their threads know of the console."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._deadline_ms = 0.0
        self._changed = threading.Condition()
        self._redrives: set[_Redrive] = set()

    def add(self, redrive: "_Redrive") -> None:
        """Take one of the places. Raises Refused."""
        with self._changed:
            if self.stopping.is_set():
                raise Refused(503, "this console stops: begin the redrive on another one, or when it runs again")
            if len(self._redrives) >= MOST_REDRIVES:
                raise Refused(
                    409,
                    f"{MOST_REDRIVES} redrives at a rate are under way on this console, and no more are possible: "
                    "nothing was redriven; wait until one has ended, or stop one",
                )
            if not self._redrives:
                atexit.register(self.stop, STOP_S)
            self._redrives.add(redrive)

    def remove(self, redrive: "_Redrive") -> None:
        """Free its place."""
        with self._changed:
            self._redrives.discard(redrive)
            if not self._redrives and not self.stopping.is_set():
                atexit.unregister(self.stop)
            self._changed.notify_all()

    def begin_stop(self, wait_s: float) -> None:
        """Let all end, until `wait_s` seconds from the first such call."""
        with self._changed:
            if not self.stopping.is_set():
                self._deadline_ms = SYSTEM_CLOCK.monotonic_ms() + wait_s * 1_000
                self.stopping.set()

    def stop(self, wait_s: float) -> None:
        """The same, and wait for their ends until then; log those that have not ended."""
        self.begin_stop(wait_s)
        with self._changed:
            left_s = max(0.0, self._deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / 1_000
            self._changed.wait_for(lambda: not self._redrives, left_s)
            for one in self._redrives:
                logger.warning(
                    "redrive of %s not ended: Redis does not answer; its record stays without a result, and what it "
                    "has not redriven stays a dead letter",
                    one.handler,
                )


class _Redrive:
    """One redrive and its thread."""

    def __init__(self, url: str, refs: Sequence[DeadLetterRef], running: _Running) -> None:
        self._url = url
        self._refs = refs
        self._running = running
        self._keys = refs[0].keys
        self._report_due = Every(_REPORT_MS)
        self._why_stopped = ""
        self._problem = ""
        self._shown: PacedRedrive
        self._found: PacedRedrive

    @property
    def handler(self) -> str:
        """The label of its handler."""
        return self._keys.label

    def begin(self, client: Client, *, rate: float, by: str, about: Mapping[str, str]) -> None:
        """Record and report it, and start its thread. Raises RedisError."""
        log = AuditLog(client)
        record = log.begin(by=by, action="dlq redrive", about={**about, "rate": format_rate(rate)})
        self._found = self._shown = PacedRedrive(
            id=record,
            by=escape(by),
            rate=rate,
            began_ms=int(record.partition("-")[0]),
            letters=len(self._refs),
        )
        try:
            report_redrive(client, self._keys.app, self._keys.handler, self._found)
            threading.Thread(target=self._run, name="millstream-redrive", daemon=True).start()
        except (RedisError, RuntimeError) as error:  # a thread that cannot start is a RuntimeError
            with suppress(RedisError):
                log.end(record, f"failed: {error}; {self._found.figures} before")
            raise

    def _run(self) -> None:
        try:
            with Client(self._url, timeout_ms=_TIMEOUT_MS) as client:
                result = self._redrive(client)
                is_early = self._found.left and self._why_stopped != _BY_AN_OPERATOR
                logger.log(
                    logging.WARNING if is_early else logging.INFO,
                    "redrive of %s at %s ended%s: %s",
                    self.handler,
                    format_rate(self._found.rate),
                    " early" if is_early else "",
                    result,
                )
                with suppress(RedisError):  # it expires
                    report_redrive(client, self._keys.app, self._keys.handler, None, earlier=self._shown)
                self._record(client, result)
        finally:
            self._running.remove(self)

    def _redrive(self, client: Client) -> str:
        """Redrive all, or those until a stop; return the result in words."""
        queue = DeadLetterQueue(client)
        try:
            for portion in portions_at(self._refs, self._found.rate, lambda wait_s: self._wait(client, wait_s)):
                for outcome in queue.redrive(portion):
                    is_redriven = outcome.new_id is not None
                    self._found = msgspec.structs.replace(
                        self._found, tried=self._found.tried + 1, redriven=self._found.redriven + is_redriven
                    )
                    self._problem = self._problem or (outcome.problem and f"{outcome.ref.letter_id}: {outcome.problem}")
        except MillstreamError as error:
            return failed_result(error, self._found.figures)
        parts = [self._found.figures]
        if stay := self._found.tried - self._found.redriven:
            parts.append(f"{pluralize(stay, 'dead letter')} could not be, such as {self._problem}")
        if self._why_stopped:
            parts.append(
                f"{self._why_stopped}, {pluralize(self._found.left, 'dead letter is', 'dead letters are')} left"
            )
        return "; ".join(parts)

    def _wait(self, client: Client, wait_s: float) -> bool:
        """Wait for so many seconds, and report meanwhile; True if the redrive has to stop. Raises RedisError."""
        until_ms = SYSTEM_CLOCK.monotonic_ms() + wait_s * 1_000
        while True:
            now_ms = SYSTEM_CLOCK.monotonic_ms()
            if self._report_due.is_due(now_ms):
                self._report(client)
                if read_stops(client, self._keys.app, [self._found]) == [True]:
                    self._why_stopped = _BY_AN_OPERATOR
                    return True
            left_s = max(0.0, until_ms - now_ms) / 1_000
            if self._running.stopping.wait(min(left_s, _REPORT_MS / 1_000)):
                self._why_stopped = "its console stopped"
                return True
            if SYSTEM_CLOCK.monotonic_ms() >= until_ms:
                return False

    def _report(self, client: Client) -> None:
        report_redrive(client, self._keys.app, self._keys.handler, self._found, earlier=self._shown)
        self._shown = self._found

    def _record(self, client: Client, result: str) -> None:
        """Record the result as soon as Redis takes it, or until the console stops."""
        logged = ""
        while True:
            is_last = self._running.stopping.is_set()
            try:
                AuditLog(client).end(self._found.id, result)
                return
            except RedisError as error:
                then = "its record stays without one" if is_last else f"retrying every {_RETRY_S:.0f} s"
                if then != logged:
                    logger.warning("result of a redrive of %s not recorded: %s; %s", self.handler, error, then)
                if is_last:
                    return
                logged = then
                self._running.stopping.wait(_RETRY_S)
