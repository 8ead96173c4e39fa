"""LongRuns: each message that runs for long is logged, whatever others run beside it."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream import App
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.worker.settling.long_runs import LongRuns

pytestmark = [pytest.mark.worker]

MINUTE_MS = 60_000.0
STREAM = cast("ReliableStream", SimpleNamespace(stream="in"))


def run(entry_id: bytes, since_ms: float) -> Delivery:
    delivery = Delivery(STREAM, entry_id, [])
    delivery.state_since_ms = since_ms
    return delivery


@pytest.fixture
def long_runs() -> LongRuns:
    app = App("app")
    app.handler("in", name="handle")(lambda message: None)
    return LongRuns(app.handlers["handle"])


def logged(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [(record.args[1], record.args[4]) for record in caplog.records if isinstance(record.args, tuple)]


def test_a_second_message_that_hangs_is_logged_while_a_first_has_hung_for_an_hour(
    long_runs: LongRuns, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second = run(b"1-0", 0), run(b"2-0", 60 * MINUTE_MS)
    long_runs.check([first], 60 * MINUTE_MS)
    long_runs.check([first, second], 61 * MINUTE_MS + 1)
    long_runs.check([first, second], 62 * MINUTE_MS)
    assert logged(caplog) == [("1-0", "1 message"), ("2-0", "2 messages")]


def test_many_long_runs_are_one_line_a_minute(long_runs: LongRuns, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    runs = [run(b"%d-0" % n, n * 100.0) for n in range(1, 601)]
    for second in range(181):
        long_runs.check(runs, 1_000.0 * second)
    assert logged(caplog)[0] == ("1-0", "10 messages")
    assert 2 <= len(caplog.records) <= 3


def test_a_run_that_has_ended_is_not_logged(long_runs: LongRuns, caplog: pytest.LogCaptureFixture) -> None:
    long_runs.check([run(b"1-0", 0)], MINUTE_MS - 1)
    long_runs.check([], 5 * MINUTE_MS)
    assert not caplog.records
