"""Commits of a task: one is on its way while the task runs other keys."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from millstream import App
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import Effects
from millstream.errors import StaleOwner
from millstream.redis_client.client import Client
from millstream.spark.engine import commit_buffer
from millstream.spark.engine.commit_buffer import COMMIT_MESSAGES
from millstream.spark.engine.key_run import KeyRun
from millstream.spark.engine.run_committer import RunCommitter
from tests.support.task_fixtures import Item, TaskFixture, only
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]

PAUSE_AT, LATER = COMMIT_MESSAGES - 100, 2 * COMMIT_MESSAGES - 100
KEYS = 2 * COMMIT_MESSAGES + 200


class Commits(TaskFixture):
    """Runs one message of each of many keys."""

    def run(self, on_message: Callable[[int], None], *, is_async: bool = False) -> None:
        app = App("app")

        def handle(item: Item) -> dict[str, int]:
            on_message(item.n)
            return {"n": item.n}

        async def handle_async(item: Item) -> dict[str, int]:
            await asyncio.sleep(0)
            return handle(item)

        rows = self.rows(*((n, b"k%05d" % n, {"n": n}) for n in range(1, KEYS + 1)))
        self.process(only(app, handle_async if is_async else handle, key="k", into="out", concurrency=1), rows)


@pytest.fixture
def bench(client: Client) -> Commits:
    return Commits(client)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_other_keys_run_while_a_commit_is_on_its_way(bench: Commits, is_async: bool) -> None:
    committed: list[int] = []
    with Client(bench.client.url) as other:  # the task's waits for the reply to its commit

        def on_message(n: int) -> None:
            if n == PAUSE_AT:  # Redis answers no commit from here on
                other.execute("CLIENT", "PAUSE", round(FAIL_SAFE_S * 1_000), "WRITE")
            elif n == LATER:
                committed.append(other.execute("XLEN", "out"))
                other.execute("CLIENT", "UNPAUSE")

        try:
            bench.run(on_message, is_async=is_async)
        finally:
            other.execute("CLIENT", "UNPAUSE")
    assert committed == [0]
    assert bench.outputs() == list(range(1, KEYS + 1))


def test_a_newer_run_ends_the_task_as_soon_as_a_commit_is_refused(
    bench: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    begin, begun = RunCommitter.begin, list[RunCommitter]()

    def note(committer: RunCommitter, runs: Sequence[KeyRun]) -> Sequence[KeyRun]:
        begun.append(committer)
        return begin(committer, runs)

    monkeypatch.setattr(RunCommitter, "begin", note)

    def on_message(n: int) -> None:
        seen.append(n)
        if n == 1:
            CommitStore(bench.client, app="app", handler="handle", token=bench.token + 1).begin_run(["in"])
        elif begun:
            eventually(lambda: begun[0].has_reply, "the reply to the commit")

    with pytest.raises(ExceptionGroup) as raised:
        bench.run(on_message)
    assert raised.value.subgroup(StaleOwner) is not None
    assert bench.outputs() == []
    assert len(seen) == COMMIT_MESSAGES + 1  # the key that ran meanwhile, and no other


def test_a_record_batch_without_rows_is_none(bench: Commits) -> None:
    empty = bench.rows((1, b"k", {"n": 1})).slice(0, 0)
    assert bench.process(bench.handler(), empty) == {}


def test_a_key_with_many_bytes_is_committed_in_parts(bench: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_buffer, "COMMIT_BYTES", 1_000)
    commits: list[int] = []
    commit = CommitStore.commit

    def count(store: CommitStore, effects: dict[str, list[Effects]]) -> list[Effects]:
        commits.extend(one.message_count for one in effects["in"])
        return commit(store, effects)

    monkeypatch.setattr(CommitStore, "commit", count)

    def handle(item: Item) -> dict[str, str]:
        return {"n": str(item.n), "text": "x" * 300}

    bench.process(
        only(App("app"), handle, key="k", into="out"), bench.rows(*((n, b"a", {"n": n}) for n in range(1, 13)))
    )
    assert bench.outputs() == list(range(1, 13))
    assert commits == [4, 4, 4]
