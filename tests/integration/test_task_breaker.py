"""The breaker of a handler on Spark, without Spark: tasks that stop early, and the driver's decision."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from millstream import App, Message, Retry
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.pause import Pause
from millstream.errors import HandlerPaused, Unfinished
from millstream.handlers.breaker_window import Trip
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.spark.engine.run_breaker import RunBreaker
from millstream.spark.engine.task import Job
from tests.support.clocks import ManualClock
from tests.support.task_fixtures import TaskFixture, only

pytestmark = [pytest.mark.spark]


def fails(message: Message) -> None:
    raise KeyError("custommer")


async def fails_async(message: Message) -> None:
    raise KeyError("custommer")


def fails_in_lists(messages: list[Message]) -> None:
    raise KeyError("custommer")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (fails, {}),
        (fails, {"key": "k"}),
        (fails, {"key": "custommer"}),
        (fails_async, {"key": "k"}),
        (fails_in_lists, {}),
    ],
    ids=["plain", "by key", "missing key", "async", "lists"],
)
def test_a_task_stops_early_and_the_corrected_handler_runs_the_rest(
    client: Client, function: Any, options: dict[str, Any]
) -> None:
    tasks = TaskFixture(client)
    rows = tasks.rows(*((n, b"%d" % n if options.get("key") == "k" else None, {"n": n, "k": n}) for n in range(1, 501)))
    broken = only(App("app"), function, name="handle", retry=Retry(attempts=1), **options)
    found = tasks.process(broken, rows)
    # Of messages without a key none is dead: the corrected handler keeps their progress under other names.
    dead = 0 if options.get("key") == "custommer" else 20
    assert found["dead"] == len(tasks.dead()) == dead
    assert msgspec.json.decode(found["trip"], type=Trip).count >= 20
    seen: list[int] = []

    def counts(message: Message) -> None:
        seen.append(int(message.fields["n"]))

    fixed = only(App("app"), counts, name="handle", **({"key": "k"} if options.get("key") == "k" else {}))
    found = tasks.process(fixed, rows)
    assert found["trip"] == ""
    assert len(seen) == 500 - dead
    assert {*seen, *(int(letter.pairs[1]) for letter in tasks.dead())} == set(range(1, 501))


def test_messages_that_are_processed_before_those_that_fail_keep_the_breaker_closed(client: Client) -> None:
    def fails_from_two(message: Message) -> None:
        if int(message.fields["n"]) > 1:
            raise KeyError("custommer")

    tasks = TaskFixture(client)
    handler = only(App("app"), fails_from_two, name="handle", key="k", retry=Retry(attempts=1))
    found = tasks.process(handler, tasks.rows(*((n, b"a", {"n": n, "k": "a"}) for n in range(1, 22))))
    assert (found["trip"], len(tasks.dead())) == ("", 20)


@pytest.mark.parametrize(("own", "dead"), [({"millstream.timer": "t"}, 20), ({}, 100)], ids=["timers", "redriven"])
def test_messages_of_timers_open_the_breaker_and_redriven_ones_do_not(
    client: Client, own: dict[str, str], dead: int
) -> None:
    tasks = TaskFixture(client)
    first = {"millstream.redrive": "app.handle", **own}
    rows = tasks.rows(*((n, b"%d" % n, {**first, "n": n, "k": n}) for n in range(1, 101)))
    broken = only(App("app"), fails, name="handle", retry=Retry(attempts=1), key="k")
    assert tasks.process(broken, rows)["dead"] == len(tasks.dead()) == dead
    assert [letter.pairs[0] for letter in tasks.dead()] == [b"n"] * dead


def test_messages_without_a_key_among_many_with_one_become_dead_letters_even_if_they_come_first(client: Client) -> None:
    tasks = TaskFixture(client)
    rows = tasks.rows(*((n, b"k" if n % 5 else None, {"n": n, **({"k": "k"} if n % 5 else {})}) for n in range(1, 501)))
    handler = only(App("app"), lambda message: None, name="handle", key="k")
    found = tasks.process(handler, rows)
    assert (found["committed"], found["dead"], found["trip"]) == (500, 100, "")


# --- The driver ---


class Driver:
    """A RunBreaker with jobs that report what the test sets."""

    def __init__(self, client: Client, *, key: str | None = None, once: bool = False) -> None:
        self.client = client
        self.handler: Handler = only(App("app"), fails, name="handle", **({"key": key} if key else {}))
        self.policies: list[bool] = []
        self.pauses: list[Pause | None] = []
        self.counted: list[Mapping[str, int]] = []
        self.clock = ManualClock()
        self.clock.sleep_ms = lambda duration_ms: self.resume()  # type: ignore[method-assign]
        self.gives_up = False
        self.on_streams: Callable[[], object] = lambda: None
        self.breaker = RunBreaker(
            Job(handler=self.handler, url=client.url, token=1),
            client,
            streams=self.streams,
            give_up=lambda: self.gives_up,
            once=once,
            on_pause=self.on_pause,
            clock=self.clock,
        )

    def streams(self) -> list[str]:
        self.on_streams()
        return ["in", "in.2"]

    def on_pause(self, pause: Pause | None, counters: Mapping[str, int]) -> None:
        self.pauses.append(pause)
        self.counted.append(counters)

    def resume(self) -> None:
        assert set(self.stored()) == {"in", "in.2"}
        self.store().set_paused(["in", "in.2"], paused=False)

    def store(self) -> CommitStore:
        return CommitStore(self.client, app="app", handler="handle")

    def stored(self) -> dict[str, Pause]:
        return self.store().paused_streams(["in", "in.2"])

    def run(self, *rounds: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        remaining = list(rounds)

        def run_tasks(job: Job) -> Sequence[Mapping[str, Any]]:
            self.policies.append(job.handler.breaker is not None)
            return remaining.pop(0)

        found = self.breaker.run(run_tasks)
        assert not remaining
        return found


def row(good: int, dead: int = 0, *, stopped: bool = False, cause: str = "missing-key") -> dict[str, Any]:
    trip = msgspec.json.encode(Trip(cause, dead, dead, "no key")).decode()
    causes = msgspec.json.encode({cause: [dead, "no key"]} if dead else {}).decode()
    counters = {
        "messages": good + dead,
        "committed": good + dead,
        "dead": dead,
        "retries": 0,
        "refused": 0,
        "deferred": 0,
        "limited": 0,
        "head_of_line_avoided": 0,
    }
    return {"stream": "in", **counters, "causes": causes, "trip": trip if stopped else ""}


def test_a_batch_that_stopped_early_pauses_the_handler_and_is_run_again_once_it_is_resumed(client: Client) -> None:
    driver = Driver(client)
    rows = driver.run([row(0, 20, stopped=True)], [row(480)])
    assert (driver.policies, [one["committed"] for one in rows]) == ([True, True], [480])
    began, ended = driver.pauses
    assert began is not None
    assert (began.by, began.cause, began.count, ended) == ("breaker", "missing-key", 20, None)
    assert driver.counted[0]["dead"] == 20
    assert driver.stored() == {}


def test_one_bad_key_stops_its_task_but_not_the_handler(client: Client) -> None:
    driver = Driver(client, key="k")
    rows = driver.run([row(0, 20, stopped=True), row(30)], [row(10, 40)])
    assert driver.policies == [True, False]
    assert (sum(one["dead"] for one in rows), sum(one["messages"] for one in rows)) == (60, 50)
    assert driver.pauses == []


def test_small_batches_add_up(client: Client) -> None:
    driver = Driver(client)
    for _ in range(3):
        driver.run([row(0, 6)])
    assert driver.pauses == []
    driver.run([row(0, 6)])
    assert len(driver.pauses) == 1
    assert set(driver.stored()) == {"in", "in.2"}


def test_a_run_to_the_end_fails_while_paused_and_a_stop_leaves_the_batch_unfinished(client: Client) -> None:
    with pytest.raises(HandlerPaused, match="millstream resume app"):
        Driver(client, once=True).run([row(0, 20, stopped=True)])
    with pytest.raises(HandlerPaused):  # the next run repeats that batch first
        Driver(client, once=True).run()
    stopped = Driver(client)
    stopped.gives_up = True
    with pytest.raises(Unfinished):
        stopped.run()


def test_a_pause_by_an_operator_stays_as_it_is(client: Client) -> None:
    driver = Driver(client)
    driver.store().set_paused(["in"], paused=True)
    for _ in range(4):
        driver.run([row(0, 6)])
    assert {name: pause.by for name, pause in driver.stored().items()} == {"in": "operator", "in.2": "breaker"}


def test_a_batch_that_starts_while_the_breaker_stores_its_pause_does_not_make_the_run_ignore_the_pause(
    client: Client,
) -> None:
    driver = Driver(client)
    driver.run([row(0, 1)])  # the run has seen that nothing is paused
    ran: list[str] = []

    def batch_meanwhile() -> None:
        if not ran:
            ran.append("meanwhile")
            driver.run([row(1)])

    driver.on_streams = batch_meanwhile
    driver.breaker.check([row(0, 40)])  # a job of deferred keys, in a thread of its own
    assert ran == ["meanwhile"]
    assert set(driver.stored()) == {"in", "in.2"}
    driver.run([row(1)])
    began, ended = driver.pauses
    assert began is not None
    assert ended is None, "the batch waited for the resume"


def test_a_pause_that_is_stored_just_after_a_batch_has_found_none_holds_up_the_next_look(
    millstream_url: str,
) -> None:
    class Interleaved(Client):
        """Pauses the handler right after the first answer."""

        is_first = True

        def retry_while_unavailable(self, operation: Callable[[], Any], **options: Any) -> Any:
            found = super().retry_while_unavailable(operation, **options)
            if self.is_first:
                self.is_first = False
                driver.breaker.check([row(0, 40)])
            return found

    with Interleaved(millstream_url) as interleaved:
        driver = Driver(interleaved)
        driver.run([row(1)])
        began, ended = driver.pauses
        assert began is not None
        assert ended is None, "the batch waited for the resume"
        assert driver.stored() == {}
