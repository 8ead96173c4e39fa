"""What a worker logs while Redis refuses its commands: one line for each handler, with the name of the handler."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.keyed_stream import KeyedStream
from millstream.errors import MillstreamError, OutOfMemory, StaleOwner, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.key_router import KeyRouter
from millstream.worker.loop import ReadingLoop
from tests.support.clocks import ManualClock
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import QUICK, double, fill_at_maxmemory, make, make_context

pytestmark = [pytest.mark.worker]

MANY = 30
"""More failures than a router waits for before it warns."""


class StandingClock(ManualClock):
    """Time stands still, so that no line repeats after some seconds; a sleep gives other threads the processor."""

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep a little."""
        SYSTEM_CLOCK.sleep_ms(min(duration_ms, 5))


@pytest.fixture
def context(client: Client) -> WorkerContext:
    """What the parts of a worker share."""
    return replace(make_context(client, make(double, key="n")), policy=replace(QUICK, sweep_ms=1))


@contextmanager
def refused_router(client: Client, context: WorkerContext) -> Iterator[None]:
    """A router whose every attempt to enqueue is refused during the block, as Redis is at maxmemory."""
    with Client(client.url) as routing:
        working, routed = (
            KeyedStream(one, "in", app="app", handler="handle", consumer="w", queue_of=lambda entry_id, pairs: b"kall")
            for one in (client, routing)
        )
        working.join()
        routed.join_like(working)
        router, stopping = KeyRouter(context, routing, {"in": working}, None), threading.Event()
        router.add(routed)
        client.execute("CONFIG", "SET", "maxmemory", "1")
        fill_at_maxmemory(client, 3)
        thread = threading.Thread(target=router.run, args=(stopping,))
        thread.start()
        try:
            yield
        finally:
            client.execute("CONFIG", "SET", "maxmemory", "0")
            stopping.set()
            thread.join(FAIL_SAFE_S)


