"""What a consumer runs: never the same message twice at once, nor once more because of an old answer."""

import pytest

from millstream.services.master.delegated_consumer import RunRegister

pytestmark = [pytest.mark.master]


def test_a_running_message_is_not_started_again() -> None:
    running = RunRegister()
    assert running.begin(b"1-1", read_ms=10, now_ms=11)
    assert not running.begin(b"1-1", read_ms=12, now_ms=13)


def test_a_message_that_ended_after_it_was_read_is_not_started_again() -> None:
    running = RunRegister()
    running.begin(b"1-1", read_ms=10, now_ms=11)
    running.end(b"1-1", now_ms=20)
    assert not running.begin(b"1-1", read_ms=15, now_ms=21)
    assert not running.begin(b"1-1", read_ms=20, now_ms=21)


def test_a_message_that_is_still_pending_after_its_end_is_started_again() -> None:
    running = RunRegister()
    running.begin(b"1-1", read_ms=10, now_ms=11)
    running.end(b"1-1", now_ms=20)
    assert running.begin(b"1-1", read_ms=21, now_ms=22)


def test_a_message_whose_result_was_not_reported_waits_longer_each_time() -> None:
    running, now_ms, waits_ms = RunRegister(), 0.0, list[float]()
    for _ in range(8):
        assert running.begin(b"1-1", read_ms=now_ms + 1, now_ms=now_ms + 1)
        waits_ms.append(running.end_unreported(b"1-1", now_ms=now_ms + 2))
        now_ms += 2 + waits_ms[-1]
        assert not running.begin(b"1-1", read_ms=now_ms - 1, now_ms=now_ms - 1)
    assert waits_ms == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]


def test_the_wait_begins_anew_after_a_result_that_was_reported() -> None:
    running = RunRegister()
    running.begin(b"1-1", read_ms=10, now_ms=10)
    running.end_unreported(b"1-1", now_ms=11)
    assert running.begin(b"1-1", read_ms=2_000, now_ms=2_000)
    running.end(b"1-1", now_ms=2_001)
    assert running.begin(b"1-1", read_ms=2_002, now_ms=2_002)
    assert running.end_unreported(b"1-1", now_ms=2_003) == 1_000
