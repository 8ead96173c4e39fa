"""Fixtures for the engine's task: handlers, rows, and a runner for tasks and deferred jobs."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from millstream import App, Message, Retry, State
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import RunnableKeys, runnable_keys
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.engine.entry_points import task_of
from millstream.spark.engine.task import Job, PartitionTask
from millstream.spark.key_blocks import group_by_key, make_blocks

QUEUE_SCHEMA = pa.schema([("stream", pa.string()), ("queue", pa.binary())])
Row = tuple[int, bytes | None, dict[Any, Any]]


_ENDLESS_S = 1e6


@dataclass
class Item:
    n: int
    fail: int = 0
    k: str | None = None


def hanging_on(number: int, kind: str) -> Callable[..., Any]:
    """The function of a handler of lists that hangs on a list with `number`. `kind`: plain or async."""

    def handle(items: list[Item]) -> list[dict[str, int]]:
        if any(item.n == number for item in items):
            time.sleep(_ENDLESS_S)
        return [{"n": item.n} for item in items]

    async def handle_async(items: list[Item]) -> list[dict[str, int]]:
        if any(item.n == number for item in items):
            await asyncio.sleep(_ENDLESS_S)
        return [{"n": item.n} for item in items]

    return handle if kind == "plain" else handle_async


class TaskFixture:
    """Runs rows through tasks of the engine against one Redis."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.seen: list[tuple[bytes | None, int, int]] = []
        self.token = 1

    def rows(self, *rows: Row, stream: str = "in") -> pa.RecordBatch:
        """One block with these messages, by key; those without a key come first."""
        ordered = sorted(rows, key=lambda row: (row[1] is not None, row[1] or b"", row[0]))
        packed = [
            msgspec.msgpack.encode([part for k, v in fields.items() for part in (_bytes(k), _bytes(v))])
            for _, _, fields in ordered
        ]
        by_key = group_by_key([key for _, key, _ in ordered], [b"%d-0" % ms for ms, _, _ in ordered], packed)
        return make_blocks([(stream, by_key, bytes(16))] if rows else [], buckets=1)

    def add(self, *numbers: int, keys: str, fail: int = 0) -> list[Row]:
        """Add entries with these numbers to the stream, and return their rows: one for each letter of `keys`; those of A fail `fail` times."""
        rows: list[Row] = []
        for n, key in zip(numbers, keys, strict=True):
            fields: dict[Any, Any] = {"n": n, "k": key, "fail": fail if key == "A" else 0}
            self.client.execute("XADD", "in", f"{n}-0", *[part for item in fields.items() for part in item])
            rows.append((n, key.encode(), fields))
        return rows

    def task(self, handler: Handler, *, retried: bool = False) -> PartitionTask:
        job = Job(handler=handler, url=self.client.url, token=self.token)
        return task_of(job, self.client, retried=retried)

    def process(self, handler: Handler, *batches: pa.RecordBatch, retried: bool = False) -> dict[str, Any]:
        task = self.task(handler, retried=retried)
        asyncio.run(task.process(batches))
        rows = task.report().to_pylist()
        return rows[0] if rows else {}

    def runnable(self, handler: Handler) -> RunnableKeys:
        """The runnable deferred keys."""
        commit_store = CommitStore(self.client, app=handler.app, handler=handler.name, token=self.token)
        return runnable_keys(commit_store, ["in"], 100)["in"]

    def process_deferred(self, handler: Handler) -> dict[str, Any]:
        """Run the runnable deferred keys."""
        rows = [{"stream": "in", "queue": queue} for queue in self.runnable(handler).queues]
        task = self.task(handler)
        asyncio.run(task.process_deferred([pa.RecordBatch.from_pylist(rows, schema=QUEUE_SCHEMA)] if rows else []))
        found = task.report().to_pylist()
        return found[0] if found else {}

    def outputs(self, stream: str = "out") -> list[int]:
        return [int(fields[1]) for _, fields in self.client.execute("XRANGE", stream, "-", "+")]

    def dead(self, name: str = "handle") -> list[DeadLetter]:
        entries = self.client.execute("XRANGE", HandlerKeys("app", name, "in").dead_letters, "-", "+")
        return [DeadLetter.parse(*entry) for entry in entries]

    def handler(self, **options: Any) -> Handler:
        """A keyed handler with state that records its messages and fails on the first `fail` attempts."""
        app = App("app")

        def handle(item: Item, message: Message, state: State) -> dict[str, int]:
            self.seen.append((message.key, item.n, message.attempt))
            state["sum"] = state.get("sum", 0) + item.n
            if message.attempt <= item.fail:
                raise RuntimeError(f"attempt {message.attempt} fails")
            return {"n": item.n}

        defaults: dict[str, Any] = {"key": "k", "into": "out", "retry": Retry(attempts=3, delay_ms=1)}
        app.handler("in", **{**defaults, **options})(handle)
        return next(iter(app.handlers.values()))


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def only(app: App, function: Callable[..., Any], **options: Any) -> Handler:
    app.handler("in", **options)(function)
    return next(iter(app.handlers.values()))
