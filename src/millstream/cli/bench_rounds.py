"""BenchRounds: measures a raw loop and workers on one stream, round by round, for `millstream bench`."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from millstream import App, Message
from millstream.errors import MillstreamError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.raw_loop import read_and_acknowledge
from millstream.worker import ReadingLoop
from millstream.worker.process.worker_process import tune_gc

MESSAGES = 50_000
"""Messages of a round."""
PAYLOAD_BYTES = 100
"""Bytes of the payload of a message."""
KEYS = 1_000
"""Keys that the messages of a round have."""

_SLOW_START = 0.1
"""The share of the messages that a worker processes before its clock starts: its reads, lists of keys and commits are small at first."""
_AT_ONCE = 1_000
_KEPT_S = 3_600
_LOOK_EVERY_S = 0.002
_MOST_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Messages per second of each loop: the best of all rounds."""

    raw: float = 0.0
    plain: float = 0.0
    keyed: float = 0.0


class BenchRounds:
    """Rounds of measurements in one Redis, under keys whose names have `name` in them, which it is the only one to use.

    * `client`: of one server; `stopping`: ends all measurements early
    * `messages`: how many messages a round publishes, and each loop processes
    """

    def __init__(self, client: Client, stopping: threading.Event, *, messages: int = MESSAGES) -> None:
        self._client = client
        self._stopping = stopping
        self._messages = messages
        self._rounds = 0
        self.name = f"bench-{secrets.token_hex(4)}"

    def run(self, most_s: float, report: Callable[[int, str, float], None]) -> tuple[int, Rates] | None:
        """Measure for about `most_s` seconds, one round at least; return the number of rounds and the best rates.

        None if it was stopped. A measurement ends after a third of `most_s`, or with the messages. `report` is called after each one,
        with the number of the round, what was measured, and the messages per second. Raises RedisError, and
        MillstreamError if a loop processes nothing.
        """
        tune_gc()
        best = Rates()
        began_s = round_began_s = time.monotonic()
        while True:
            found = self._round(most_s / 3, report)
            if found is None:
                return None
            best = Rates(
                raw=max(best.raw, found["raw"]),
                plain=max(best.plain, found["plain"]),
                keyed=max(best.keyed, found["keyed"]),
            )
            now_s = time.monotonic()
            if now_s - began_s + (now_s - round_began_s) > most_s:
                return self._rounds, best
            round_began_s = now_s

    def remove(self) -> None:
        """Remove all keys that have its name in theirs. Raises RedisError."""
        for page in self._client.scan_key_pages(f"*{self.name}*"):
            if page:
                self._client.execute("UNLINK", *page)

    def _round(self, most_s: float, report: Callable[[int, str, float], None]) -> Mapping[str, float] | None:
        """The rates of one round; None if it was stopped."""
        self._rounds += 1
        stream = f"{self.name}:{self._rounds}"
        self._fill(stream)
        app = App(self.name)
        app.handler(stream, name="plain")(_do_nothing)
        app.handler(stream, name="keyed", key="key")(_do_nothing)
        measurements: dict[str, Callable[[], tuple[int, float]]] = {
            "raw": lambda: read_and_acknowledge(self._client.url, stream, most_s=most_s, give_up=self._stopping.is_set),
            "plain": lambda: self._measure(app.handlers["plain"], most_s),
            "keyed": lambda: self._measure(app.handlers["keyed"], most_s),
        }
        rates: dict[str, float] = {}
        for what, measure in measurements.items():
            count, took_s = measure()
            if self._stopping.is_set():
                return None
            if not count or not took_s:
                raise MillstreamError(
                    f"no message was processed within {took_s:.1f} s ({what}): see millstream doctor, and what else runs "
                    "on this machine"
                )
            rates[what] = count / took_s
            report(self._rounds, what, rates[what])
        self._client.execute("UNLINK", stream)
        return rates

    def _fill(self, stream: str) -> None:
        payload = b"x" * PAYLOAD_BYTES
        for at in range(0, self._messages, _AT_ONCE):
            if self._stopping.is_set():
                return
            numbers = range(at, min(at + _AT_ONCE, self._messages))
            self._client.pipeline([("XADD", stream, "*", "key", n * 7919 % KEYS, "payload", payload) for n in numbers])
        self._client.execute("EXPIRE", stream, _KEPT_S)  # should this process be killed

    def _measure(self, handler: Handler, most_s: float) -> tuple[int, float]:
        """How many messages a worker commits after the first tenth, and the seconds that it takes."""
        started_s = time.perf_counter()
        with _working(handler, self._client.url) as loop:

            def committed() -> int:
                return loop.loop_metrics.committed

            self._wait(lambda: committed() >= max(1, self._messages * _SLOW_START))
            first, began_s = committed(), time.perf_counter()
            self._wait(
                lambda: (
                    committed() >= self._messages or (committed() > first and time.perf_counter() - began_s >= most_s)
                )
            )
            done, ended_s = committed(), time.perf_counter()
        if done == first:  # all at once
            return done, ended_s - started_s
        return done - first, ended_s - began_s

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, but no longer than a worker that works at all may take."""
        end_s = time.perf_counter() + _MOST_WAIT_S
        while not condition() and not self._stopping.is_set() and time.perf_counter() < end_s:
            time.sleep(_LOOK_EVERY_S)


@contextmanager
def _working(handler: Handler, url: str) -> Iterator[ReadingLoop]:
    """A reading loop that runs within the block; its error is raised at the end of the block."""
    loop = ReadingLoop(handler, url, consumer="bench")
    errors: list[Exception] = []

    def run() -> None:
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="bench")
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join()
    if errors:
        raise errors[0]


def _do_nothing(message: Message) -> None:
    """The handler that is measured."""
