"""FailureLog: logs failed attempts and dead letters of one handler, with the cause and with what happens next.

Both engines use it. However many messages fail, the log stays short and nothing is silent: the first ten lines of a
minute are written, then one line a minute, with the number of those left out.
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.handlers.attempt import DeadLettered, Outcome, Parked, RetryLater, traceback_of
from millstream.handlers.handler import Handler
from millstream.redis_client.escaping import escape, escape_line, escape_lines, json_value
from millstream.redis_client.formats import format_run_time
from millstream.redis_client.redaction import redact_text
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Arg

logger = logging.getLogger("millstream.failures")

PER_MINUTE = 10
"""Failures that are logged in a minute: failed attempts and dead letters each."""
NEW_KINDS_PER_MINUTE = 10
"""Failures that are logged beyond that, as they are the first of their kind."""

_WINDOW_MS = 60_000.0
_MAX_KINDS, _KINDS_NAMED = 1_000, 5
_MAX_NAME, _MAX_ERROR, _MAX_TRACEBACK = 100, 1_000, 4_000
_EXCEPTION = re.compile(r"\w+(?=: )")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt, or a dead letter.

    * `kind`: what it has in common with others: its exception type and place, or its reason; the first word is shown
    * `reason`: of a dead letter; "" for a failed attempt
    * `text`: the log message, in one line; `traceback`: "" where it was not recorded
    * `is_last`: the handler does not run on the message again by itself
    """

    kind: str
    reason: str = ""
    text: str
    handler: str
    stream: str
    id: str
    key: bytes | None
    attempt: int
    error: str
    traceback: str
    is_last: bool

    @property
    def level(self) -> int:
        """The level of its log record. A message that the handler has rejected is no error of the handler."""
        return logging.ERROR if self.reason and self.reason != "rejected" else logging.WARNING


def log_failed_list(label: str, stream: str, first_id: str, count: int, error: str) -> None:
    """Log that a list of messages of one key has failed, which is no attempt on any of them. `label`: the handler."""
    logger.info(
        "%s: a list of %d messages of a key of %s failed: %s; running each of them alone (first: %s)",
        label,
        count,
        escape(stream),
        escape_line(error)[:_MAX_ERROR],
        first_id,
    )


def log_failure(failure: Failure, is_new: bool) -> None:
    """Log a failure; its traceback too if it `is_new`, the first of its kind, or nothing follows it."""
    log_with_traceback(
        logger,
        failure.level,
        failure.text,
        failure.traceback if is_new or failure.is_last else "",
        handler=failure.handler,
        stream=failure.stream,
        id=failure.id,
        key=json_value(failure.key),
        attempt=failure.attempt,
        exception=failure.error,
    )


def log_with_traceback(log: logging.Logger, level: int, text: str, traceback: str, **fields: object) -> None:
    """Log `text` with a traceback, and with fields that logs in JSON show."""
    if not log.isEnabledFor(level):
        return
    record = log.makeRecord(log.name, level, __file__, 0, text, (), None, extra={**fields, "traceback": traceback})
    record.exc_text = traceback.rstrip("\n") or None  # every formatter adds it, and no frame is kept alive
    log.handle(record)


class _Window:
    """Admits the first failures of a minute, and the first of each kind; counts the others by the names of kinds."""

    def __init__(self) -> None:
        self.ends_ms = float("-inf")
        self.omitted: Counter[str] = Counter()
        self._kinds: set[str] = set()
        self._left = self._new_left = 0

    def begin(self, ends_ms: float) -> None:
        """Begin the next window: with one line if the last one was not enough."""
        self._left, self._new_left = 1 if self.omitted else PER_MINUTE, NEW_KINDS_PER_MINUTE
        self.omitted.clear()
        self.ends_ms = ends_ms

    def admit(self, kind: str) -> tuple[bool, bool]:
        """Return whether a failure is to be logged, and whether it is the first of its kind."""
        is_new = kind not in self._kinds
        if is_new and len(self._kinds) < _MAX_KINDS:
            self._kinds.add(kind)
        if self._left > 0:
            self._left -= 1
        elif is_new and self._new_left > 0:
            self._new_left -= 1
        else:
            self.omitted[kind.partition(" ")[0]] += 1
            return False, is_new
        return True, is_new


