"""The router's thread: what other threads ask for wakes it up, and nothing keeps it awake."""

import select
import threading

import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.router.reactor import ThreadReactor
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router]


def test_a_notification_after_its_call_has_run_does_not_keep_the_reactor_awake() -> None:
    reactor = ThreadReactor(SYSTEM_CLOCK, print)
    reactor.start()
    try:
        reactor._notify()
        eventually(lambda: not select.select([reactor._wake_socket], [], [], 0)[0], "silence")
        called = threading.Event()
        reactor.call(called.set)
        assert called.wait(FAIL_SAFE_S)
    finally:
        assert reactor.stop(FAIL_SAFE_S * 1000)
