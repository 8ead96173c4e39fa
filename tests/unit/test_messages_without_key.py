"""Messages without a key, on both runners: they wait at the gate, and the last one of several asks for a commit at once."""

from typing import Any

import pytest

from millstream import Message, Retry
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.in_flight import InFlight
from millstream.worker.running.async_runner import AsyncRunner
from millstream.worker.running.thread_runner import ThreadRunner
from tests.support.runners import delivery, runner_of, running
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker]


@pytest.fixture(params=["thread", "async"])
def ran(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """The ids of messages that have run, and what makes a runner of one message at a time for an in-flight set."""
    ids: list[str] = []

    def handle(message: Message) -> None:
        ids.append(message.id)

    async def handle_async(message: Message) -> None:
        ids.append(message.id)

    monkeypatch.setattr("millstream.worker.running.async_runner._ITERATION_MS", float("inf"))
    if request.param == "thread":
        return ids, lambda in_flight: runner_of(handle, ThreadRunner, in_flight, 1)
    once: dict[str, Any] = {"concurrency": 1, "retry": Retry(attempts=1)}
    return ids, lambda in_flight: runner_of(handle_async, AsyncRunner, in_flight, **once)


def test_a_message_that_the_gate_keeps_from_starting_runs_once_it_is_open(
    stream: ReliableStream, in_flight: InFlight, ran: tuple[list[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, make = ran
    start = in_flight.start
    found: list[bool | None] = []

    def start_at_a_closed_gate(one: Delivery, now_ms: float, **options: Any) -> bool | None:
        if found:
            return start(one, now_ms, **options)
        in_flight.close_gate()  # after the runner has taken the message
        found.append(start(one, now_ms, **options))
        in_flight.open_gate()
        return found[0]

    monkeypatch.setattr(in_flight, "start", start_at_a_closed_gate)
    in_flight.add([delivery(stream, number) for number in (1, 2)], 0)
    with running(make(in_flight), in_flight):
        eventually(lambda: "2-0" in ids)
    assert (found, ids) == ([None], ["1-0", "2-0"])


def test_the_last_message_that_waits_asks_for_a_commit_at_once_and_those_before_it_do_not(
    stream: ReliableStream, in_flight: InFlight, ran: tuple[list[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, make = ran
    put = in_flight.completions.put
    asked: list[bool] = []

    def put_and_note(run: FinishedRun, *, urgent: bool = True) -> None:
        asked.append(urgent)
        put(run, urgent=urgent)

    monkeypatch.setattr(in_flight.completions, "put", put_and_note)
    in_flight.add([delivery(stream, number) for number in (1, 2, 3)], 0)
    with running(make(in_flight), in_flight):
        eventually(lambda: len(asked) == 3)
    assert asked == [False, False, True]
