"""HangDetector: each message that runs for long is logged, whatever others run beside it."""

import logging
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream import App
from millstream.delivery.long_runs import HELD_MS, LONG_ISOLATED_MS, LongRun
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.worker.settling.hang_detector import HangDetector

pytestmark = [pytest.mark.worker]

MINUTE_MS = 60_000.0
STREAM = cast("ReliableStream", SimpleNamespace(stream="in"))


def run(entry_id: bytes, since_ms: float) -> Delivery:
    delivery = Delivery(STREAM, entry_id, [])
    delivery.state_since_ms = since_ms
    return delivery


@pytest.fixture
def detector() -> HangDetector:
    app = App("app")
    app.handler("in", name="handle")(lambda message: None)
    return HangDetector(app.handlers["handle"])


def logged(caplog: pytest.LogCaptureFixture) -> list[Any]:
    found = [re.search(r"message (\S+) of in .*\((\d+ messages?) for", record.message) for record in caplog.records]
    return [one.groups() for one in found if one]


def test_a_second_message_that_hangs_is_logged_while_a_first_has_hung_for_an_hour(
    detector: HangDetector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second = run(b"1-0", 0), run(b"2-0", 60 * MINUTE_MS)
    detector.check([first], 60 * MINUTE_MS)
    detector.check([first, second], 61 * MINUTE_MS + 1)
    detector.check([first, second], 62 * MINUTE_MS)
    assert logged(caplog) == [("1-0", "1 message"), ("2-0", "2 messages")]


def test_many_long_runs_are_one_line_a_minute(detector: HangDetector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runs = [run(b"%d-0" % n, n * 100.0) for n in range(1, 601)]
    for second in range(181):
        detector.check(runs, 1_000.0 * second)
    assert logged(caplog)[0] == ("1-0", "10 messages")
    assert 2 <= len(caplog.records) <= 3


def test_a_run_that_has_ended_is_not_logged(detector: HangDetector, caplog: pytest.LogCaptureFixture) -> None:
    detector.check([run(b"1-0", 0)], MINUTE_MS - 1)
    detector.check([], 5 * MINUTE_MS)
    assert not caplog.records


def test_long_runs_are_reported_again_before_the_report_ends_and_always_with_the_same_values(
    detector: HangDetector,
) -> None:
    one = run(b"1-0", 0)
    reports: list[LongRun] = []
    for second in range(50, 120):
        detector.check([one, run(b"2-0", 1_000.0 * second)], 1_000.0 * second)
        due, ended = detector.due_reports(1_000.0 * second)
        reports += due
        assert not ended
    assert {report.id for report in reports} == {"1-0"}
    assert len(set(reports)) == 1
    assert 60_000 / HELD_MS < len(reports) <= 10
    detector.check([], 2 * MINUTE_MS)
    assert detector.due_reports(2 * MINUTE_MS) == ([], [reports[0]]), "its report is removed"
    assert detector.due_reports(3 * MINUTE_MS) == ([], [])


def test_a_run_in_isolation_is_reported_after_seconds(detector: HangDetector) -> None:
    one = run(b"1-0", 0)
    one.isolated_by = "w 1"
    detector.check([one], LONG_ISOLATED_MS - 1)
    assert not any(detector.due_reports(LONG_ISOLATED_MS - 1))
    detector.check([one], LONG_ISOLATED_MS)
    (report,), _ = detector.due_reports(LONG_ISOLATED_MS)
    assert "it runs in isolation: that process starts no other message" in report.describe(report.started_ms)
