"""The supervisor: what it gives up, what it tries again, and what it says meanwhile."""

import threading
import time
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream import App, Message, Retry, Rows
from millstream.admin.liveness import find_runs
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.running_code import read_code
from millstream.errors import AccessDenied, ConfigError, DataLoss, PipelineFailed, StaleOwner, Unavailable, WrongType
from millstream.model import EntryId
from millstream.producer.producer import Producer
from millstream.spark.run import query as pipeline
from millstream.spark.run import supervisor as runner
from millstream.spark.run.failures import Failure, failure_of
from tests.support.clocks import ManualClock
from tests.support.pipelines import Pipelines
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]


def app_of(handle: Callable[[Message], None]) -> App:
    app = App("app")
    app.handler("in", name="handle")(handle)
    return app


def nothing(message: Message) -> None:
    """A handler."""


@pytest.mark.parametrize("kind", [StaleOwner, DataLoss, ConfigError, AccessDenied, WrongType])
def test_a_failure_that_no_retry_can_mend_is_final_whichever_process_it_comes_from(kind: type[Exception]) -> None:
    text = f"Traceback ...\n  File x\nmillstream.errors.{kind.__name__}: the reason\n\tat org.apache.spark\n"
    for error in (kind("the reason"), RuntimeError(text)):
        failure = failure_of(error)
        assert (failure.kind, failure.reason, failure.is_final) == (kind, "the reason", True)


def test_any_other_failure_is_retried_and_reported_in_one_line() -> None:
    assert not failure_of(Unavailable("away")).is_final
    failure = failure_of(RuntimeError("job failed\njava.io.IOException: disk full\n\tat x\n"))
    assert (failure.kind, failure.reason, failure.is_final) == (None, "IOException: disk full", False)
    assert failure_of(ValueError("")).reason == "ValueError:"


def test_a_session_has_the_name_that_it_was_opened_with(spark: SparkSession) -> None:
    assert spark.sparkContext.appName == "tests"


def test_a_long_batch_is_reported_at_ever_longer_intervals(pipelines: Pipelines) -> None:
    clock = ManualClock()
    settings = runner.RunSettings(url=pipelines.url, checkpoint=str(pipelines.folder / "checkpoint"))
    watched = runner.Supervisor(
        app_of(nothing), pipelines.spark, settings, on_event=pipelines.events.append, clock=clock
    )
    (watching,) = watched._supervised
    watching.batch = pipeline.Batch(7, clock.monotonic_ms())
    for _ in range(1_000):
        watching.watch()
        clock.now_ms += 1_000
    assert [event["seconds"] for event in pipelines.events] == [10, 20, 40, 80, 160, 320, 620, 920]
    assert {(event["event"], event["handler"], event["batch"]) for event in pipelines.events} == {
        ("running", "handle", 7)
    }


def test_operators_see_how_many_messages_the_last_batch_of_a_handler_had(pipelines: Pipelines) -> None:
    pipelines.add("in", *({"n": n} for n in range(30)))
    with pipelines.running(app_of(nothing)):
        batch = eventually(lambda: one if (one := pipelines.reported("handle")).rows else None, "its batch")
    assert batch is not None
    assert (batch.batch, batch.rows) == (0, 30)
    assert batch.rows_per_s == pytest.approx(30_000 / (batch.took_ms or 0))


def test_operators_do_not_see_a_run_that_has_stopped(pipelines: Pipelines) -> None:
    pipelines.add("in", {"n": 1})
    with pipelines.running(app_of(nothing)):
        eventually(lambda: find_runs(pipelines.client, [("app", "handle")]), "the run to be shown")
        eventually(lambda: pipelines.reported("handle").rows, "its batch")
    assert find_runs(pipelines.client, [("app", "handle")]) == set()
    assert pipelines.reported("handle").rows is None