class FailureLog:
    """Logs the failures of one handler; any thread may call it.

    `on_failure` receives each failure that is not left out, and whether it is the first of its kind. Call
    `report_omitted` now and then, and `close` at the end: they log how many failures were left out.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        on_failure: Callable[[Failure, bool], object] = log_failure,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._handler = handler
        self._on_failure = on_failure
        self._clock = clock
        self._lock = threading.Lock()
        self._attempts, self._dead = _Window(), _Window()

    def attempt_failed(
        self,
        stream: str,
        entry_id: str,
        key: bytes | None,
        attempt: int,
        outcome: RetryLater | Parked | DeadLettered,
        *,
        delay_ms: float = 0.0,
        action: str | None = None,
    ) -> None:
        """Log a failed attempt; `delay_ms`: how long the message waits for its next one.

        `action`: what happens instead of what the outcome asks for, where this process may not decide that any more.
        """
        raised = outcome.raised if isinstance(outcome, RetryLater) else None
        kind = _kind_of_text(outcome.error, "failed") if raised is None else _kind_of(raised)
        is_admitted, is_new = self._admit(self._attempts, kind)
        if not is_admitted:
            return
        retry, error = self._handler.retry, _line(outcome.error, _MAX_ERROR)
        waits = isinstance(outcome, RetryLater) and outcome.waits
        is_last = action is None and (isinstance(outcome, Parked) or (attempt == retry.attempts and not waits))
        if isinstance(outcome, RetryLater):
            traceback = traceback_of(raised) if is_new or is_last else ""
        else:
            traceback = outcome.traceback
        blocks = retry.then == "block" and attempt > retry.attempts  # such a message has no last attempt
        of = "" if blocks else f" of {max(attempt, retry.attempts)}"
        name = message_name(stream, entry_id, key)
        event = f"{name} waits for newer code" if waits else f"attempt {attempt}{of} failed on {name}"
        failure = Failure(
            kind=kind,
            text=f"{self._handler.label}: {event}: {error}; {action or self._action(outcome, attempt, key, delay_ms)}",
            handler=self._handler.label,
            stream=escape(stream),
            id=entry_id,
            key=key,
            attempt=attempt,
            error=error,
            traceback=_lines(traceback),
            is_last=is_last,
        )
        self._on_failure(failure, is_new)

    def _action(self, outcome: Outcome, attempt: int, key: bytes | None, delay_ms: float) -> str:
        if isinstance(outcome, Parked):
            return f"{'it' if key is None else 'its key'} is parked, see: millstream key list {self._handler.label}"
        retry = self._handler.retry
        waits = isinstance(outcome, RetryLater) and outcome.waits
        blocks = waits or (retry.then == "block" and attempt >= retry.attempts and key is not None)
        return f"{'it blocks its key, ' if blocks else ''}retrying in {format_run_time(delay_ms)}"

    def dead_lettered(self, letters: Sequence[Sequence[Arg]]) -> None:
        """Log dead letters that were written, as `DeadLetter.items` returns them."""
        for items in letters:
            found = mapping_of(items)
            reason, error = _text(found["reason"]), _text(found["error"])
            kind = f"{reason} {_kind_of_text(error, '')}"
            is_admitted, is_new = self._admit(self._dead, kind)
            if is_admitted:
                self._on_failure(self._dead_letter(found, kind, reason, _line(error, _MAX_ERROR)), is_new)

    def _dead_letter(self, found: Mapping[Arg, Arg], kind: str, reason: str, error: str) -> Failure:
        stream, entry_id, key = _text(found["stream"]), _text(found["id"]), found.get("key")
        attempt = int(_text(found["attempts"]))
        after = f", attempt {attempt} of {max(attempt, self._handler.retry.attempts)}" if reason == "failed" else ""
        key = key if isinstance(key, bytes) else None
        return Failure(
            kind=kind,
            reason=reason,
            text=f"{self._handler.label}: dead letter ({reason}{after}): {message_name(stream, entry_id, key)}: {error}; "
            "see: millstream dlq list",
            handler=self._handler.label,
            stream=escape(stream),
            id=entry_id,
            key=key,
            attempt=attempt,
            error=error,
            traceback=_lines(_text(found["traceback"])),
            is_last=True,
        )

    def _admit(self, window: _Window, kind: str) -> tuple[bool, bool]:
        with self._lock:
            self._begin_if_over(window)
            return window.admit(kind)

    def report_omitted(self) -> None:
        """Log how many failures were left out, once their minute is over."""
        with self._lock:
            for window in (self._attempts, self._dead):
                if window.omitted:
                    self._begin_if_over(window)

    def close(self) -> None:
        """Log how many failures were left out since the last report."""
        with self._lock:
            for window in (self._attempts, self._dead):
                self._log_omitted(window)
                window.omitted.clear()

    def merge(self, recorded: bytes) -> None:
        """Log the failures that a FailureRecorder of another process has recorded."""
        failures, attempts, dead = _unpack(recorded)
        for failure in failures:
            is_admitted, is_new = self._admit(self._dead if failure.reason else self._attempts, failure.kind)
            if is_admitted:
                self._on_failure(failure, is_new)
        with self._lock:
            for window, counts in ((self._attempts, attempts), (self._dead, dead)):
                if counts:
                    self._begin_if_over(window)
                    window.omitted.update(counts)

    def _begin_if_over(self, window: _Window) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms >= window.ends_ms:
            self._log_omitted(window)
            window.begin(now_ms + _WINDOW_MS)

    def _log_omitted(self, window: _Window) -> None:
        if not window.omitted:
            return
        is_error = window is self._dead and window.omitted.keys() != {"rejected"}
        logger.log(
            logging.ERROR if is_error else logging.WARNING,
            "%s: %s more %s, left out of this log: %s; see: millstream %s",
            self._handler.label,
            f"{window.omitted.total():,}",
            "dead letters" if window is self._dead else "failed attempts",
            ", ".join(f"{count:,} {kind}" for kind, count in window.omitted.most_common(_KINDS_NAMED)),
            f"dlq list {self._handler.label}" if window is self._dead else "info",
            extra={"handler": self._handler.label},
        )


class FailureRecorder(FailureLog):
    """Records failures in a process whose log may be read by no user, for the FailureLog of another process."""

    def __init__(self, handler: Handler) -> None:
        self._recorded: list[Failure] = []
        super().__init__(handler, on_failure=lambda failure, is_new: self._recorded.append(failure))
        for window in (self._attempts, self._dead):
            window.begin(float("inf"))

    def pack(self) -> bytes | None:
        """Return what was recorded, bounded, for `FailureLog.merge`; None if nothing has failed."""
        if not self._recorded:
            return None
        return msgspec.msgpack.encode((self._recorded, self._attempts.omitted, self._dead.omitted))


_unpack = msgspec.msgpack.Decoder(tuple[list[Failure], dict[str, int], dict[str, int]]).decode


def _kind_of(raised: BaseException) -> str:
    place = raised.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
    return type(raised).__name__ + where


def _kind_of_text(error: str, otherwise: str) -> str:
    found = _EXCEPTION.match(error)
    return otherwise if found is None else found[0]


def message_name(stream: str, entry_id: str, key: bytes | None) -> str:
    """Return the name of a message in a log line."""
    named = f"message {entry_id} of {_clip(escape(stream), _MAX_NAME)}"
    return named if key is None else f"{named}, key {_clip(escape(key), _MAX_NAME)}"


def _line(text: str, most: int) -> str:
    return _clip(escape_line(redact_text(text)), most)


def _lines(text: str) -> str:
    # The end of a traceback is kept, as it has the error.
    text = escape_lines(redact_text(text))
    return text if len(text) <= _MAX_TRACEBACK else "..." + text[-_MAX_TRACEBACK:]


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _text(value: Arg) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
