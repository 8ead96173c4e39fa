"""Runs apps on the shared Spark session, and reads their results."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from millstream.app import App
from millstream.delivery.query_progress import QueryProgress, read_progress
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.run.supervisor import RunSettings, Supervisor
from tests.support.fields import text_fields
from tests.support.waiting import FAIL_SAFE_S


@dataclass
class Pipelines:
    """Runs apps against one Redis; `folder` keeps their checkpoints."""

    spark: SparkSession
    url: str
    folder: Path
    client: Client
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def supervisor(self, app: App, *, checkpoint: str = "checkpoint", **settings: Any) -> Supervisor:
        """A supervisor of `app`; its events are collected."""
        run = RunSettings(url=self.url, checkpoint=str(self.folder / checkpoint), **settings)
        return Supervisor(app, self.spark, run, on_event=self.events.append)

    def once(self, app: App, **settings: Any) -> None:
        """Process all entries that are there now."""
        self.supervisor(app, once=True, **settings).run()

    def running(self, app: App, *, fails: bool = False, **settings: Any) -> AbstractContextManager["Background"]:
        """`in_background`, of the app."""
        return in_background(self.supervisor(app, **settings), fails=fails)

    def reported(self, name: str) -> QueryProgress:
        """The progress of a query of the app `app` as operators see it."""
        return read_progress(self.client, [("app", name)]).get(("app", name), QueryProgress())

    def events_named(self, event: str) -> list[Mapping[str, Any]]:
        """The events of this name so far."""
        return [one for one in self.events if one["event"] == event]

    def add(self, stream: str, *entries: Mapping[Any, Any] | list[Any]) -> list[str]:
        """Publish entries, given as mappings or flat lists; return their ids."""
        commands = []
        for entry in entries:
            flat = entry if isinstance(entry, list) else [part for item in entry.items() for part in item]
            commands.append(("XADD", stream, "*", *flat))
        return [entry_id.decode() for entry_id in self.client.pipeline(commands)]

    def entries(self, stream: str) -> list[tuple[str, dict[str, str]]]:
        """All entries of a stream as text."""
        return [
            (entry_id.decode(), text_fields(items))
            for entry_id, items in self.client.execute("XRANGE", stream, "-", "+")
        ]

    def dead(self, app: str, handler: str, stream: str) -> list[DeadLetter]:
        """The handler's dead letters on `stream`."""
        found = self.client.execute("XRANGE", HandlerKeys(app, handler, stream).dead_letters, "-", "+")
        return [DeadLetter.parse(*entry) for entry in found]

    def state(self, app: str, handler: str, stream: str, key: str) -> Any:
        """A key's state."""
        blob = self.client.execute("HGET", HandlerKeys(app, handler, stream).state, key)
        return msgspec.msgpack.decode(blob) if blob else None

    def meta(self, app: str, handler: str, stream: str) -> dict[str, str]:
        """The committed offset, epoch and counters."""
        flat = self.client.execute("HGETALL", HandlerKeys(app, handler, stream).meta)
        return text_fields(flat)


class Background(threading.Thread):
    """A supervisor in a thread; `error` is what ended it."""

    def __init__(self, runner: Supervisor) -> None:
        super().__init__(daemon=True)
        self.supervisor = runner
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run until stopped."""
        try:
            self.supervisor.run()
        except BaseException as error:  # noqa: BLE001 - the test checks it
            self.error = error


@contextmanager
def in_background(supervisor: Supervisor, *, fails: bool = False) -> Iterator[Background]:
    """Run a supervisor until the block ends. Raises the error that ended it, unless it `fails`."""
    background = Background(supervisor)
    background.start()
    try:
        yield background
    finally:
        supervisor.stop()
        background.join(FAIL_SAFE_S)
    assert not background.is_alive(), "the supervisor did not stop"
    if background.error is not None and not fails:
        raise background.error
