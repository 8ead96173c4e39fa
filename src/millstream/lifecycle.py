"""The life of one message: decode, run, then commit, retry or dead-letter.

Nothing here does I/O or waits: `attempt` says what became of one run of the handler, and the engine acts on it.
"""

import asyncio
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from millstream.deadletters import DeadLetter, Reason
from millstream.decoding import encode_output
from millstream.errors import DecodeError, MissingKey, OutputError, Reject
from millstream.handlers import Handler
from millstream.model import Message, State

MAX_ITEMS = 7_000
"""Names and values in one entry: more cannot be passed on inside a script (Lua's `unpack`)."""

_encode_state = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(slots=True)
class Done:
    """The handler succeeded: commit these outputs and this state (b"" = none left)."""

    outputs: Sequence[Sequence[bytes]]
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


def load_state(blob: bytes) -> State:
    """Read a key's state as it stands in Redis; b"" is an empty one."""
    return State(_decode_state(blob)) if blob else State()


async def attempt(handler: Handler, message: Message, blob: bytes) -> Outcome:
    """Run `handler` once on `message` with the state in `blob` and say what became of it. Never raises, unless cancelled."""
    try:
        state = load_state(blob) if handler.wants_state else State()
        arguments = handler.bind(message, state)
    except DecodeError as error:
        return Dead("undecodable", str(error))
    except ValueError as error:  # msgspec's own errors and invalid UTF-8
        return Dead("undecodable", f"the key's state in Redis is damaged ({error}); see: millstream state show")
    try:
        result = handler.function(**arguments)
        if handler.is_async:
            result = await result
        outputs = encode_results(handler, result)
    except Reject as error:
        return Dead("rejected", str(error))
    except OutputError as error:
        return Dead("bad-output", str(error))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the engine gives up the whole task, not this message
        return _failed(handler, message, error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        return _failed(handler, message, error)
    if not handler.wants_state:
        return Done(outputs, b"")
    try:
        if not all(type(name) is str for name in state):
            raise TypeError("a name in it is not text")
        return Done(outputs, _encode_state(state) if state else b"")
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        return Dead("bad-output", f"the state cannot be kept: {error}; use text, bytes, numbers, lists and mappings")


def encode_results(handler: Handler, result: object) -> Sequence[Sequence[bytes]]:
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
    text = f"{type(error).__name__}: {error}"
    if message.attempt < handler.retry.attempts:
        return Again(handler.retry.delay_after(message.attempt), text)
    # The first frame is ours; the user's own are what helps.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return Dead("failed", text, "".join(traceback.format_exception(type(error), error, frames)))
