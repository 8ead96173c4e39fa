"""AttemptRunner: runs attempts of a task's handler under their time limit, and stops the clock while none runs."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from millstream.handlers.attempt import (
    BatchOutcome,
    ListOutcome,
    Outcome,
    attempt,
    attempt_batch,
    attempt_batch_plain,
    attempt_list,
    attempt_list_plain,
    attempt_plain,
)
from millstream.handlers.handler import Handler
from millstream.model import Message
from millstream.redis_client.client import Client
from millstream.spark.engine.loop_heartbeat import LoopHeartbeat
from millstream.spark.engine.time_limit import AttemptTimeLimit

_MAX_SLEEP_S = 1.0

T = TypeVar("T")


class CallRedis(Protocol):
    """How a task calls Redis: until it answers."""

    def __call__(self, operation: Callable[[], T], /) -> T:
        """Return what `operation` returns, which may be repeated. Raises RedisError except Unavailable."""


class AttemptRunner:
    """Runs a plain handler in the thread of the event loop, and an async one in up to `concurrency` tasks of the loop.

    The watchdog timer kills a process that overruns: for a plain handler it times each attempt, for an async one the
    loop. So every other step that may take long has to go through `call` or `sleep`.
    """

    def __init__(self, handler: Handler, client: Client) -> None:
        self._handler = handler
        self._client = client
        self._time_limit = AttemptTimeLimit()
        self._heartbeat = LoopHeartbeat(handler.time_limit_ms if handler.is_async else None)
        self._slots = asyncio.Semaphore(handler.concurrency)

    async def run(
        self,
        message: Message,
        state: bytes,
        permitted: Callable[[], AbstractContextManager[Outcome | None]] = nullcontext,
    ) -> Outcome:
        """Run one attempt on a message and return its outcome.

        `permitted`: entered right before the attempt, and left after it; its value is the outcome of a message that must
        not run now, None if it may.
        """
        if not self._handler.is_async:
            with permitted() as refusal, self._time_limit.outside_loop() as limit:
                return refusal or attempt_plain(self._handler, message, state, limit.guard)
        async with self._slots:
            with permitted() as refusal:
                if refusal is not None:
                    return refusal
                return await self._in_task(attempt(self._handler, message, state))

    def consecutive(self) -> AbstractContextManager[AttemptTimeLimit]:
        """Return what `attempt_consecutive` needs to run a plain handler on one message after another, while nothing waits in between.

        The event loop is left once for all of them, and not for each.
        """
        return self._time_limit.outside_loop()

    async def run_batch(self, messages: Sequence[Message]) -> BatchOutcome:
        """Run one attempt on several messages together and return their outcomes."""
        if not self._handler.is_async:
            with self._time_limit.outside_loop() as limit:
                return attempt_batch_plain(self._handler, messages, limit.guard)
        return await self._run_in_task(attempt_batch(self._handler, messages))

    async def run_list(self, messages: Sequence[Message], state: bytes) -> ListOutcome:
        """Run one attempt on several messages of one key together; return of how many the outcome is, and this outcome."""
        if not self._handler.is_async:
            with self._time_limit.outside_loop() as limit:
                return attempt_list_plain(self._handler, messages, state, limit.guard)
        return await self._run_in_task(attempt_list(self._handler, messages, state))

    async def _run_in_task(self, run: Coroutine[Any, Any, T]) -> T:
        async with self._slots:
            return await self._in_task(run)

    async def _in_task(self, run: Coroutine[Any, Any, T]) -> T:
        outcome = await asyncio.create_task(run)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # a sibling failed: the whole Spark task fails, not this message
        return outcome

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Watch the loop of an async handler within the block."""
        return self._heartbeat.watched()

    def call(self, operation: Callable[[], T], /) -> T:
        """Call Redis until it answers. The watchdog timer pauses meanwhile: the call blocks the loop, not a handler."""
        self.disarm()
        with self._heartbeat.paused():
            return self.call_behind(operation)

    def call_behind(self, operation: Callable[[], T], /) -> T:
        """Call Redis until it answers, in a thread beside the one that runs attempts."""
        return self._client.retry_while_unavailable(operation, what=self._handler.label)

    async def sleep(self, duration_ms: float) -> None:
        """Sleep, disarming the time limit that other attempts leave armed when they end meanwhile."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + duration_ms / 1000
        while (left_s := until_s - loop.time()) > 0:
            self.disarm()
            await asyncio.sleep(min(left_s, _MAX_SLEEP_S))

    def disarm(self) -> None:
        """Stop the watch of a plain handler's attempts: none runs now."""
        if not self._handler.is_async:  # the heartbeat of an async handler's loop goes on
            self._time_limit.disarm()
