"""The log of failures: what a line says, how many lines there are, and that nothing is left out silently."""

import logging
from collections.abc import Callable

import pytest

from millstream import Retry
from millstream.errors import Reject
from millstream.handlers.attempt import DeadLettered, Parked, RetryLater, attempt_plain, dead_letter_of
from millstream.handlers.handler import Handler, compile_handler
from millstream.model import Message
from millstream.observability.failure_log import NEW_KINDS_PER_MINUTE, PER_MINUTE, FailureLog, FailureRecorder
from tests.support.clocks import ManualClock
from tests.support.urls import PASSWORD, contains_password

pytestmark = [pytest.mark.worker]

MINUTE_MS = 60_000.0


def handler_of(function: Callable[[Message], None], **retry: object) -> Handler:
    retries = Retry(**{"attempts": 3, "delay_ms": 10, **retry})  # type: ignore[arg-type]
    return compile_handler("shop", function, ("orders",), {"name": "total", "key": "k", "retry": retries})


def refuse(message: Message) -> None:
    raise RuntimeError(f"gateway says no to {message.id}")


def stumble(message: Message) -> None:
    raise KeyError(message.id)


def reject(message: Message) -> None:
    raise Reject("not ours")


HANDLER = handler_of(refuse)


class Failing:
    """A log of a handler, and messages that fail in it."""

    def __init__(self, handler: Handler = HANDLER) -> None:
        self.handler = handler
        self.clock = ManualClock()
        self.log = FailureLog(handler, clock=self.clock)
        self.number = 0

    def fail(
        self, attempt: int = 1, *, times: int = 1, log: FailureLog | None = None, handler: Handler | None = None
    ) -> None:
        """Let messages fail in one attempt each."""
        handler = handler or self.handler
        for _ in range(times):
            self.number += 1
            message = Message("orders", f"{self.number}-0", [b"k", b"ann"], b"ann", attempt)
            outcome = attempt_plain(handler, message, b"")
            if isinstance(outcome, DeadLettered):
                (log or self.log).dead_lettered([dead_letter_of(handler, message, outcome).items()])
            else:
                assert isinstance(outcome, (RetryLater, Parked))
                (log or self.log).attempt_failed("orders", message.id, b"ann", attempt, outcome, delay_ms=1_500)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_a_failed_attempt_is_logged_with_its_cause_and_the_time_of_its_retry(caplog: pytest.LogCaptureFixture) -> None:
    Failing().fail(2)
    (line,) = lines(caplog)
    cause = "message 1-0 of orders, key ann: RuntimeError: gateway says no to 1-0"
    assert line == ("WARNING", f"shop.total: attempt 2 of 3 failed on {cause}; retrying in 1.5 s")


def test_a_dead_letter_is_an_error_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    Failing().fail(3)
    (line,) = lines(caplog)
    cause = "message 1-0 of orders, key ann: RuntimeError: gateway says no to 1-0"
    assert line == ("ERROR", f"shop.total: dead letter (failed, attempt 3 of 3): {cause}; see: millstream dlq list")


def test_a_message_that_the_handler_rejects_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    Failing(handler_of(reject)).fail()
    ((level, text),) = lines(caplog)
    assert (level, text.partition(": message")[0]) == ("WARNING", "shop.total: dead letter (rejected)")


def test_the_log_says_when_the_key_is_parked_or_blocked(caplog: pytest.LogCaptureFixture) -> None:
    Failing(handler_of(refuse, then="park")).fail(3)
    blocked = Failing(handler_of(refuse, then="block"))
    blocked.fail(2)
    blocked.fail(13)
    texts = [text for _, text in lines(caplog)]
    assert texts[0].endswith("; its key is parked, see: millstream key list shop.total")
    assert texts[1].startswith("shop.total: attempt 2 of 3 failed on ")
    assert texts[1].endswith("; retrying in 1.5 s")
    assert texts[2].startswith("shop.total: attempt 13 failed on ")
    assert texts[2].endswith("; it blocks its key, retrying in 1.5 s")


def test_the_traceback_is_logged_at_the_first_failure_of_its_kind_and_at_the_last_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing(handler_of(refuse, then="block"))
    for attempt in (1, 2, 3, 4):
        failing.fail(attempt)
    failing.fail(1, handler=handler_of(stumble, then="block"))
    traced = [record.exc_text is not None for record in caplog.records]
    assert traced == [True, False, True, False, True]
    text = str(caplog.records[0].exc_text)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("\nRuntimeError: gateway says no to 1-0")
    assert "in refuse" in text
    assert "attempt.py" not in text


