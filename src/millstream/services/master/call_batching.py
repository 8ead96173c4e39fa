"""Calls that wait at the same time are done together: one trip to Redis for all of them instead of one for each."""

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


class Batches(Generic[T, R]):
    """Does `work` in a thread of its own, on all that waits for it by then, with an answer for each.

    What `work` raises is raised by all calls of the batch. A context manager, at whose end the thread is gone.
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R]], *, name: str) -> None:
        self._work = work
        self._waiting: SimpleQueue[_Call[T, R] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> "Batches[T, R]":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    async def call(self, item: T) -> R:
        """Have `item` done with the next batch; return its answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._waiting.put(_Call(item, answer, loop))
        return await answer

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            calls = [first]
            stops = False
            with suppress(Empty):
                while len(calls) < _MOST_AT_ONCE and not stops:
                    more = self._waiting.get_nowait()
                    if more is None:
                        stops = True
                    else:
                        calls.append(more)
            self._do(calls)
            if stops:
                return

    def _do(self, calls: Sequence[_Call[T, R]]) -> None:
        answers: Sequence[R] = ()
        problem: BaseException | None = None
        try:
            answers = self._work([call.item for call in calls])
        except BaseException as error:  # noqa: BLE001 - it is raised where the calls wait
            problem = error

        def tell() -> None:
            for number, call in enumerate(calls):
                if call.answer.done():  # who waited for it has gone
                    continue
                if problem is None:
                    call.answer.set_result(answers[number])
                else:
                    call.answer.set_exception(problem)

        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            calls[0].loop.call_soon_threadsafe(tell)
