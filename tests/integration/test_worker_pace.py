"""How fast workers read: a handler's rate, which all its workers keep together, and pause and resume."""

import threading
import time
from contextlib import ExitStack

import pytest

from millstream import Message
from millstream.client import Client
from millstream.health import Health
from millstream.ledger import Ledger
from millstream.naming import HandlerKeys
from tests.integration.test_worker import KEYS, double, fill, make, outputs, pending, working
from tests.support.commandline import call
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker]

WINDOW_S = 2.5


# The rate


def measured(client: Client, rate: float | None, workers: int, stream: str = "in") -> float:
    """Messages a second that so many workers do together, of a stream with far more than they can."""
    handler = make(double, **({} if rate is None else {"rate": rate}))
    with ExitStack() as stack:
        for number in range(workers):
            stack.enter_context(working(client, handler, f"w{number}"))
        eventually(lambda: client.execute("XLEN", "out") > 0)
        first = client.execute("XRANGE", "out", "-", "+", "COUNT", 1)[0][0]
        time.sleep(WINDOW_S)
    end = int(first.split(b"-")[0]) + int(WINDOW_S * 1000)
    return len(client.execute("XRANGE", "out", first, end)) / WINDOW_S


@pytest.mark.alone
@pytest.mark.parametrize(("rate", "workers"), [(200, 3), (200, 1), (12.5, 3)])
def test_all_workers_together_keep_the_rate(client: Client, rate: float, workers: int) -> None:
    fill(client, 5_000)
    assert measured(client, rate, workers) == pytest.approx(rate, rel=0.15)


def test_without_a_rate_they_are_far_faster(client: Client) -> None:
    fill(client, 5_000)
    assert measured(client, None, 3) > 1_000


def test_each_stream_has_the_rate_for_itself(client: Client) -> None:
    fill(client, 1_000, stream="in.a")
    fill(client, 1_000, stream="in.b", first=1_000)
    with working(client, make(double, pattern="in.*", rate=100)):
        eventually(lambda: len(outputs(client)) > 100)
        time.sleep(1)
    found = outputs(client)
    assert min(len([n for n in found if n < 1_000]), len([n for n in found if n >= 1_000])) > 80
    assert len(found) < 500


@pytest.mark.alone
def test_a_handler_that_was_idle_reads_a_message_at_once(client: Client) -> None:
    with ExitStack() as stack:
        loops = [stack.enter_context(working(client, make(double, rate=0.5), f"w{number}")) for number in range(2)]
        time.sleep(2.5)
        began = time.monotonic()
        fill(client, 1)
        eventually(lambda: sum(loop.report.committed for loop in loops) == 1)
    assert time.monotonic() - began < 1.5


def reserve(client: Client, rate: float, count: int) -> float:
    return Ledger(client, app="app", handler="handle").reserve("in", rate, count)


def test_reservations_follow_each_other_whoever_makes_them(client: Client) -> None:
    waits = [reserve(client, 10, 2) for _ in range(4)]
    assert waits == pytest.approx([0, 200, 400, 600], abs=50)
    time.sleep(1)
    assert reserve(client, 10, 2) == 0


def test_a_clock_that_went_back_does_not_hold_up_the_handler(client: Client) -> None:
    seconds, _ = client.execute("TIME")
    client.execute("HSET", KEYS.meta, "rate_at", (int(seconds) + 86_400) * 1_000_000)
    assert reserve(client, 10, 2) == 0
    assert reserve(client, 10, 2) == pytest.approx(200, abs=50)


def test_a_loop_that_waits_for_its_turn_is_healthy(client: Client) -> None:
    health = Health(read_within_ms=500)
    fill(client, 5)
    with working(client, make(double, rate=0.1), health=health) as loop:
        eventually(lambda: loop.report.committed == 1)
        time.sleep(1.5)
        assert health.failures() == []


# Pause and resume


def pause(client: Client, *, paused: bool = True) -> None:
    Ledger(client, app="app", handler="handle").pause(["in"], paused=paused)