class Lines:
    """What is logged from here on, at any level."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def refusals(self) -> int:
        """How many failed attempts to enqueue were logged, at any level."""
        return sum("cannot enqueue new entries" in record.getMessage() for record in list(self._caplog.records))

    def await_refusals(self, count: int) -> None:
        """Wait for so many more failed attempts to enqueue."""
        before = self.refusals()
        eventually(lambda: self.refusals() >= before + count, "attempts to enqueue")

    def warnings(self) -> list[str]:
        """The warnings."""
        return [record.getMessage() for record in list(self._caplog.records) if record.levelno >= logging.WARNING]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, "millstream")
    return Lines(caplog)


def is_refused_line(line: str) -> bool:
    return line.startswith("app.handle cannot enqueue new entries: ") and line.endswith("; retrying")


def test_a_router_that_redis_refuses_warns_once_and_names_its_handler(
    client: Client, context: WorkerContext, lines: Lines
) -> None:
    with refused_router(client, context):
        lines.await_refusals(MANY)
    (line,) = lines.warnings()
    assert is_refused_line(line)


def test_a_router_does_not_repeat_that_the_fetches_of_its_handler_are_refused_but_warns_once_they_are_not(
    client: Client, context: WorkerContext, lines: Lines
) -> None:
    context.fetch_outage.on_refused(OutOfMemory("full"))
    with refused_router(client, context):
        lines.await_refusals(MANY)
        during = lines.warnings()
        context.fetch_outage.on_fetched()
        lines.await_refusals(MANY)
    assert not any(map(is_refused_line, during))
    assert sum(map(is_refused_line, lines.warnings())) == 1


def test_a_router_does_not_repeat_that_another_thread_of_its_handler_waits(
    client: Client, context: WorkerContext, lines: Lines
) -> None:
    is_over = threading.Event()

    def ask() -> None:
        if not is_over.is_set():
            raise Unavailable("away")

    waiting = threading.Thread(target=client.retry_while_unavailable, args=(ask,), kwargs={"what": "app.handle"})
    waiting.start()
    eventually(lambda: client.is_awaited_by("app.handle"), "the thread that waits")
    with refused_router(client, context):
        lines.await_refusals(MANY)
        during = lines.warnings()
        is_over.set()
        waiting.join(FAIL_SAFE_S)
        lines.await_refusals(MANY)
    assert not any(map(is_refused_line, during))
    assert sum(map(is_refused_line, lines.warnings())) == 1


def test_an_outage_is_logged_once_for_all_threads_that_wait_under_one_name(lines: Lines) -> None:
    names = ["bank.notify", "bank.notify", "bank.notify", "bank.other"]
    attempts = [0] * len(names)
    with EmbeddedServer() as server, Client(server.url, clock=StandingClock()) as client:
        server.kill()

        def wait(number: int) -> None:
            def ask() -> None:
                attempts[number] += 1
                client.execute("PING")

            client.retry_while_unavailable(ask, what=names[number])

        threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(names))]
        for thread in threads:
            thread.start()
        eventually(lambda: min(attempts) >= 3, "attempts of each thread")
        server.start()
        for thread in threads:
            thread.join(FAIL_SAFE_S)
        assert not any(map(client.is_awaited_by, names))
    found = [line for line in lines.warnings() if "bank." in line]
    for name in set(names):
        assert [line.endswith(f"; {name} waits, 0 s so far") for line in found if name in line] == [True, False]
        assert f"{name} resumes: Redis is available again after 0.0 s" in found
    assert len(found) == 4


def test_an_outage_lasts_until_the_last_thread_goes_on_and_one_that_gives_up_ends_none(lines: Lines) -> None:
    answered = {"first": threading.Event(), "second": threading.Event()}
    gives_up = threading.Event()
    with Client("redis://127.0.0.1:1/0", clock=StandingClock()) as client:

        def wait(name: str) -> None:
            def ask() -> None:
                if not answered[name].is_set():
                    raise Unavailable("away")

            client.retry_while_unavailable(ask, what="bank.notify", give_up=gives_up.is_set)

        threads = {name: threading.Thread(target=wait, args=(name,)) for name in answered}
        for thread in threads.values():
            thread.start()
            eventually(lambda: client.is_awaited_by("bank.notify"), "a thread that waits")
        eventually(lambda: client._outages._outages["bank.notify"].waiting == 2, "both")
        answered["first"].set()
        threads["first"].join(FAIL_SAFE_S)
        assert client.is_awaited_by("bank.notify")
        assert lines.warnings() == ["Redis is unavailable: away; bank.notify waits, 0 s so far"]
        answered["second"].set()
        threads["second"].join(FAIL_SAFE_S)
        assert lines.warnings()[1:] == ["bank.notify resumes: Redis is available again after 0.0 s"]
        gives_up.set()
        with pytest.raises(Unavailable):
            client.retry_while_unavailable(lambda: client.execute("PING"), what="bank.notify", give_up=gives_up.is_set)
        assert len(lines.warnings()) == 2


def test_a_stop_while_redis_is_away_logs_no_end_of_the_outage(lines: Lines) -> None:
    class StoppingClock(ManualClock):
        def sleep_ms(self, duration_ms: float) -> None:
            loop.stop()

    with EmbeddedServer() as server:
        loop = ReadingLoop(make(double), server.url, consumer="w1", clock=StoppingClock())
        server.kill()
        loop._retry_while_unavailable(lambda: loop._client.execute("PING"))
    (line,) = lines.warnings()
    assert line.startswith("Redis is unavailable: ")
    assert line.endswith("; app.handle waits, 0 s so far")


def test_only_a_fetch_that_is_refused_for_lack_of_memory_makes_a_worker_short_of_it_until_one_is_answered(
    context: WorkerContext, lines: Lines
) -> None:
    outage = context.fetch_outage
    outage.on_refused(Unavailable("away"))
    assert not outage.is_short_of_memory
    assert lines.warnings() == []
    outage.on_refused(OutOfMemory("full"))
    assert outage.is_short_of_memory
    outage.on_fetched()
    assert not outage.is_short_of_memory
    (begin, end) = lines.warnings()
    assert begin.startswith("app.handle cannot fetch messages: full")
    assert end.startswith("app.handle resumes: Redis answers its fetches again after ")


@pytest.mark.parametrize(
    ("first", "last", "is_over"),
    [
        (None, StaleOwner("taken over"), True),
        (StaleOwner("taken over"), None, True),
        (StaleOwner("taken over"), StaleOwner("taken over"), False),
        (None, Unavailable("away"), False),
    ],
)
def test_the_end_of_an_outage_is_logged_if_a_thread_was_answered_though_the_last_one_fails_unless_it_gives_up(
    client: Client, lines: Lines, first: MillstreamError | None, last: MillstreamError | None, is_over: bool
) -> None:
    gives_up = threading.Event()
    goes_on = {"first": threading.Event(), "last": threading.Event()}
    results = {"first": first, "last": last}

    def wait(name: str) -> None:
        def ask() -> None:
            if not goes_on[name].is_set():
                raise Unavailable("away")
            if (error := results[name]) is not None:
                raise error
            waiting_client.execute("PING")

        with suppress(MillstreamError):
            waiting_client.retry_while_unavailable(ask, what="bank.notify", give_up=gives_up.is_set)

    with Client(client.url, clock=StandingClock()) as waiting_client:
        threads = {name: threading.Thread(target=wait, args=(name,)) for name in goes_on}
        for number, thread in enumerate(threads.values(), 1):
            thread.start()
            eventually(lambda: waiting_client.is_awaited_by("bank.notify"), "a thread that waits")
            eventually(lambda: waiting_client._outages._outages["bank.notify"].waiting == number, "each thread")  # noqa: B023
        goes_on["first"].set()
        threads["first"].join(FAIL_SAFE_S)
        if isinstance(last, Unavailable):
            gives_up.set()
        goes_on["last"].set()
        threads["last"].join(FAIL_SAFE_S)
        assert not waiting_client.is_awaited_by("bank.notify")
    ends = ["bank.notify resumes: Redis is available again after 0.0 s"] if is_over else []
    assert lines.warnings() == ["Redis is unavailable: away; bank.notify waits, 0 s so far", *ends]
