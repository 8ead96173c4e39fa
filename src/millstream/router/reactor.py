"""Reactor: the loop that runs a router, in a thread of its own or in the event loop that uses it."""

import asyncio
import logging
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from millstream.clock import Clock
from millstream.errors import MillstreamError
from millstream.router.subscriber_buffer import SubscriberBuffer
from millstream.router.waker import Waker, wake_all

logger = logging.getLogger(__name__)

_HELPERS = 4


class Selectable(Protocol):
    """A connection that the reactor watches."""

    def fileno(self) -> int:
        """Its descriptor."""

    def on_ready(self) -> None:
        """Read and write: the descriptor is ready."""


class Reactor(ABC):
    """Runs the router: waits on its connections, runs calls of other threads, wakes subscribers in bursts.

    Its callbacks must not block and must not raise: `on_crash` receives an unexpected error. All methods but `call` and
    `stop` are for its own thread. `after_round`: called after each round of reads and calls.
    """

    def __init__(self, clock: Clock, on_crash: Callable[[Exception], None]) -> None:
        self.clock = clock
        self.after_round: list[Callable[[], None]] = []
        self._on_crash = on_crash
        self._calls: deque[Callable[[], None]] = deque()
        self._wakes: defaultdict[asyncio.AbstractEventLoop | None, list[Waker]] = defaultdict(list)
        self._notified = False
        self._stopped = self._finished = False
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="millstream-router-helper")

    # For other threads

    @abstractmethod
    def start(self) -> None:
        """Start running."""

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the reactor's thread, soon."""
        self._calls.append(action)
        if not self._notified:
            self._notified = True
            self._notify()
        if self._finished:
            self._run_late_calls()

    @abstractmethod
    def stop(self, timeout_ms: float) -> bool:
        """Run the pending calls, then stop; whether that took no longer than `timeout_ms` milliseconds."""

    # For its own thread

    @abstractmethod
    def call_later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Run `action` after `delay_ms` milliseconds."""

    @abstractmethod
    def watch(self, connection: Selectable, *, writing: bool = False) -> None:
        """Call `connection.on_ready` when there is something to read; `writing`: or when it can be written to."""

    @abstractmethod
    def unwatch(self, connection: Selectable) -> None:
        """Stop watching it; before it is closed."""

    def run_in_helper(self, work: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
        """Run `work`, which may block, in a helper thread, then `on_done` here with its result or its error."""

        def finished(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None and not isinstance(error, MillstreamError):
                logger.error("a helper of the router failed on an unexpected error", exc_info=error)
            self.call(lambda: on_done(done.result() if error is None else error))

        if not self._stopped:
            self._helpers.submit(work).add_done_callback(finished)

    def wake(self, buffer: SubscriberBuffer) -> None:
        """Wake the buffer's subscriber, if it waits: at the end of this round, together with others of its loop."""
        waker, buffer.waker = buffer.waker, None
        if waker is None:
            return
        if isinstance(waker, Waker):
            self._wakes[waker.loop].append(waker)
        else:
            with suppress(RuntimeError):  # its wait has timed out
                waker.release()

    # Inside

    @abstractmethod
    def _notify(self) -> None:
        """Schedule `_run_calls`, from any thread."""

    def _run_calls(self) -> None:
        self._notified = False  # from here on, a call notifies again
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _end_round(self) -> None:
        for action in self.after_round:
            action()
        wakes = self._wakes
        if wakes:
            self._wakes = defaultdict(list)  # first, since a woken task may close the router
            for loop, wakers in wakes.items():
                self._wake_in(loop, wakers)

    def _wake_in(self, loop: asyncio.AbstractEventLoop | None, wakers: list[Waker]) -> None:
        if loop is None:
            logger.error("%d subscribers wait in no event loop and cannot be woken", len(wakers))
            return
        with suppress(RuntimeError):  # the loop is closed, and its tasks with it
            loop.call_soon_threadsafe(wake_all, wakers)

    def _crash(self, error: Exception) -> None:
        """Report the error and stop: otherwise subscribers would wait for ever."""
        self._stopped = True
        self.after_round.clear()
        self._on_crash(error)
        self._end_round()

    def _finish(self) -> None:
        self._helpers.shutdown(wait=False, cancel_futures=True)
        self._finished = True
        self._run_late_calls()

    def _run_late_calls(self) -> None:
        """Run calls that came too late, such as to close a connection just dialled."""
        with suppress(IndexError):
            while True:
                self._calls.popleft()()


class ThreadReactor(Reactor):
    """A thread of its own, for routers used from plain threads or from several event loops."""

    def __init__(self, clock: Clock, on_crash: Callable[[Exception], None]) -> None:
        super().__init__(clock, on_crash)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._thread = threading.Thread(target=self._run, name="millstream-router", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._selector = selectors.DefaultSelector()
        self._wake_socket, self._notify_socket = socket.socketpair()
        self._wake_socket.setblocking(False)
        self._notify_socket.setblocking(False)
        self._selector.register(self._wake_socket, selectors.EVENT_READ, None)
        self._thread.start()

    def stop(self, timeout_ms: float) -> bool:
        """Run the pending calls, then end the thread; whether that took no longer than `timeout_ms`."""
        self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_ms / 1000)
        return not self._thread.is_alive()

    def call_later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Run `action` after `delay_ms` milliseconds."""
        heappush(self._timers, (self.clock.monotonic_ms() + delay_ms, next(self._sequence), action))

    def watch(self, connection: Selectable, *, writing: bool = False) -> None:
        """Call `connection.on_ready` when there is something to read; `writing`: or when it can be written to."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        try:
            self._selector.modify(connection.fileno(), events, connection)
        except KeyError:
            self._selector.register(connection.fileno(), events, connection)

    def unwatch(self, connection: Selectable) -> None:
        """Stop watching it; before it is closed."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.fileno())

    def _run(self) -> None:
        try:
            while not self._stopped:
                for key, _ in self._selector.select(self._longest_wait_s()):
                    if key.data is not None:
                        key.data.on_ready()
                    else:  # drain it even if its call has run: unread, it would end every wait at once
                        with suppress(BlockingIOError):
                            self._wake_socket.recv(4096)
                if self._notified:
                    self._run_calls()
                self._run_timers()
                self._end_round()
        except Exception as error:  # noqa: BLE001 - see _crash
            self._crash(error)
        finally:
            self._selector.close()
            self._wake_socket.close()
            self._notify_socket.close()
            self._finish()

    def _notify(self) -> None:
        with suppress(OSError):  # full: a wake-up is pending already; closed: the thread has ended
            self._notify_socket.send(b"!")

    def _longest_wait_s(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, (self._timers[0][0] - self.clock.monotonic_ms()) / 1000) if self._timers else None

    def _run_timers(self) -> None:
        now_ms = self.clock.monotonic_ms()
        while self._timers and self._timers[0][0] <= now_ms:
            heappop(self._timers)[2]()

    def _stop(self) -> None:
        self._stopped = True
