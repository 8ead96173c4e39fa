"""Live traceback: where a handler is in a run that has not ended, as `py-spy dump` would show it."""

import asyncio
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import FrameType, TracebackType
from typing import Any

from millstream.handlers import attempt
from millstream.model import Message

_ATTEMPT_CODES = {
    function.__code__
    for function in (
        attempt.attempt,
        attempt.attempt_plain,
        attempt.attempt_batch,
        attempt.attempt_batch_plain,
        attempt.attempt_list,
        attempt.attempt_list_plain,
    )
}


def live_traceback(stream: str, entry_id: str, tasks: Iterable[asyncio.Task[Any]] = ()) -> TracebackType | None:
    """Return where the handler is now in its run on this message, in any thread of the process or in one of `tasks`.

    None if it runs in none of them. The innermost frame comes last, as in the traceback of an exception. Any thread
    may call it; the run goes on meanwhile.
    """
    for frames in chain(_stacks_of_threads(), map(_stack_of_task, tasks)):
        for position, frame in enumerate(frames):
            if frame.f_code in _ATTEMPT_CODES and _is_attempt_on(frame, stream, entry_id):
                return _traceback(frames[position:])
    return None


def describe_traceback(where: TracebackType | None) -> str:
    """Return what `live_traceback` found as text for a log; "" for None."""
    if where is None:
        return ""
    return "".join(["It is here (most recent call last):\n", *traceback.format_tb(attempt.user_frames(where))])


def _stacks_of_threads() -> Iterator[Sequence[FrameType]]:
    for innermost in sys._current_frames().values():
        yield [frame for frame, _ in traceback.walk_stack(innermost)][::-1]


def _stack_of_task(task: asyncio.Task[Any]) -> Sequence[FrameType]:
    """The frames of a task that waits: its coroutine, the one that it awaits, and so on."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)) is not None:
        frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return frames


def _is_attempt_on(frame: FrameType, stream: str, entry_id: str) -> bool:
    found = frame.f_locals
    messages: Sequence[Message] = found["messages"] if "messages" in found else [found["message"]]
    return any((one.stream, one.id) == (stream, entry_id) for one in messages)


def _traceback(frames: Sequence[FrameType]) -> TracebackType | None:
    built: TracebackType | None = None
    for frame in reversed(frames):
        built = TracebackType(built, frame, frame.f_lasti, frame.f_lineno or frame.f_code.co_firstlineno)
    return built
