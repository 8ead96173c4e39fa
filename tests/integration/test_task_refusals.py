"""A task whose twin was faster: each of its commits is refused, thousands of them at little cost."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from millstream import App
from millstream.redis_client.client import Client
from millstream.spark.engine.commit_buffer import COMMIT_MESSAGES
from millstream.spark.engine.key_run import KeyRun
from tests.support.task_fixtures import Item, TaskFixture, only

pytestmark = [pytest.mark.spark]

FEW, MANY = 300, 2 * COMMIT_MESSAGES + 200


@pytest.mark.parametrize("keys", [FEW, MANY], ids=["in one commit", "in commits beside which other keys run"])
def test_refused_runs_are_found_without_comparing_each_with_all_others(
    client: Client, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    compared: list[object] = []
    task, twin = TaskFixture(client), TaskFixture(client)
    rows = task.rows(*((n, b"k%d" % n, {"n": n}) for n in range(1, keys + 1)))
    app = App("app")

    def compare(run: KeyRun, other: object) -> bool:
        compared.append(other)
        return run is other

    def handle(item: Item) -> dict[str, int]:
        if not task.seen:
            with ThreadPoolExecutor(1) as pool:  # an event loop of its own
                pool.submit(twin.process, twin.handler(), rows).result()
        task.seen.append((None, item.n, 1))
        return {"n": item.n}

    monkeypatch.setattr(KeyRun, "__eq__", compare)
    report = task.process(only(app, handle, key="k", into="out"), rows)
    assert (report["refused"], report["committed"]) == (keys, 0)
    assert sorted(task.outputs()) == list(range(1, keys + 1))
    assert len(compared) <= keys
