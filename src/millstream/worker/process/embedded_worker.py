"""Embedded worker: runs the handlers of an app inside an asyncio program, such as a web server, until that stops.

The threads are those of a worker process ([docs/decisions/0026-threads-in-workers.md]). No supervisor watches them, so
a worker that fails ends the program: whatever starts the program again starts the worker again.
"""

import asyncio
import logging
import os
import secrets
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Self

from millstream.app import App
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import ConfigError
from millstream.observability.health import Health
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.redis_client.key_names import check_identifier, host_name
from millstream.worker.policy import WorkerPolicy
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings, describe_leftover

logger = logging.getLogger(__name__)

_HOST_CHARACTERS = 80


class EmbeddedWorker:
    """Runs the handlers of `app` in threads of this process while the block runs.

        @asynccontextmanager
        async def lifespan(api: FastAPI) -> AsyncIterator[None]:
            async with EmbeddedWorker(app, "redis://127.0.0.1:6379/0"):
                yield

    At the end of the block all handlers stop together: messages that have not started are nacked, running ones may
    finish until `policy.stop_ms` milliseconds have passed, the same deadline for all handlers. `leftovers` are those
    that ran on; another worker processes them again. The event loop is not blocked meanwhile.

    A handler that cannot continue (HandlerStuck, StaleOwner, ConfigError, a RedisError other than Unavailable) ends
    the others in the same way, and then the program: SIGTERM to this process if a handler of that signal is installed,
    as web servers do; else the task that entered the block is cancelled. In both cases the end of the block raises
    `failure`.

    * `name`: name in the consumer groups, unique among the workers alive; None: one that no other worker has. A worker
      that starts under the name of its last life continues with the messages it held
    * `only`: names of the handlers to run; () for all
    * `start`: where a handler begins that has processed nothing yet
    * `metrics`, `health`: receive the figures and the progress of the handlers

    An async handler runs in an event loop of its own, not in that of the program. Enter it once, in the process that
    runs it, after a fork. Raises ConfigError for handlers that a worker cannot run.
    """

    def __init__(
        self,
        app: App,
        url: str,
        *,
        name: str | None = None,
        only: Sequence[str] = (),
        start: Literal["earliest", "latest"] = "earliest",
        policy: WorkerPolicy | None = None,
        metrics: Metrics = NO_METRICS,
        health: Health | None = None,
    ) -> None:
        consumer = f"{host_name(_HOST_CHARACTERS) or 'worker'}-{secrets.token_hex(4)}" if name is None else name
        settings = WorkerSettings(
            url=url,
            consumer=check_identifier("worker name", consumer),
            only=tuple(only),
            start=start,
            policy=policy or WorkerPolicy(),
        )
        self._process = WorkerProcess(app, settings, metrics=metrics, health=health)
        self._app_name = app.name
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._ended = asyncio.Event()
        self._has_cancelled = False
        self.failure: BaseException | None = None
        """The error that ended the worker; None while it works, and after an orderly stop."""
        self.leftovers: Sequence[Delivery] = ()
        """The deliveries that were still running at the deadline of an orderly stop."""

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise ConfigError("an embedded worker runs once; create a new one")
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        threading.Thread(target=self._run, args=(self._loop,), name="millstream-embedded-worker", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the handlers, and wait for their end. Raises the error that ended one before."""
        self._stopping.set()
        await self._ended.wait()
        if self._has_cancelled and self._task is not None:
            self._task.uncancel()
        if self.failure is not None:
            raise self.failure

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.leftovers = self._process.run(self._stopping)
        except BaseException as error:  # noqa: BLE001 - the end of the block raises it
            self.failure = error
        for delivery in self.leftovers:
            logger.warning("%s", describe_leftover(delivery))
        with suppress(RuntimeError):  # the loop is closed, and the program with it
            loop.call_soon_threadsafe(self._on_ended)

    def _on_ended(self) -> None:
        self._ended.set()
        if self.failure is not None and not self._stopping.is_set():
            logger.critical("the embedded worker of %s ended: %s; stopping the program", self._app_name, self.failure)
            self._stop_program()

    def _stop_program(self) -> None:
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._task is not None:
            self._has_cancelled = True
            self._task.cancel()
