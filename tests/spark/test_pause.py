"""A handler that is paused: on Spark, too, nothing new of its streams is read, and what waits for its key goes on waiting."""

import pytest

from millstream import App, Message, Retry, State
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import runnable_keys
from millstream.errors import PipelineFailed
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.options import parse
from tests.support.clocks import ManualClock
from tests.support.commandline import call
from tests.support.pipelines import Pipelines
from tests.support.planning import planned_end
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


def counting() -> App:
    app = App("app")

    @app.handler(pattern="in.*", key="k", into="out")
    def count(message: Message, state: State) -> dict[str, object]:
        state["n"] = state.get("n", 0) + 1
        return {"stream": message.stream, "n": state["n"]}

    return app


def done(pipelines: Pipelines, stream: str) -> int:
    return sum(fields["stream"] == stream for _, fields in pipelines.entries("out"))


def test_a_paused_stream_is_not_read_beside_others_and_continues_where_it_stopped(pipelines: Pipelines) -> None:
    for stream in ("in.a", "in.b"):
        pipelines.add(stream, {"k": 1})
    pipelines.once(counting())
    paused = call("pause", "app.count", "--stream", "in.a", "--url", pipelines.url)
    assert paused.out == "app.count is paused on in.a\n"
    for stream in ("in.a", "in.b"):
        pipelines.add(stream, *({"k": 1} for _ in range(10)))
    with pytest.raises(PipelineFailed, match=r"not all is processed: app.count is paused by an operator, since"):
        pipelines.once(counting())
    assert (done(pipelines, "in.a"), done(pipelines, "in.b")) == (1, 11)
    handlers = call("info", "--url", pipelines.url).out
    assert "paused" in handlers
    call("resume", "app.count", "--url", pipelines.url)
    pipelines.once(counting())
    assert (done(pipelines, "in.a"), done(pipelines, "in.b")) == (11, 11)
    numbers = [int(fields["n"]) for _, fields in pipelines.entries("out") if fields["stream"] == "in.a"]
    assert numbers == list(range(1, 12))


def test_a_run_detects_a_pause_and_its_end(pipelines: Pipelines) -> None:
    for stream in ("in.a", "in.b"):
        pipelines.add(stream, {"k": 1})

    def stands_still() -> bool:
        """Whether nothing of it was done while the other stream was processed three times.

        The second batch, at the latest, would have had the first message of this stream; it is over by the third.
        """
        waiting = done(pipelines, "in.a")
        for _ in range(3):
            pipelines.add("in.a", {"k": 1})
            pipelines.add("in.b", {"k": 1})
            eventually(lambda: done(pipelines, "in.b") == len(pipelines.entries("in.b")), "the other stream")
        return done(pipelines, "in.a") == waiting

    with pipelines.running(counting()):
        eventually(lambda: done(pipelines, "in.a") == 1, "the first message")
        call("pause", "app.count", "--stream", "in.a", "--url", pipelines.url)
        eventually(stands_still, "the pause to hold")
        for _ in range(2):
            assert stands_still()
        call("resume", "app.count", "--url", pipelines.url)
        eventually(lambda: done(pipelines, "in.a") == len(pipelines.entries("in.a")), "all of it")


def test_a_message_that_backs_off_waits_until_the_handler_is_resumed(pipelines: Pipelines) -> None:
    app = App("app")
    folder = pipelines.folder

    @app.handler("in", key="k", into="out", retry=Retry(attempts=3, delay_ms=10_000, jitter=0))
    def try_twice(message: Message) -> dict[str, object]:
        if message.attempt == 1:
            (folder / "failed").touch()
            raise RuntimeError("only the second attempt works")
        return {"n": message.text("n")}

    pipelines.add("in", {"k": 1, "n": 1})
    with pipelines.running(app):
        eventually((folder / "failed").exists, "the first attempt")
        call("pause", "app.try_twice", "--url", pipelines.url)
    store = CommitStore(pipelines.client, app="app", handler="try_twice", token=1 << 60)
    for is_due in (lambda: True, lambda: runnable_keys(store, ["in"], 1)["in"].queues):
        eventually(is_due, "the time of its next attempt")
        with pytest.raises(PipelineFailed, match="is paused by an operator"):  # it ends, though something waits
            pipelines.once(app)
        assert pipelines.entries("out") == []
    call("resume", "app.try_twice", "--url", pipelines.url)
    pipelines.once(app)
    assert [fields["n"] for _, fields in pipelines.entries("out")] == ["1"]


def test_a_paused_stream_is_not_read_and_delays_no_other(client: Client) -> None:
    clock = ManualClock()
    store = CommitStore(client, app="app", handler="handle")
    store = store.with_token(store.new_token(["a", "b"]))
    store.begin_run(["a", "b"])
    for stream, count in (("a", 100), ("b", 5)):
        client.pipeline([("XADD", stream, f"{n}-0", "n", n) for n in range(1, count + 1)])
    names = {"committedApp": "app", "committedHandler": "handle", "startingOffsets": "committed"}
    paused = BatchPlanner(
        client, parse({"url": client.url, "subscribePattern": "*", **names}, {}), cores=1, clock=clock
    )
    start = paused.starting_offsets("earliest")
    store.set_paused(["a"], paused=True)
    ends = planned_end(paused, start, limit=10)
    assert ends["b"].id == EntryId(5, 0)
    assert ends.get("a") == start.get("a")
    assert planned_end(paused, ends, limit=10, target=paused.latest_offsets()) is ends, (
        "and a run that ends at a target ends"
    )
    store.set_paused(["a"], paused=False)
    clock.now_ms += 60_000
    assert planned_end(paused, ends, limit=10)["a"].id == EntryId(10, 0)
