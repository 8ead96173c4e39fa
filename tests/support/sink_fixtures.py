"""Run: batches of a sink without Spark, staged, published, and killed at any exchange with Redis."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from millstream.redis_client.client import Client
from millstream.spark.sink import Publication, Row, Stage, StagedTask, WriteOptions, begin, token_of

SINK = "query"
STREAMS = ("a", "b", "c")
_attempts = itertools.count(1)


class Killed(BaseException):
    """The process was killed."""


class Run:
    """One run of a query, from its start to its end: a driver and its tasks."""

    def __init__(self, client: Client, name: str, terms: WriteOptions | None = None) -> None:
        self._client = client
        self._name = name
        self.publication = Publication(client, SINK, terms or WriteOptions(), patience_ms=0)

    def task(self, batch: int, place: int, numbers: Sequence[int], streams: Sequence[str] = STREAMS) -> StagedTask:
        """One attempt at a task: its rows are `numbers`, spread over the streams."""
        epoch = begin(self._client, SINK, self._name)
        stage = Stage(self._client, SINK, token_of(epoch, batch, place, next(_attempts)), patience_ms=0)
        for stream, rows in rows_of(numbers, streams).items():
            stage.add([(stream, rows)], 100 * len(rows))
        return stage.finish(place, epoch)

    def stage(self, batch: int, numbers: Sequence[int], tasks: int = 2) -> list[StagedTask]:
        """All tasks of a batch."""
        size = -(-len(numbers) // tasks)
        return [self.task(batch, place, numbers[place * size : (place + 1) * size]) for place in range(tasks)]

    def commit(self, batch: int, shares: Sequence[StagedTask]) -> bool:
        """Publish a batch, as the driver does when all tasks have ended."""
        return self.publication.publish(shares, batch=batch, epoch=shares[0].epoch)

    def batch(self, batch: int, numbers: Sequence[int], tasks: int = 2) -> bool:
        """Stage and publish a batch."""
        return self.commit(batch, self.stage(batch, numbers, tasks))

    def decide_and_die(self, batch: int, numbers: Sequence[int], trips: int = 0) -> None:
        """Decide a batch, then kill the process after `trips` exchanges that publish some of it."""
        drain = self.publication._drain

        def drain_a_little(manifest: Any) -> None:
            with killed_at(trips + 1, arrives=False):
                drain(manifest)
            raise Killed

        self.publication._drain = drain_a_little  # type: ignore[method-assign]
        with suppress(Killed):
            self.batch(batch, numbers)


def rows_of(numbers: Sequence[int], streams: Sequence[str] = STREAMS) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for number in numbers:
        rows.setdefault(streams[number % len(streams)], []).append(("*", "n", str(number)))
    return rows


def published(client: Client, stream: str) -> list[int]:
    """The numbers in a stream, in its order."""
    return [int(items[1]) for _, items in client.execute("XRANGE", stream, "-", "+")]


def staged(client: Client) -> list[bytes]:
    """The keys of staged chunks and their counters."""
    found: list[bytes] = client.execute("KEYS", "millstream:*:sink:*:*.*.*.*")
    return found


def check(client: Client, numbers: Sequence[int], *, zombies: bool = False) -> None:
    """Check that each number was published once, each stream is in order, and no key is left.

    With `zombies`, rows staged at the moment of the sweep may be left to expire.
    """
    for place, stream in enumerate(STREAMS):
        assert published(client, stream) == [n for n in numbers if n % len(STREAMS) == place]
    left = staged(client)
    assert zombies or left == []
    assert all(client.execute("TTL", key) > 0 for key in left)
    assert client.execute("SCARD", "millstream:{sink:query}:staged") == 0
    assert client.execute("HEXISTS", "millstream:{sink:query}:record", "state") == 0


@contextmanager
def killed_at(exchange: int, *, arrives: bool) -> Iterator[Callable[[], bool]]:
    """Kill the process at its exchange number `exchange` with Redis: before the request arrives, or before the reply.

    `arrives`: the request arrives. Yields a function that returns True once the process was killed.
    """
    count = itertools.count(1)
    dead = False
    patch = pytest.MonkeyPatch()
    whole: Any = Client._exchange

    def exchange_once(self: Client, *args: Any) -> Any:
        nonlocal dead
        if dead:
            raise Killed  # a dead process does not clean up
        if next(count) != exchange:
            return whole(self, *args)
        dead = True
        if arrives:
            whole(self, *args)
        raise Killed

    patch.setattr(Client, Client._exchange.__name__, exchange_once)
    try:
        yield lambda: dead
    except Killed:
        pass
    finally:
        patch.undo()