def test_a_run_whose_query_does_not_stop_is_shown_until_its_key_expires(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdrawn: list[object] = []
    monkeypatch.setattr(runner.Supervisor, "_stop_queries", lambda self: False)
    monkeypatch.setattr(runner, "withdraw_run", lambda *args, **more: withdrawn.append(args))
    with pipelines.running(app_of(nothing)):
        eventually(lambda: find_runs(pipelines.client, [("app", "handle")]), "the run to be shown")
    for query in pipelines.spark.streams.active:
        query.stop()
    assert withdrawn == []


def test_other_users_cannot_read_a_checkpoint_that_a_run_creates(pipelines: Pipelines) -> None:
    pipelines.add("in", {"n": 1})
    pipelines.once(app_of(nothing))
    folder = pipelines.folder / "checkpoint"
    assert [one.stat().st_mode & 0o777 for one in (folder, folder / "app", folder / "app" / "handle")] == [0o700] * 3
    assert (folder / "app" / "handle" / "offsets").is_dir()


def test_a_long_batch_is_reported_while_it_runs(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_FIRST_REPORT_MS", 100.0)
    ended = pipelines.folder / "ended"

    def slow(message: Message) -> None:
        while not ended.exists():
            time.sleep(0.02)

    pipelines.add("in", {"n": 1})
    with pipelines.running(app_of(slow)):
        eventually(lambda: len(pipelines.events_named("running")) >= 2, "words about it")
        ended.touch()
        eventually(lambda: pipelines.events_named("batch"), "its end")
    assert {(word["handler"], word["batch"]) for word in pipelines.events_named("running")} == {("handle", 0)}


def test_the_error_of_a_damaged_checkpoint_names_the_remedy(pipelines: Pipelines) -> None:
    pipelines.add("in", {"n": 1})
    pipelines.once(app_of(nothing))
    offsets = pipelines.folder / "checkpoint" / "app" / "handle" / "offsets"
    (offsets / ".0.crc").unlink()
    (offsets / "0").write_text("")
    with pytest.raises(
        PipelineFailed, match=r"cannot resume from its checkpoint.*Incomplete log.*--from-committed"
    ) as end:
        pipelines.once(app_of(nothing))
    assert "\n" not in str(end.value)
    pipelines.add("in", {"n": 2})
    pipelines.once(app_of(nothing), checkpoint="new", start="from-committed")
    assert pipelines.meta("app", "handle", "in")["committed"] == "2"


def test_a_machine_that_is_too_busy_to_start_python_does_not_count_as_a_damaged_checkpoint(
    pipelines: Pipelines,
) -> None:
    settings = runner.RunSettings(url=pipelines.url, checkpoint=str(pipelines.folder / "checkpoint"))
    supervisor = runner.Supervisor(app_of(nothing), pipelines.spark, settings, on_event=pipelines.events.append)
    (resuming,) = supervisor._supervised
    resuming.resumed, resuming.failures = True, 3
    late = failure_of(
        RuntimeError("job failed\norg.apache.spark.SparkException: Python worker failed to connect back.")
    )
    assert late.reason.endswith("connect back within Spark's 10 seconds: is this machine overloaded?")
    supervisor._check_failures(resuming, late)
    with pytest.raises(PipelineFailed, match="cannot resume from its checkpoint: OSError: Incomplete log"):
        supervisor._check_failures(resuming, Failure(kind=None, reason="OSError: Incomplete log", in_checkpoint=True))
    resuming.failures = 11
    with pytest.raises(PipelineFailed, match="11 times in a row"):
        supervisor._check_failures(resuming, late)


def test_a_busy_machine_does_not_count_as_a_failure_of_a_query_that_runs_once(pipelines: Pipelines) -> None:
    settings = runner.RunSettings(url=pipelines.url, checkpoint=str(pipelines.folder / "checkpoint"), once=True)
    supervisor = runner.Supervisor(app_of(nothing), pipelines.spark, settings, on_event=pipelines.events.append)
    (running,) = supervisor._supervised
    running.failures = 6
    supervisor._check_failures(running, failure_of(RuntimeError("Python worker failed to connect back.")))
    with pytest.raises(PipelineFailed, match="6 times in a row"):
        supervisor._check_failures(running, failure_of(OSError("disk full")))


def test_a_query_that_died_while_it_wrote_its_first_batch_continues_from_its_checkpoint(pipelines: Pipelines) -> None:
    app = app_of(nothing)
    app.stage(Rows("in", "n int"), into="out", name="copy")(lambda rows: rows)
    for name in ("handle", "copy"):
        offsets = pipelines.folder / "checkpoint" / "app" / name / "offsets"
        offsets.mkdir(parents=True)
        (offsets / ".0.9ed0a7a5-2bf7-4a3c-9b38-02a9ef8ab9f7.tmp").write_text("v1\n")
    pipelines.add("in", {"n": 1})
    pipelines.once(app)
    pipelines.add("in", {"n": 2})
    pipelines.once(app)
    assert pipelines.meta("app", "handle", "in")["committed"] == "2"
    assert [fields["n"] for _, fields in pipelines.entries("out")] == ["1", "2"]
    assert "restarting" not in {event["event"] for event in pipelines.events}


@pytest.mark.parametrize("place", ["file", "/proc/nowhere", "nosuch://host/folder"])
def test_an_unusable_checkpoint_folder_is_refused(pipelines: Pipelines, place: str) -> None:
    (pipelines.folder / "file").write_text("")
    pipelines.add("in", {"n": 1})
    checkpoint = place if "://" in place else str(pipelines.folder / place)
    settings = runner.RunSettings(url=pipelines.url, checkpoint=checkpoint, once=True)
    with pytest.raises(ConfigError, match=r"the checkpoint folder .* give another --checkpoint") as refused:
        runner.Supervisor(app_of(nothing), pipelines.spark, settings, on_event=pipelines.events.append).run()
    assert "\n" not in str(refused.value)
    assert not pipelines.events


def test_a_query_that_fails_each_time_is_given_up_with_its_error(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MAX_FAILURES_ONCE", 1)
    lock = threading.Lock()  # cannot be sent to a worker

    def unsendable(message: Message) -> None:
        with lock:
            pass

    pipelines.add("in", {"n": 1})
    with pytest.raises(PipelineFailed, match=r"failed 2 times in a row.*cannot pickle '_thread\.lock'"):
        pipelines.once(app_of(unsendable))


def test_a_deferred_key_that_cannot_be_run_ends_the_run(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", key="k", name="handle", retry=Retry(attempts=2, delay_ms=3_000, jitter=0))
    def handle(message: Message) -> None:
        raise RuntimeError("not yet")

    pipelines.add("in", {"k": "a"})
    with pipelines.running(app, fails=True) as background:
        eventually(lambda: pipelines.events_named("batch"), "the batch that sets it aside")
        CommitStore(pipelines.client, app="app", handler="handle", token=9_000_000_000_000_000, keyed=True).begin_run(
            ["in"]
        )
        eventually(lambda: not background.is_alive(), "the end of the older run, though nothing new comes")
    assert isinstance(background.error, PipelineFailed)
    assert "a newer run of app.handle has taken over" in str(background.error)


def test_handlers_stop_together(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them, whole, stopped = threading.Barrier(2), runner._stop, list[StreamingQuery]()

    def stop(query: StreamingQuery, on_stopped: Callable[[StreamingQuery], None]) -> None:
        all_of_them.wait(FAIL_SAFE_S)  # which no query passes before the others are being stopped
        whole(query, on_stopped)
        stopped.append(query)

    monkeypatch.setattr(runner, "_stop", stop)
    monkeypatch.setattr(runner, "_STOP_MS", 1_000 * FAIL_SAFE_S)
    app = App("app")
    for name in ("one", "two"):

        def slow(message: Message) -> None:
            time.sleep(60)

        app.handler("in", name=name)(slow)
    pipelines.add("in", {"n": 1})
    with pipelines.running(app) as background:
        eventually(lambda: all(p.batch for p in background.supervisor._supervised), "two batches at work")
    assert background.error is None
    assert len(stopped) == 2


def test_delayed_messages_are_moved_during_a_run(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", into="out", name="handle")
    def handle(message: Message) -> dict[str, str | None]:
        return {"n": message.text("n")}

    with Producer(pipelines.url) as producer, pipelines.running(app):
        seconds, micros = map(int, pipelines.client.execute("TIME"))
        producer.publish("in", {"n": 7}, delay_ms=500)
        eventually(lambda: [fields for _, fields in pipelines.entries("out")] == [{"n": "7"}], "its output")
        (code,) = eventually(lambda: read_code(pipelines.client, [("app", "handle")])["app", "handle"], "its code")
        assert (code.engine, code.settings["streams"], code.settings["into"]) == ("spark", "in", "out")
    ((entry_id, _),) = pipelines.entries("in")
    assert EntryId.parse(entry_id).ms >= seconds * 1_000 + micros // 1_000 + 500, "not before it was due"
