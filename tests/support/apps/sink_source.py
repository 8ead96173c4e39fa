"""The data source, in processes that end themselves, or their driver, at exactly the points that a test arms.

A point is armed by a file of its name in the folder MILLSTREAM_TEST_ARM, which says what is to die: the `process` that
reaches the point or the whole `driver`, Java and all. Spark imports this module wherever the source is at work.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from millstream.spark.sink import publication, staging
from millstream.spark.sink.publication import Publication
from millstream.spark.sink.staging import Stage
from millstream.spark.source.group_batches import Batches, NotAcknowledged
from millstream.spark.source.provider import RedisStreamsSource

ARM = Path(os.environ["MILLSTREAM_TEST_ARM"])
DRIVER = ARM / "driver.pid"
"""Has the process id of the driver."""

IN_TASKS = ("before-staging", "half-staged", "staged")
ON_THE_DRIVER = ("before-commit", "asked", "closed", "decided", "half-published", "published")


class DeadlySource(RedisStreamsSource):
    """The source and sink under another name."""

    @classmethod
    def name(cls) -> str:
        return "deadly-streams"


def reach(point: str) -> None:
    """End what is to be ended if `point` is armed."""
    armed = ARM / point
    if not armed.exists():
        return
    whole = armed.read_text() == "driver"
    try:
        armed.rename(ARM / f"hit.{point}.{time.time_ns()}")
    except FileNotFoundError:
        return  # another process was faster
    if whole:
        driver = psutil.Process(int(DRIVER.read_text()))
        (java,) = (process for process in driver.children() if "java" in process.name())
        driver.kill()
        java.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _around(owner: Any, name: str, before: str | None, after: str | None) -> None:
    step: Callable[..., Any] = getattr(owner, name)

    def stepped(*args: Any, **options: Any) -> Any:
        if before:
            reach(before)
        result = step(*args, **options)
        if after:
            reach(after)
        return result

    setattr(owner, name, stepped)


def _after_scripts() -> None:
    step = Publication._call_record

    def stepped(self: Publication, script: Any, args: Any) -> Any:
        result = step(self, script, args)
        reach({publication.READ_DECISION: "asked", publication.DECIDE: "decided"}.get(script, "nowhere"))
        return result

    Publication._call_record = stepped  # type: ignore[method-assign]


def _after_draining() -> None:
    step = Publication._translate_errors

    def stepped(self: Publication, operation: Any) -> Any:
        result = step(self, operation)
        ((script, *_), *_) = operation.args[0]  # those that close the parts come here as well
        if script == publication.DRAIN:
            reach("half-published")
        return result

    Publication._translate_errors = stepped  # type: ignore[method-assign]


def _around_acknowledging() -> None:
    step = Batches.acknowledge

    def stepped(self: Batches, token: str, batch: int, streams: Iterable[str]) -> dict[str, NotAcknowledged]:
        if streams:
            reach("before-ack")
        result = step(self, token, batch, streams)
        if streams:
            reach("acknowledged")
        return result

    Batches.acknowledge = stepped  # type: ignore[method-assign]


publication._CALLS_PER_TRIP = 1
staging._CHUNK_ROWS = 200
_around(Stage, Stage.add.__name__, "before-staging", "half-staged")
_around(Stage, Stage.finish.__name__, None, "staged")
_around(Publication, Publication.publish.__name__, "before-commit", "published")
_around(Publication, Publication._close_parts.__name__, None, "closed")
_after_scripts()
_after_draining()
_around(Batches, Batches.fetch.__name__, None, "drawn")
_around(Batches, Batches.add.__name__, None, "noted")
_around_acknowledging()
