"""Batches: runs calls that wait at the same time as one batch, with one round trip to Redis instead of one each."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST_AT_ONCE = 500


class _Call(NamedTuple, Generic[T, R]):
    item: T
    answer: asyncio.Future[R]
    loop: asyncio.AbstractEventLoop


class CallBatcher(Generic[T, R]):
    """Runs `work` on its own thread, on all items queued by then, with one answer per item.

    An exception of `work` is raised in all calls of the batch. A context manager; its exit joins the thread.
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R]], *, name: str) -> None:
        self._process = work
        self._queue: SimpleQueue[_Call[T, R] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> "CallBatcher[T, R]":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()

    async def call(self, item: T) -> R:
        """Process `item` in the next batch; return its answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._queue.put(_Call(item, answer, loop))
        return await answer

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            calls = [first]
            is_closed = False
            with suppress(Empty):
                while len(calls) < _MOST_AT_ONCE and not is_closed:
                    more = self._queue.get_nowait()
                    if more is None:
                        is_closed = True
                    else:
                        calls.append(more)
            self._process_batch(calls)
            if is_closed:
                return

    def _process_batch(self, calls: Sequence[_Call[T, R]]) -> None:
        answers: Sequence[R] = ()
        failure: BaseException | None = None
        try:
            answers = self._process([call.item for call in calls])
        except BaseException as error:  # noqa: BLE001 - it is raised in the waiting calls
            failure = error

        def resolve() -> None:
            for number, call in enumerate(calls):
                if call.answer.done():  # its caller was cancelled
                    continue
                if failure is None:
                    call.answer.set_result(answers[number])
                else:
                    call.answer.set_exception(failure)

        with suppress(RuntimeError):  # the event loop is closed: no caller waits any more
            calls[0].loop.call_soon_threadsafe(resolve)