def test_a_paused_handler_reads_nothing_stays_healthy_and_goes_on_when_told(client: Client) -> None:
    health = Health(read_within_ms=500)
    fill(client, 10)
    with working(client, make(double), health=health) as loop:
        eventually(lambda: loop.report.committed == 10)
        pause(client)
        time.sleep(0.5)
        fill(client, 10, first=10)
        time.sleep(1.5)
        assert (loop.report.committed, health.failures(), health.unreadiness()) == (10, [], [])
        pause(client, paused=False)
        eventually(lambda: loop.report.committed == 20)
    assert sorted(outputs(client)) == list(range(20))


def test_a_worker_that_starts_while_paused_takes_nothing_not_even_what_it_held(client: Client) -> None:
    with working(client, make(double)):
        pass
    fill(client, 5)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "w1", "COUNT", 3, "STREAMS", "in", ">")
    pause(client)
    with working(client, make(double)) as loop:
        time.sleep(1)
        assert (loop.report.read, loop.report.adopted, outputs(client)) == (0, 0, [])
        pause(client, paused=False)
        eventually(lambda: loop.report.committed == 5)
    assert pending(client) == 0


def test_a_paused_worker_finishes_what_it_has_and_adopts_nothing(client: Client) -> None:
    going_on = threading.Event()

    def handle(message: Message) -> dict[str, object]:
        going_on.wait(20)
        return double(message)

    fill(client, 1)
    with working(client, make(handle)) as loop:
        eventually(lambda: loop.report.read == 1)
        pause(client)
        time.sleep(0.5)
        fill(client, 2, first=1)
        client.execute("XREADGROUP", "GROUP", KEYS.group, "dead", "STREAMS", "in", ">")
        going_on.set()
        time.sleep(2)  # twice the time after which it would adopt them
        assert (outputs(client), pending(client)) == ([0], 2)
        pause(client, paused=False)
        eventually(lambda: pending(client) == 0)


def ran(client: Client, app: str, handler: str, *streams: str) -> None:
    for stream in streams:
        client.execute("XADD", stream, "*", "n", "1")
        client.execute("HSET", HandlerKeys(app, handler, stream).meta, "frontier", "0-0", "engine", "workers")


def paused(client: Client, app: str, handler: str, *streams: str) -> list[bool]:
    return [Ledger(client, app=app, handler=handler, token=1).look(stream) for stream in streams]


def test_the_commands_pause_and_resume_a_handler_on_its_streams_and_info_shows_it(client: Client) -> None:
    ran(client, "shop", "bill", "a", "b")
    ran(client, "shop", "ship", "a")
    done = call("pause", "bill", "--json", url=client.url)
    assert done.json() == {"app": "shop", "handler": "bill", "streams": ["a", "b"], "paused": True}
    assert paused(client, "shop", "bill", "a", "b") == [True, True]
    assert paused(client, "shop", "ship", "a") == [False]
    assert "shop.bill goes on on a" in call("resume", "shop.bill", "--stream", "a", url=client.url).out
    assert paused(client, "shop", "bill", "a", "b") == [False, True]
    shown = call("info", "--json", url=client.url).json()["handlers"]
    assert {(one["handler"], one["stream"]): one["paused"] for one in shown} == {
        ("bill", "a"): False,
        ("bill", "b"): True,
        ("ship", "a"): False,
    }
    said = call("info", url=client.url).out
    assert (said.count("1 stream paused"), said.count("workers (0), paused")) == (1, 1), (
        "of the handler, and of its stream"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bill",), "bank and shop have a handler 'bill' each: write bank.bill"),
        (("shop.bill", "--stream", "z"), "no handler 'shop.bill' has run on 'z'"),
        (("nobody",), "no handler 'nobody' has run on this Redis"),
    ],
)
def test_a_handler_that_is_not_clear_is_one_line_and_nothing_is_paused(
    client: Client, arguments: tuple[str, ...], says: str
) -> None:
    ran(client, "shop", "bill", "a")
    ran(client, "bank", "bill", "a")
    done = call("pause", *arguments, url=client.url)
    assert done.code == 2
    assert says in done.err
    assert paused(client, "shop", "bill", "a") + paused(client, "bank", "bill", "a") == [False, False]
