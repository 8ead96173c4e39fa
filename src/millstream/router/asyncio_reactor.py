"""AsyncioReactor: runs the router in the event loop that uses it, without a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from millstream.clock import Clock
from millstream.router.reactor import Reactor, Selectable
from millstream.router.waker import Waker, wake_all


class AsyncioReactor(Reactor):
    """Runs in the running event loop: without a switch between threads, fastest for subscribers in that loop.

    asyncio runs ready callbacks in turn, so code that blocks the loop blocks the router too. Timers use the loop's
    clock.
    """

    def __init__(self, clock: Clock, on_crash: Callable[[Exception], None]) -> None:
        super().__init__(clock, on_crash)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._writing: set[int] = set()

    def start(self) -> None:
        """Do nothing: the loop runs already."""

    def stop(self, timeout_ms: float) -> bool:
        """Run the pending calls, then stop; for another thread, whether that took no longer than `timeout_ms`."""
        if threading.get_ident() != self._thread_id:
            stopped = threading.Event()
            self.call(lambda: stopped.set() if self.stop(0) else None)
            return stopped.wait(timeout_ms / 1000)
        self._run_calls()
        self._end_round()
        self._stopped = True
        self._finish()
        return True

    def call_later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Run `action` after `delay_ms` milliseconds."""
        self._loop.call_later(delay_ms / 1000, self._run_round, action)

    def watch(self, connection: Selectable, *, writing: bool = False) -> None:
        """Call `connection.on_ready` when there is something to read; `writing`: or when it can be written to."""
        descriptor = connection.fileno()
        self._loop.add_reader(descriptor, self._run_round, connection.on_ready)
        if writing:
            self._loop.add_writer(descriptor, self._run_round, connection.on_ready)
            self._writing.add(descriptor)
        elif descriptor in self._writing:
            self._loop.remove_writer(descriptor)
            self._writing.discard(descriptor)

    def unwatch(self, connection: Selectable) -> None:
        """Stop watching it; before it is closed."""
        descriptor = connection.fileno()
        if descriptor < 0 or self._loop.is_closed():
            return
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._writing.discard(descriptor)

    def _run_round(self, action: Callable[[], None]) -> None:
        if self._stopped:
            return
        try:
            action()
            self._end_round()
        except Exception as error:  # noqa: BLE001 - see _crash
            self._crash(error)

    def _notify(self) -> None:
        if threading.get_ident() == self._thread_id:
            self._loop.call_soon(self._run_round, self._run_calls)
            return
        with suppress(RuntimeError):  # the loop is closed, and its tasks with it
            self._loop.call_soon_threadsafe(self._run_round, self._run_calls)

    def _wake_in(self, loop: asyncio.AbstractEventLoop | None, wakers: list[Waker]) -> None:
        if loop is self._loop and asyncio.current_task(loop) is None:  # there is one if a task has closed the router
            wake_all(wakers)
        else:
            super()._wake_in(loop, wakers)