def test_a_record_has_the_failure_in_fields(caplog: pytest.LogCaptureFixture) -> None:
    Failing().fail(2)
    (record,) = caplog.records
    named = {name: getattr(record, name) for name in ("handler", "stream", "id", "key", "attempt", "exception")}
    assert named == {
        "handler": "shop.total",
        "stream": "orders",
        "id": "1-0",
        "key": "ann",
        "attempt": 2,
        "exception": "RuntimeError: gateway says no to 1-0",
    }
    assert "gateway says no" in record.traceback  # type: ignore[attr-defined]


def test_many_failures_are_logged_as_ten_lines_and_then_one_a_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing()
    failing.fail(times=10_000)
    assert len(lines(caplog)) == PER_MINUTE
    failing.log.report_omitted()
    assert lines(caplog) == []
    failing.clock.now_ms += MINUTE_MS
    failing.fail(times=500)
    again = lines(caplog)
    assert len(again) == 2
    assert again[0][1] == (
        "shop.total: 9,990 more failed attempts, left out of this log: 9,990 RuntimeError; see: millstream info"
    )
    failing.clock.now_ms += MINUTE_MS
    failing.log.report_omitted()
    assert [text.partition(",")[0] for _, text in lines(caplog)] == ["shop.total: 499 more failed attempts"]
    failing.clock.now_ms += MINUTE_MS
    failing.fail(times=20)
    assert len(lines(caplog)) == PER_MINUTE


def test_the_number_of_omitted_failures_is_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    failing.fail(times=PER_MINUTE + 7)
    failing.fail(3, times=PER_MINUTE + 5)
    caplog.clear()
    failing.log.close()
    failing.log.close()
    assert [(level, text.partition(",")[0]) for level, text in lines(caplog)] == [
        ("WARNING", "shop.total: 7 more failed attempts"),
        ("ERROR", "shop.total: 5 more dead letters"),
    ]


def test_many_failures_of_one_kind_hide_no_other_failure(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    failing.fail(times=1_000)
    caplog.clear()
    failing.fail(handler=handler_of(stumble))
    failing.fail(3)
    texts = [text for _, text in lines(caplog)]
    assert len(texts) == 2
    assert "KeyError" in texts[0]
    assert "dead letter" in texts[1]


def test_the_log_of_many_new_kinds_of_failures_is_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    for number in range(1_000):
        kind = type(f"Error{number}", (Exception,), {})
        failing.log.attempt_failed("orders", "1-0", None, 1, RetryLater(1, "x", kind()))
    assert len(lines(caplog)) == PER_MINUTE + NEW_KINDS_PER_MINUTE


def test_the_driver_logs_the_failures_that_a_task_recorded_and_the_number_it_omitted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing()
    recorder = FailureRecorder(failing.handler)
    assert recorder.pack() is None
    failing.fail(2, times=300, log=recorder)
    failing.fail(3, log=recorder)
    assert lines(caplog) == []
    packed = recorder.pack()
    assert packed is not None
    assert len(packed) < 100_000
    failing.log.merge(packed)
    failing.log.close()
    found = [(record.levelname, record.exc_text is not None) for record in caplog.records]
    assert found[0] == ("WARNING", True)
    assert ("ERROR", True) in found
    assert "shop.total: 290 more failed attempts" in lines(caplog)[-1][1]


def test_an_error_and_a_stream_of_any_characters_are_logged_on_either_engine(caplog: pytest.LogCaptureFixture) -> None:
    failing, error = Failing(), ValueError("\ud800 \udcff \x00")
    recorder = FailureRecorder(failing.handler)
    for log in (failing.log, recorder):
        log.attempt_failed("s\udcff", "1-0", b"\xff", 1, RetryLater(10, f"ValueError: {error}", error))
    packed = recorder.pack()
    assert packed is not None
    FailureLog(failing.handler).merge(packed)
    (first, second) = lines(caplog)
    assert first == second
    assert "message 1-0 of s\\xff, key \\xff: ValueError: \\xed\\xa0\\x80 \\xff \\x00; " in first[1]


def test_a_logged_failure_has_no_password_and_no_second_line(caplog: pytest.LogCaptureFixture) -> None:
    error = ConnectionError(f"cannot open\nredis://me:{PASSWORD}@h:1/0 100% \x1b[31m")
    Failing().log.attempt_failed("or\nders", "1-0", b"\x1b\xff", 1, RetryLater(10, str(error), error))
    (record,) = caplog.records
    assert not contains_password(record.getMessage() + str(record.__dict__))
    assert record.getMessage().isprintable()
    assert logging.Formatter("%(message)s").format(record).isprintable()
