"""The life of one message: decode, run, then commit, retry or dead-letter.

Nothing here does I/O or waits: `attempt` says what became of one run of the handler, and the engine acts on it.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millstream.deadletters import DeadLetter, Reason
from millstream.decoding import encode_output
from millstream.errors import DecodeError, MissingKey, OutputError, Reject, text_of
from millstream.handlers import Handler
from millstream.model import Message, State

MAX_ITEMS = 7_000
"""Names and values in one entry: more cannot be passed on inside a script (Lua's `unpack`)."""

_encode_state = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(slots=True)
class Done:
    """The handler succeeded: commit these outputs and this state (b"" = none left)."""

    outputs: "Outputs"
    state: bytes


@dataclass(slots=True)
class Dead:
    """The message cannot be processed: commit its dead letter."""

    reason: Reason
    error: str
    traceback: str = ""


@dataclass(slots=True)
class Again:
    """The handler failed and has attempts left: run it again after `delay_ms` milliseconds."""

    delay_ms: float
    error: str


Outcome = Done | Dead | Again
Outputs = Sequence[Sequence[bytes]]

Ended = tuple[Outputs, BaseException | None]
"""What a handler returned, or what it raised."""

Guard = Callable[[Callable[[], Ended], float], Ended]
"""How an engine calls a plain function: told the time limit in milliseconds, which it enforces as well as it can,
by raising TimeLimit in the function."""


class TimeLimit(BaseException):
    """A handler took longer than its time limit. Not an Exception, so that a handler's own `except` lets it pass."""


def load_state(blob: bytes) -> State:
    """Read a key's state as it stands in Redis; b"" is an empty one."""
    return State(_decode_state(blob)) if blob else State()


async def attempt(handler: Handler, message: Message, blob: bytes) -> Outcome:
    """Run an async `handler` once on `message` with the state in `blob` and say what became of it.

    Whatever the handler raises is an outcome, and what it does to its own task too; only cancelling the caller makes
    this raise.
    """
    prepared = _prepare(handler, message, blob)
    if isinstance(prepared, Dead):
        return prepared
    state, arguments = prepared
    try:
        ended = await _isolated(handler, arguments)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the engine gives up the whole task, not this message
        ended = (), error
    return _judge(handler, message, state, ended)


def attempt_plain(handler: Handler, message: Message, blob: bytes, guard: Guard) -> Outcome:
    """Run a plain `handler` once, under `guard`, and say what became of it. Never raises."""
    prepared = _prepare(handler, message, blob)
    if isinstance(prepared, Dead):
        return prepared
    state, arguments = prepared
    try:
        ended = guard(lambda: _called(handler, arguments), handler.time_limit_ms)
    except TimeLimit as error:  # it rang when the function had just returned
        ended = (), error
    return _judge(handler, message, state, ended)


def overdue(handler: Handler, message: Message) -> Outcome:
    """What becomes of an attempt that went beyond its time limit and could not be ended."""
    return _failed(handler, message, TimeLimit())


def _prepare(handler: Handler, message: Message, blob: bytes) -> tuple[State, dict[str, Any]] | Dead:
    try:
        state = load_state(blob) if handler.wants_state else State()
        return state, handler.bind(message, state)
    except DecodeError as error:
        return Dead("undecodable", str(error))
    except ValueError as error:  # msgspec's own errors and invalid UTF-8
        return Dead("undecodable", f"the key's state in Redis is damaged ({error}); see: millstream state show")


def _judge(handler: Handler, message: Message, state: State, ended: Ended) -> Outcome:
    outputs, raised = ended
    if isinstance(raised, Reject):
        return Dead("rejected", text_of(raised))
    if isinstance(raised, OutputError):
        return Dead("bad-output", str(raised))
    if raised is not None:
        return _failed(handler, message, raised)
    if not handler.wants_state:
        return Done(outputs, b"")
    try:
        if not all(type(name) is str for name in state):
            raise TypeError("a name in it is not text")
        return Done(outputs, _encode_state(state) if state else b"")
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        return Dead("bad-output", f"the state cannot be kept: {error}; use text, bytes, numbers, lists and mappings")


def _called(handler: Handler, arguments: dict[str, Any]) -> Ended:
    # Errors are carried, not raised, to here: a StopIteration, for one, cannot pass through a coroutine.
    try:
        return encode_results(handler, handler.function(**arguments)), None
    except BaseException as error:  # noqa: BLE001 - it is judged as an outcome
        return (), error


async def _isolated(handler: Handler, arguments: dict[str, Any]) -> Ended:
    """Await the handler's coroutine in a task of its own, so that cancelling "the current task" ends only itself."""
    task = asyncio.create_task(_awaited(handler, arguments))
    try:
        async with asyncio.timeout(handler.time_limit_ms / 1000):
            return await task
    except TimeoutError:
        return (), TimeLimit()


async def _awaited(handler: Handler, arguments: dict[str, Any]) -> Ended:
    # Caught in here: asyncio lets SystemExit and KeyboardInterrupt of any task end the whole loop, and all the work in it.
    try:
        return encode_results(handler, await handler.function(**arguments)), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - it is judged as an outcome
        return (), error


def encode_results(handler: Handler, result: object) -> Outputs:
    """Turn what a handler returned into entries for its `into` stream. Raises OutputError."""
    if result is None:
        return ()
    if handler.into is None:
        raise OutputError(f'{handler.label} returned a {type(result).__name__} but has no into="stream" to put it')
    if isinstance(result, (list, tuple, Iterator)):
        entries = [encode_output(entry) for entry in result]
    else:
        entries = [encode_output(result)]
    for entry in entries:
        if len(entry) > MAX_ITEMS:
            raise OutputError(f"an output has {len(entry) // 2} fields; at most {MAX_ITEMS // 2} fit in one entry")
    return entries


def letter(handler: Handler, message: Message, dead: Dead) -> DeadLetter:
    """The dead letter of `message`."""
    return DeadLetter(
        stream=message.stream,
        id=message.id,
        pairs=message.pairs,
        key=message.key,
        app=handler.app,
        handler=handler.name,
        attempts=message.attempt,
        reason=dead.reason,
        error=dead.error,
        traceback=dead.traceback,
        time_ms=time.time_ns() // 1_000_000,
    )


def refuse_unkeyed(handler: Handler, message: Message) -> Dead | None:
    """What becomes of a message of a keyed handler that has no key, before the handler sees it."""
    if handler.key is None or message.key is not None or handler.missing_key == "unordered":
        return None
    error: MissingKey = handler.missing()
    return Dead("missing-key", str(error))


def _failed(handler: Handler, message: Message, error: BaseException) -> Outcome:
    if isinstance(error, TimeLimit):
        text = f"it took longer than its time limit of {handler.time_limit_ms:,.0f} ms"
    else:
        text = f"{type(error).__name__}: {text_of(error)}"
    if message.attempt < handler.retry.attempts:
        return Again(handler.retry.delay_after(message.attempt), text)
    # What lies above the user's own frames is ours and helps nobody.
    frames = frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals is globals():
            frames = frame.tb_next
        frame = frame.tb_next
    return Dead("failed", text, "".join(traceback.format_exception(type(error), error, frames)))
