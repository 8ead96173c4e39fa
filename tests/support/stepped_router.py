"""A router that a test runs step by step, in the thread of the test and with a clock that stands still.

The test decides when the router reads what Redis has sent, and when it sends its next requests: so a test of what it
reads first, or of what it does not read yet, hangs on no schedule of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from millstream.redis_client.client import Client
from millstream.router import ReadPolicy, Router
from millstream.router.nodes import ClusterNodes
from millstream.router.reactor import ThreadReactor
from millstream.router.stream_reader import StreamReader
from tests.support.clocks import ManualClock
from tests.support.waiting import FAIL_SAFE_S

_PAUSE_MS = 10.0


class _SteppedReactor(ThreadReactor):
    """A reactor whose thread ends at once: the test runs its rounds."""

    def _run(self) -> None:
        return

    def read(self) -> None:
        """Wait until a connection or a call is ready, and run what is ready; the round goes on."""
        ready = self._selector.select(FAIL_SAFE_S)
        assert ready, "Redis sends nothing"
        for key, _ in ready:
            if key.data is not None:
                key.data.on_ready()
            else:
                self._wake_socket.recv(4096)
        self.run_calls()

    def run_calls(self) -> None:
        """Run the calls of subscribers."""
        if self._notified:
            self._run_calls()

    def run_timers(self) -> None:
        """Run what is due."""
        self._run_timers()

    def end_round(self) -> None:
        """Send the next requests."""
        self._end_round()

    def stop(self, timeout_ms: float) -> bool:
        """Run the pending calls, and close the sockets."""
        self._run_calls()
        for one in (self._selector, self._wake_socket, self._notify_socket):
            one.close()
        self._finish()
        return True


class SteppedRouter:
    """A router by key tracking, and its only connection. `router.subscribe` as usual, then `settle` and `send`."""

    def __init__(self, url: str, read: ReadPolicy) -> None:
        self.clock = ManualClock()
        self.router = Router(url, reader="tracking", read=read, clock=self.clock)
        self._reactor = _SteppedReactor(self.clock, self.router._on_crash)
        self.router._build(self._reactor)

    @property
    def _nodes(self) -> ClusterNodes:
        return self.router._nodes

    @property
    def reader(self) -> StreamReader:
        """The reader of its streams."""
        return self._nodes._readers[None].stream_reader

    @property
    def is_at_budget(self) -> bool:
        """Whether the router takes its budget for spent."""
        return self.router._cursors.budget.spent

    def connect(self) -> None:
        """Wait for the connection."""
        self._reactor.run_calls()
        while not self._nodes._readers[None].connection.up:
            self._reactor.read()

    def settle(self) -> None:
        """Handle all that Redis has sent by now, and all calls; send nothing."""
        self._reactor.run_calls()
        replies: list[Any] = []
        self._nodes._readers[None].connection.request([("PING",)], replies.append)
        while not replies:
            self._reactor.read()

    def send(self) -> None:
        """Send the requests that the router sends at the end of a round."""
        self._reactor.end_round()

    def step(self) -> None:
        """Send requests, and handle their replies."""
        self.send()
        self.settle()

    def end_pause(self) -> None:
        """Let the time pass for which the reader pauses."""
        self.clock.now_ms += _PAUSE_MS
        self._reactor.run_timers()


@contextmanager
def stepped_router(url: str, **read: Any) -> Iterator[SteppedRouter]:
    """A connected router for the block, that reads as ReadPolicy(**read) says."""
    stepped = SteppedRouter(url, ReadPolicy(**read))
    stepped.router._start()
    stepped.connect()
    try:
        yield stepped
    finally:
        stepped.router.close()


def reads_of(client: Client) -> int:
    """How many XREADs the server has executed so far."""
    found = client.execute("INFO", "commandstats").decode()
    calls = [line.partition("calls=")[2].partition(",")[0] for line in found.splitlines() if "cmdstat_xread:" in line]
    return int(calls[0]) if calls else 0
