"""The breaker of a handler in a run on Spark: a backlog that a broken deployment cannot process stays in the stream."""

import pytest

from millstream import App, Message, Retry
from millstream.delivery.commit_store import CommitStore
from millstream.errors import PipelineFailed
from tests.support.commandline import call
from tests.support.pipelines import Pipelines
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]

BACKLOG = 3_000


def app_of(field: str) -> App:
    app = App("app")

    @app.handler("in", key=field, into="out", retry=Retry(attempts=1))
    def double(message: Message) -> dict[str, object]:
        return {"n": message.text("n")}

    return app


def test_a_misspelt_key_pauses_the_run_and_the_corrected_handler_repeats_its_batch(pipelines: Pipelines) -> None:
    pipelines.add("in", *({"customer": n % 50, "n": n} for n in range(BACKLOG)))
    store = CommitStore(pipelines.client, app="app", handler="double")
    with pipelines.running(app_of("custommer")):
        eventually(lambda: pipelines.events_named("paused"), "the pause")
    assert pipelines.dead("app", "double", "in") == []
    assert store.paused_streams(["in"])["in"].cause == "missing-key"
    (paused,) = pipelines.events_named("paused")
    assert "millstream resume app.double" in paused["reason"]
    with pytest.raises(PipelineFailed, match="paused by its breaker"):
        pipelines.once(app_of("customer"))
    assert pipelines.entries("out") == []
    with pipelines.running(app_of("customer")):
        assert call("resume", "app.double", "--url", pipelines.url).code == 0
        eventually(lambda: len(pipelines.entries("out")) >= BACKLOG, "the rest")
    assert sorted(int(fields["n"]) for _, fields in pipelines.entries("out")) == list(range(BACKLOG))
    assert pipelines.dead("app", "double", "in") == []
    assert pipelines.client.execute("XLEN", "in") == BACKLOG
