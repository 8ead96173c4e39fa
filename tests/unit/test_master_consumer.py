"""What a consumer runs: never the same message twice at once, nor once more because of an old answer."""

import pytest

from millstream.services.master.consumer import RunRegister

pytestmark = [pytest.mark.master]


def test_what_runs_is_not_begun_again() -> None:
    running = RunRegister()
    assert running.begin(b"1-1", read_ms=10, now_ms=11)
    assert not running.begin(b"1-1", read_ms=12, now_ms=13)


def test_what_ended_after_it_was_read_is_not_begun_again() -> None:
    running = RunRegister()
    running.begin(b"1-1", read_ms=10, now_ms=11)
    running.end(b"1-1", now_ms=20)
    assert not running.begin(b"1-1", read_ms=15, now_ms=21)
    assert not running.begin(b"1-1", read_ms=20, now_ms=21)


def test_what_is_pending_still_after_it_ended_is_begun_again() -> None:
    running = RunRegister()
    running.begin(b"1-1", read_ms=10, now_ms=11)
    running.end(b"1-1", now_ms=20)
    assert running.begin(b"1-1", read_ms=21, now_ms=22)
