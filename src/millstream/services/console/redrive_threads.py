"""RedriveThreads: redrives of dead letters at a rate, which go on in this console when their request is answered."""

import atexit
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from millstream.admin.audit_log import AuditLog, failed_result, may_have_run
from millstream.clock import SYSTEM_CLOCK, Every
from millstream.delivery.dead_letter_queue import DeadLetterQueue, DeadLetterRef, Redriven
from millstream.delivery.rate_override import format_rate
from millstream.delivery.redrive_pacing import chunks_at
from millstream.delivery.redrive_reports import RedriveReport, read_stops, report_redrive
from millstream.errors import MillstreamError, RedisError, Unavailable
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


class RedriveThreads:
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
    """The redrives whose threads run; what these know of the console."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._deadline_ms = 0.0
        self._changed = threading.Condition()
        self._redrives: set[_Redrive] = set()
        self._places: set[_Redrive] = set()

    def add(self, redrive: "_Redrive") -> None:
        """Take one of the places. Raises Refused."""
        with self._changed:
            if self.stopping.is_set():
                raise Refused(503, "this console stops: begin the redrive on another one, or when it runs again")
            if len(self._places) >= MOST_REDRIVES:
                raise Refused(
                    409,
                    f"{MOST_REDRIVES} redrives at a rate are under way on this console, and no more are possible: "
                    "nothing was redriven; wait until one has ended, or stop one",
                )
            if not self._redrives:
                atexit.register(self.stop, STOP_S)
            self._redrives.add(redrive)
            self._places.add(redrive)

    def free_place(self, redrive: "_Redrive") -> None:
        """Let another one take its place, as it only has its result to record. May be repeated."""
        with self._changed:
            self._places.discard(redrive)

    def remove(self, redrive: "_Redrive") -> None:
        """Free its place, and wait for it no more."""
        with self._changed:
            self.free_place(redrive)
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
            self._redrives.clear()  # so that the exit of the interpreter neither waits for them again nor logs them


class _Redrive:
    """One redrive and its thread."""

    def __init__(self, url: str, refs: Sequence[DeadLetterRef], running: _Running) -> None:
        self._url = url
        self._refs = refs
        self._running = running
        self._keys = refs[0].keys
        self._report_due = Every(_REPORT_MS)
        self._is_report_missing = False
        self._why_stopped = ""
        self._problem = ""
        self._shown: RedriveReport
        self._found: RedriveReport

    @property
    def handler(self) -> str:
        """The label of its handler."""
        return self._keys.label

    def begin(self, client: Client, *, rate: float, by: str, about: Mapping[str, str]) -> None:
        """Record and report it, and start its thread. Raises RedisError."""
        log = AuditLog(client)
        record = log.begin(by=by, action="dlq redrive", about={**about, "rate": format_rate(rate)})
        self._found = self._shown = RedriveReport(
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
            self._remove_report(client)
            with suppress(RedisError):  # as a text: even after Unavailable nothing was redriven
                log.end(record, failed_result(str(error), self._found.figures))
            raise

    def _run(self) -> None:
        try:
            with Client(self._url, timeout_ms=_TIMEOUT_MS) as client:
                result = self._result(client)
                self._running.free_place(self)
                self._remove_report(client)
                self._record(client, result)
        finally:
            self._running.remove(self)

    def _result(self, client: Client) -> str:
        """Redrive all, or those until a stop; log and return the result in words."""
        try:
            self._redrive(client)
            result, is_early = self._summary(), self._found.left and self._why_stopped != _BY_AN_OPERATOR
        except MillstreamError as error:
            result, is_early = failed_result(error, self._found.figures), True
        except Exception:  # a mistake of ours: without a result it would be shown as under way
            logger.exception("redrive of %s failed", self.handler)
            result, is_early = failed_result("internal error", self._found.figures), True
        logger.log(
            logging.WARNING if is_early else logging.INFO,
            "redrive of %s at %s ended%s: %s",
            self.handler,
            format_rate(self._found.rate),
            " early" if is_early else "",
            result,
        )
        return result

    def _summary(self) -> str:
        parts = [self._found.figures]
        if stay := self._found.refused:
            parts.append(f"{pluralize(stay, 'dead letter')} could not be, such as {self._problem}")
        if self._why_stopped:
            parts.append(
                f"{self._why_stopped}, {pluralize(self._found.left, 'dead letter is', 'dead letters are')} left"
            )
        return "; ".join(parts)

    def _redrive(self, client: Client) -> None:
        """Redrive all, or those until a stop. Raises MillstreamError."""
        for chunk in chunks_at(self._refs, self._found.rate, lambda wait_s: self._wait(client, wait_s)):
            self._redrive_chunk(client, chunk)

    def _redrive_chunk(self, client: Client, chunk: Sequence[DeadLetterRef]) -> None:
        """Redrive some, or those until a stop. While Redis is unavailable, this is repeated: it redrives each once."""
        left = list(chunk)
        is_unknown = is_logged = False
        while left:
            try:
                for outcome in DeadLetterQueue(client).redrive(tuple(left)):
                    self._count(outcome, is_unknown=is_unknown)
                    left.remove(outcome.ref)
            except Unavailable as error:
                if not is_logged:
                    logger.warning("redrive of %s waits: %s; retrying every %.0f s", self.handler, error, _RETRY_S)
                    is_logged = True
                if may_have_run(error) and not is_unknown:
                    self._found = msgspec.structs.replace(
                        self._found, tried=self._found.tried + len(left), unknown=self._found.unknown + len(left)
                    )
                    is_unknown = True
                if self._wait(client, _RETRY_S):
                    return

    def _count(self, outcome: Redriven, *, is_unknown: bool) -> None:
        """Count a letter; `is_unknown`: it has been counted as one that an earlier step may have redriven."""
        found = self._found
        self._found = msgspec.structs.replace(
            found,
            tried=found.tried + (not is_unknown),
            redriven=found.redriven + (outcome.new_id is not None),
            unknown=found.unknown - (is_unknown and not outcome.is_settled),
        )
        if self._found.refused > found.refused:
            self._problem = self._problem or f"{outcome.ref.letter_id}: {outcome.problem}"

    def _wait(self, client: Client, wait_s: float) -> bool:
        """Wait for so many seconds, and report meanwhile; True if the redrive has to stop. Raises RedisError."""
        until_ms = SYSTEM_CLOCK.monotonic_ms() + wait_s * 1_000
        while not self._why_stopped:
            now_ms = SYSTEM_CLOCK.monotonic_ms()
            if self._report_due.is_due(now_ms) and self._is_stop_requested(client):
                self._why_stopped = _BY_AN_OPERATOR
                break
            left_s = max(0.0, until_ms - now_ms) / 1_000
            if self._running.stopping.wait(min(left_s, _REPORT_MS / 1_000)):
                self._why_stopped = "its console stopped"
            elif SYSTEM_CLOCK.monotonic_ms() >= until_ms:
                break
        return bool(self._why_stopped)

    def _is_stop_requested(self, client: Client) -> bool:
        """Whether an operator has requested its stop; report it, too. Both wait for the next call if Redis is away."""
        is_requested = False
        try:
            (is_requested,) = read_stops(client, self._keys.app, [self._found])
            report_redrive(client, self._keys.app, self._keys.handler, self._found, earlier=self._shown)
        except Unavailable as error:
            if not self._is_report_missing:
                every_s = _REPORT_MS / 1_000
                logger.warning("redrive of %s not reported: %s; retrying every %.0f s", self.handler, error, every_s)
            self._is_report_missing = True
        else:
            self._shown, self._is_report_missing = self._found, False
        return is_requested

    def _remove_report(self, client: Client) -> None:
        with suppress(RedisError):  # it expires
            report_redrive(client, self._keys.app, self._keys.handler, None, earlier=self._shown)

    def _record(self, client: Client, result: str) -> None:
        """Record the result as soon as Redis is available, or until the console stops."""
        logged = ""
        while True:
            is_last = self._running.stopping.is_set()
            try:
                AuditLog(client).end(self._found.id, result)
                return
            except RedisError as error:
                is_last = is_last or not isinstance(error, Unavailable)  # Redis would refuse it again
                then = "its record stays without one" if is_last else f"retrying every {_RETRY_S:.0f} s"
                if then != logged:
                    logger.warning("result of a redrive of %s not recorded: %s; %s", self.handler, error, then)
                if is_last:
                    return
                logged = then
                self._running.stopping.wait(_RETRY_S)
