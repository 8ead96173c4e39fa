"""Poison isolation: a suspect runs while no other handler of its process does."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from millstream import App, Message, Retry
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import MillstreamError, WrongType
from millstream.handlers.attempt import NO_EFFECTS, Outcome
from millstream.redis_client.client import Client
from millstream.worker import WorkerPolicy
from millstream.worker.in_flight import InFlight
from millstream.worker.incarnations import Incarnation
from millstream.worker.running.losses import crashes_allowed, isolated_after
from millstream.worker.running.poison_isolation import PoisonIsolation, ProcessIsolation
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker]


def delivery(stream: ReliableStream, number: int = 1) -> Delivery:
    return Delivery(stream, b"%d-0" % number, [b"n", b"1"])


def nothing(_: Message) -> None:
    pass


class Alone:
    """A runner that records whether anything else ran when it ran a message in isolation."""

    def __init__(self, others: Sequence[InFlight]) -> None:
        self._others = others
        self.saw: list[bool] = []

    def permitted(self, _: Delivery) -> AbstractContextManager[None]:
        return nullcontext()

    def run_isolated(self, _: Delivery) -> Outcome:
        self.saw.append(
            any(one.running and not one.finished for in_flight in self._others for one in in_flight.deliveries)
        )
        return NO_EFFECTS


class Unmarked(ReliableStream):
    """A stream that records no isolated runs."""

    def isolation_state(self, delivery: Delivery) -> tuple[int, str]:
        return 0, ""

    def begin_isolation(self, delivery: Delivery, mark: str) -> None:
        pass

    def end_isolation(self, deliveries: Iterable[Delivery]) -> None:
        pass


@pytest.mark.parametrize(("attempts", "losses", "deaths"), [(1, 1, 2), (2, 1, 2), (3, 1, 2), (4, 2, 2), (10, 2, 8)])
def test_a_message_never_becomes_a_dead_letter_for_the_crash_of_one_process_alone(
    attempts: int, losses: int, deaths: int
) -> None:
    retry = Retry(attempts=attempts)
    assert (isolated_after(retry), crashes_allowed(retry)) == (losses, deaths)


class Damaged(Unmarked):
    """A stream whose record of isolated runs is of another type, until it is repaired at the second look."""

    looks = 0

    def isolation_state(self, delivery: Delivery) -> tuple[int, str]:
        self.looks += 1
        if self.looks == 1:
            raise WrongType("the key is a string")
        return 0, ""


def isolation(client: Client, in_flight: InFlight, runner: Alone, process: ProcessIsolation) -> PoisonIsolation:
    app = App("app")
    app.handler("in", name="handle")(nothing)
    return PoisonIsolation(
        app.handlers["handle"],
        in_flight,
        runner,  # type: ignore[arg-type]
        threading.Event(),
        process,
        incarnation=Incarnation(client, SYSTEM_CLOCK, app="app", consumer="w"),
        clock=SYSTEM_CLOCK,
    )


def test_a_suspect_of_an_excluded_stream_runs_once_the_stream_is_repaired() -> None:
    with Client("redis://127.0.0.1:1") as nowhere:
        stream = Damaged(nowhere, "in", app="app", handler="handle", consumer="w")
        errors: list[MillstreamError] = []
        stream.on_stream_error = errors.append
        in_flight, runner = InFlight(WorkerPolicy(), 1), Alone([])
        guard = isolation(nowhere, in_flight, runner, ProcessIsolation())
        suspect = delivery(stream)
        in_flight.add_suspect(suspect)
        guard.add_suspect(suspect)
        thread = threading.Thread(target=guard.run)
        thread.start()
        finished, _ = in_flight.completions.collect(FAIL_SAFE_S)
        guard.add_suspect(None)
        thread.join()
    assert finished == [((suspect,), NO_EFFECTS)]
    assert (len(errors), stream.leaving, len(runner.saw)) == (1, True, 1)


def test_a_suspect_and_the_other_handlers_of_its_process_wait_for_each_other() -> None:
    with Client("redis://127.0.0.1:1") as nowhere:
        here = Unmarked(nowhere, "in", app="app", handler="handle", consumer="w")
        there = Unmarked(nowhere, "in", app="app", handler="other", consumer="w")
        in_flight, other = InFlight(WorkerPolicy(), 1), InFlight(WorkerPolicy(), 1)
        process, runner = ProcessIsolation(), Alone([other])
        guard = isolation(nowhere, in_flight, runner, process)
        isolation(nowhere, other, runner, process)
        running, waiting, suspect = delivery(there), delivery(there, 2), delivery(here)
        other.add([running, waiting], 0)
        assert other.start(running, 0)
        in_flight.add_suspect(suspect)
        guard.add_suspect(suspect)
        thread = threading.Thread(target=guard.run)
        thread.start()
        while other.start(waiting, 0):
            waiting.running = False
        assert other.start(waiting, 0) is None
        assert runner.saw == []
        running.finished = True
        assert in_flight.completions.collect(FAIL_SAFE_S)[0]
        guard.add_suspect(None)
        thread.join()
    assert runner.saw == [False]
    assert other.start(waiting, 0)
