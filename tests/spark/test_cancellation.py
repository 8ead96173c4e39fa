"""`Retry(then="cancel")` on Spark: a key that was cancelled comes back as a whole."""

from pathlib import Path
from typing import Any

import pytest

from millstream import App, Message, Retry, State
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from tests.support.pipelines import Pipelines

pytestmark = [pytest.mark.spark, pytest.mark.keys]

EACH, FAILS = 40, 2


def letters(pipelines: Pipelines) -> list[tuple[int, str]]:
    return [(int(letter.pairs[3]), letter.reason) for letter in pipelines.dead("app", "step", "in")]


def test_a_redrive_of_the_key_brings_back_the_dead_message_first_and_then_the_canceled_ones(
    pipelines: Pipelines, tmp_path: Path
) -> None:
    mended = tmp_path / "mended"

    def step(message: Message, state: State) -> dict[str, Any]:
        n = int(message.fields["n"])
        if n == FAILS and not mended.exists():
            raise RuntimeError("not yet")
        state["count"] = state.get("count", 0) + 1
        return {"key": message.text("key"), "n": n, "count": state["count"]}

    app = App("app")
    app.handler("in", key="key", into="out", retry=Retry(attempts=1, then="cancel"))(step)
    pipelines.add("in", *({"key": "a", "n": n} for n in range(EACH)), {"key": "b", "n": 0})
    queue = DeadLetterQueue(pipelines.client)
    for _ in range(2):  # redriven, it fails again, and cancels the rest again
        pipelines.once(app)
        assert letters(pipelines) == [(FAILS, "failed"), *((n, "canceled") for n in range(FAILS + 1, EACH))]
        assert all(one.new_id for one in queue.redrive(queue.select(DeadLetterFilter(key=b"a"))))
    mended.touch()
    pipelines.once(app)
    assert letters(pipelines) == []
    found = [(int(row["n"]), int(row["count"])) for _, row in pipelines.entries("out") if row["key"] == "a"]
    assert found == [(n, n + 1) for n in range(EACH)]
