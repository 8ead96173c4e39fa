"""Orderly stop of a command at SIGTERM and Ctrl-C."""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_STOP = (signal.SIGTERM, signal.SIGINT)


def set_from_signal(event: threading.Event) -> None:
    """Set `event` from a signal handler, a moment later.

    `event.set()` takes a lock that the interrupted code may hold in its `event.wait()`: calling it here would deadlock,
    and no further signal would help. A bare thread takes no lock (`threading.Thread` does).
    """
    _thread.start_new_thread(event.set, ())


def stopping_at_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set from now on, in place of their own action. For the main thread."""
    stopping = threading.Event()
    for number in _STOP:
        signal.signal(number, lambda *_: set_from_signal(stopping))
    return stopping


@contextmanager
def _handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` at SIGTERM and Ctrl-C within the block, in place of what was set before."""
    before = {number: signal.signal(number, handler) for number in _STOP}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def interrupted_at_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt within the block at the first SIGTERM or Ctrl-C, and ignore later ones; yields those received.

    For what can be left at any line, and cleans up then. For the main thread.
    """
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    with _handled_by(interrupt):
        yield received


class OrderlyStop(threading.Event):
    """Set when the command is to stop: by a signal, or by the command itself, as all is done.

    * `is_signalled`: whether a signal has come, also after the event was set
    """

    is_signalled = False


@contextmanager
def orderly_stop(at_second: Callable[[], None] = lambda: None) -> Iterator[OrderlyStop]:
    """An event that SIGTERM and Ctrl-C set within the block, in place of their own action.

    `at_second` is called for each signal after the first. If Ctrl-C was among the signals, KeyboardInterrupt is raised
    at the end of the block. For the main thread.
    """
    stopping = OrderlyStop()
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        stopping.is_signalled = True
        received.append(number)
        if len(received) > 1:
            at_second()
        set_from_signal(stopping)

    with _handled_by(stop):
        yield stopping
    if signal.SIGINT in received:
        raise KeyboardInterrupt
