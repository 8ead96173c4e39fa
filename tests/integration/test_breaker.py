"""The breaker of a handler on workers: a broken deployment pauses the handler and empties no stream into the dead letters."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millstream import Breaker, Message, Reject, Retry, State
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.pause import Pause
from millstream.delivery.reliable_stream import ReliableStream
from millstream.handlers.attempt import DeadLettered
from millstream.handlers.handler import Handler
from millstream.observability import metrics as m
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from millstream.worker.breaker import HandlerBreaker
from tests.support.commandline import call
from tests.support.waiting import eventually
from tests.support.workers import KEYS, QUICK, dead, double, figure, fill, make, outputs, working

pytestmark = [pytest.mark.worker]

BACKLOG = 600


async def fails_async(message: Message) -> None:
    raise KeyError("custommer")


def fails(message: Message) -> None:
    raise KeyError("custommer")


def fails_in_lists(messages: list[Message]) -> None:
    raise KeyError("custommer")


def counts(message: Message, state: State) -> dict[str, Any]:
    state["n"] = state.get("n", 0) + 1
    return double(message)


def returns_without_into(message: Message) -> dict[str, Any]:
    return {"n": 1}


BROKEN: dict[str, Callable[[], Handler]] = {
    "failed": lambda: make(fails, retry=Retry(attempts=2, delay_ms=1)),
    "failed, async": lambda: make(fails_async, retry=Retry(attempts=1)),
    "failed, lists": lambda: make(fails_in_lists, retry=Retry(attempts=2, delay_ms=1)),
    "failed, by key": lambda: make(fails, key="n", retry=Retry(attempts=2, delay_ms=1)),
    "failed, one key": lambda: make(fails, key=lambda message: "all", retry=Retry(attempts=1)),
    "failed, by stream": lambda: make(fails_async, order="stream", retry=Retry(attempts=1)),
    "missing-key": lambda: make(double, key="custommer"),
    "missing-key, by key and state": lambda: make(counts, key="custommer"),
    "bad-output": lambda: make(returns_without_into, into=None),
}


def stored(client: Client) -> Pause | None:
    return CommitStore(client, app="app", handler="handle").paused_streams(["in"]).get("in")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_deployment_pauses_its_handler_and_the_fixed_one_processes_the_rest(
    client: Client, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, BACKLOG)
    with caplog.at_level(logging.ERROR), working(client, BROKEN[kind]()) as loop:
        eventually(lambda: stored(client) is not None, "the pause")
        eventually(lambda: len(loop._in_flight) == 0, "the end of what was in flight")
        # Messages without a key are not even enqueued: they would be in the wrong queue for the fixed handler.
        lost = 0 if "missing" in kind else 20
        assert len(dead(client)) == lost
        eventually(lambda: loop.loop_metrics.dead == lost, "the loop to have counted them")
        pause = stored(client)
        assert pause is not None
        assert (pause.by, pause.count, pause.of, pause.worker) == ("breaker", 20, 20, "w1")
        assert pause.cause.startswith(kind.partition(",")[0])
    assert "millstream resume app.handle" in caplog.text
    assert client.execute("XLEN", "in") == BACKLOG
    fixed = make(double, **({"key": "n"} if BROKEN[kind]().key else {}))
    if "stream" in kind:
        fixed = make(double, order="stream")
    with working(client, fixed, "w2") as loop:
        assert call("resume", "app.handle", "--url", client.url).code == 0
        eventually(lambda: loop.loop_metrics.committed == BACKLOG - lost, "the rest")
    processed = set(outputs(client))
    assert len(processed) == len(outputs(client)) == BACKLOG - lost
    assert processed | {int(letter.pairs[1]) for letter in dead(client)} == set(range(BACKLOG))
    assert client.execute("XPENDING", "in", KEYS.group)[0] == 0


def test_the_breaker_opens_for_all_processes_and_again_if_nothing_was_fixed(client: Client) -> None:
    fill(client, BACKLOG)
    broken = make(fails, retry=Retry(attempts=1))
    with working(client, broken, "w1") as one, working(client, broken, "w2") as two:
        loops = (one, two)

        def is_still() -> bool:
            return all(stream.pause is not None for loop in loops for stream in loop._ordering.streams.values())

        eventually(lambda: figure(client, m.BREAKER_OPEN) == 1, "the metric")
        eventually(is_still, "the pause in both")
        eventually(lambda: len(one._in_flight) == len(two._in_flight) == 0, "the end of what was in flight")
        first = len(dead(client))
        assert 20 <= first <= 2 * 20
        call("resume", "app.handle", "--url", client.url)
        eventually(lambda: len(dead(client)) >= first + 20, "the probe")
        eventually(is_still, "the next pause")
        eventually(lambda: len(one._in_flight) == len(two._in_flight) == 0, "the end of what was in flight")
        assert len(dead(client)) <= first + 2 * 20
    assert client.execute("XLEN", "in") == BACKLOG


def breaker_on(client: Client, *names: str) -> tuple[HandlerBreaker, list[ReliableStream], Callable[[int], None]]:
    """A breaker on several streams, and a function that shows it so many dead letters."""
    breaker = HandlerBreaker(make(fails, breaker=Breaker(first=20), retry=Retry(attempts=1)), "w1")
    streams = [ReliableStream(client, name, app="app", handler="handle", consumer="w1") for name in names]
    for stream in streams:
        stream.join()
    fill(client, 1, names[0])
    (delivery,) = streams[0].fetch(count=1)

    def die(count: int) -> None:
        for _ in range(count):
            breaker.admits(delivery, DeadLettered("failed", "KeyError", place="shop.py:7"))

    return breaker, streams, die


def follow(breaker: HandlerBreaker, stream: ReliableStream) -> bool:
    before = stream.pause
    stream.refresh()
    return breaker.follow(stream, before)


def test_resuming_one_of_several_paused_streams_begins_the_window_anew_and_resuming_the_others_does_not(
    client: Client,
) -> None:
    breaker, streams, die = breaker_on(client, "in", "other")
    store = CommitStore(client, app="app", handler="handle")
    die(20)
    assert breaker.is_open()
    for _ in range(2):
        assert [follow(breaker, stream) for stream in streams] == [False, False]
    assert store.paused_streams(["in", "other"]).keys() == {"in", "other"}
    store.set_paused(["in"], paused=False)
    assert follow(breaker, streams[0])
    assert not breaker.is_open()
    die(19)
    assert not breaker.is_open(), "the window began anew"
    store.set_paused(["other"], paused=False)
    assert follow(breaker, streams[1])
    die(1)
    assert breaker.is_open(), "what came before the second stream was resumed still counts"


def test_the_end_of_an_operators_pause_does_not_begin_the_window_anew(client: Client) -> None:
    breaker, streams, die = breaker_on(client, "in")
    store = CommitStore(client, app="app", handler="handle")
    die(19)
    store.set_paused(["in"], paused=True)
    assert not follow(breaker, streams[0])
    store.set_paused(["in"], paused=False)
    assert follow(breaker, streams[0])
    die(1)
    assert breaker.is_open()


def test_the_breaker_opens_when_nearly_all_of_the_last_messages_fail_though_many_were_good(client: Client) -> None:
    def fails_later(message: Message) -> dict[str, Any]:
        if int(message.fields["n"]) >= 300 and int(message.fields["n"]) % 20:
            raise ValueError(message.text("n"))
        return double(message)

    fill(client, BACKLOG)
    with working(client, make(fails_later, retry=Retry(attempts=1))) as loop:
        eventually(lambda: stored(client) is not None, "the pause")
        eventually(lambda: len(loop._in_flight) == 0, "the end of what was in flight")
        assert 90 <= len(dead(client)) <= 100
        assert (stored(client) or Pause()).of == 100


@pytest.mark.parametrize("kind", ["rejects", "turned off", "different places", "half of them"])
def test_the_breaker_stays_closed(client: Client, kind: str) -> None:
    def handle(message: Message) -> dict[str, Any]:
        n = int(message.fields["n"])
        if kind == "rejects":
            raise Reject("not today")
        if kind == "half of them" and n % 2:
            return double(message)
        if kind == "different places" and n % 2:
            raise ValueError(n)
        raise KeyError(n)

    fill(client, 300)
    options: dict[str, Any] = {"breaker": None} if kind == "turned off" else {}
    with working(client, make(handle, retry=Retry(attempts=1), **options)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 300, "all of them")
    assert stored(client) is None


def test_the_breaker_stays_open_until_redis_has_stored_the_pause(
    client: Client, millstream_server: EmbeddedServer
) -> None:
    fill(client, BACKLOG)
    with Proxy(millstream_server.port) as proxy:
        proxy.cut_before("HSET", containing="breaker", times=8)  # each call is tried twice
        with (
            Client(proxy.url) as unlucky,
            working(unlucky, make(fails, retry=Retry(attempts=1))) as loop,
        ):
            eventually(lambda: stored(client) is not None, "the pause")
            assert proxy.cuts["before", "HSET"] == 8
            eventually(lambda: len(loop._in_flight) == 0, "the end of what was in flight")
    assert len(dead(client)) == 20


def test_an_error_that_is_not_valid_text_can_be_stored_with_the_pause(client: Client) -> None:
    def raises_oddly(message: Message) -> None:
        raise ValueError("\ud800 of redis://user:secret@host:1 " + 1_000 * "x")

    fill(client, 50)
    with working(client, make(raises_oddly, retry=Retry(attempts=1))):
        eventually(lambda: stored(client) is not None, "the pause")
    pause = stored(client)
    assert pause is not None
    assert pause.error.startswith("ValueError: \\ud800 of redis://")
    assert "secret" not in pause.error
    assert len(pause.error) < 400


def test_a_breaker_with_a_retry_time_probes_by_itself(client: Client) -> None:
    def needs_repair(message: Message) -> dict[str, Any]:
        if client.execute("XLEN", KEYS.dead_letters) < 10:  # until the end of the second probe
            raise ConnectionError("the database is away")
        return double(message)

    fill(client, 100)
    handler = make(needs_repair, retry=Retry(attempts=1), breaker=Breaker(first=5, retry_after_s=0.3))
    one_at_a_time = replace(QUICK, threads=1, prefetch=1)  # none has failed already when the breaker opens or closes
    with working(client, handler, policy=one_at_a_time) as loop:
        eventually(lambda: loop.loop_metrics.committed == 100, "all of them")
    assert len(dead(client)) == 10, "five each time"
    assert stored(client) is None


def test_info_and_keys_show_the_cause_of_a_pause_and_resume_clears_it(client: Client) -> None:
    fill(client, 50)
    with working(client, make(double, key="custommer")):
        eventually(lambda: stored(client) is not None, "the pause")
    output = call("info", "--url", client.url).out
    assert "app.handle is paused by its breaker: 20 of 20 messages ended as missing-key" in output
    assert "millstream resume app.handle" in output
    (shown,) = call("info", "--json", "--url", client.url).json()["handlers"]
    assert (shown["paused"], shown["pause"]["by"], shown["pause"]["cause"]) == (True, "breaker", "missing-key")
    assert "paused by its breaker" in call("key", "list", "app.handle", "--url", client.url).err
    assert "paused by its breaker" in call("key", "list", "--url", client.url).err, "the first look, at all handlers"
    counted = call("key", "list", "app.handle", "--count", "--json", "--url", client.url).json()
    assert counted["pause"]["by"] == "breaker"
    assert figure(client, m.BREAKER_OPEN) == figure(client, m.PAUSED) == 1
    assert call("resume", "app.handle", "--url", client.url).code == 0
    assert stored(client) is None
    assert figure(client, m.BREAKER_OPEN) == figure(client, m.PAUSED) == 0
