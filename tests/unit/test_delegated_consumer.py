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
