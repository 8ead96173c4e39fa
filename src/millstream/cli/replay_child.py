"""One process that runs a handler for `millstream replay`, one attempt at a time. It has no connection to Redis.

A handler may hang or end its process, and two versions of an app may have modules of the same names: each version runs in
a process of its own. Calls come from standard input, replies go to a pipe of their own: standard output belongs to the
handlers. The process ends with its standard input.
"""

import asyncio
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, TypeVar

import msgspec

from millstream.app import load_app
from millstream.cli.held_gc import release_gc
from millstream.cli.log_output import LogSettings, finish_logging, start_logging
from millstream.errors import ConfigError, DecodeError, MillstreamError
from millstream.handlers.attempt import (
    DeadLettered,
    Done,
    Outcome,
    Parked,
    attempt,
    attempt_list,
    attempt_list_plain,
    attempt_plain,
    check_key,
    outcome_after_last_attempt,
    timed_out,
)
from millstream.handlers.dead_letter import Reason
from millstream.handlers.encoding import unpack_output
from millstream.handlers.handler import Handler
from millstream.handlers.key_timers import TimerChange, name_of_timer
from millstream.model import Message
from millstream.redis_client.key_names import own_pairs
from millstream.worker.running.losses import crashes_allowed

_HEADER_BYTES = 4

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """What one process runs: `handler` of the app `target`, for messages of `key`; `reply_to` is a file descriptor."""

    target: str
    handler: str
    key: bytes
    reply_to: int
    log: LogSettings


@dataclass(frozen=True, kw_only=True)
class HandlerFacts:
    """What the process says of its handler; or the `error` for which it has none."""

    error: str = ""
    wants_state: bool = False
    is_async: bool = False
    time_limit_ms: float = 0
    attempts: int = 0
    crashes_allowed: int = 0


@dataclass(frozen=True, kw_only=True)
class AttemptCall:
    """One attempt on a message, with the state of its key.

    `ended`: nothing is run, as the attempt before ended the process: by its time limit, or for the text in `cause`
    """

    stream: str
    id: str
    pairs: Sequence[bytes]
    state: bytes
    attempt: int = 1
    ended: Literal["", "time limit", "crash"] = ""
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class TimerReply:
    """A timer that an attempt has set, with the names and values of its message in turn; cancelled if `delay_ms` is None."""

    name: str
    delay_ms: int | None = None
    pairs: Sequence[bytes] = ()


@dataclass(frozen=True, kw_only=True)
class AttemptReply:
    """What an attempt led to. `other-key`: this handler gives the message another key, and has not run."""

    result: Literal["done", "dead-letter", "parked", "retry", "other-key"]
    outputs: Sequence[Sequence[bytes]] = ()
    timers: Sequence[TimerReply] = ()
    state: bytes = b""
    reason: Reason | None = None
    error: str = ""
    traceback: str = ""


def write_frame(file: IO[bytes], value: Any) -> None:
    """Write one value. Raises BrokenPipeError if the other process has ended."""
    data = msgspec.msgpack.encode(value)
    file.write(len(data).to_bytes(_HEADER_BYTES, "big") + data)
    file.flush()


def read_frame(file: IO[bytes], kind: type[T]) -> T | None:
    """Read one value; None if the other process has ended."""
    size = int.from_bytes(file.read(_HEADER_BYTES), "big")
    data = file.read(size)
    return msgspec.msgpack.decode(data, type=kind) if size and len(data) == size else None


def main() -> None:
    """Reply to calls until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends this process
    job = read_frame(sys.stdin.buffer, ReplayJob)
    if job is None:
        return
    os.set_inheritable(job.reply_to, False)
    start_logging(job.log)
    release_gc()
    with os.fdopen(job.reply_to, "wb") as replies:
        try:
            handler = handler_of(job.target, job.handler)
        except MillstreamError as error:
            write_frame(replies, HandlerFacts(error=str(error)))
            return
        finish_logging()
        write_frame(replies, _facts_of(handler))
        _answer(handler, job.key, replies)


def handler_of(target: str, name: str) -> Handler:
    """The handler of an app that can be replayed. Raises ConfigError."""
    app = load_app(target)
    handler = app.only([name]).handlers.get(name)
    if handler is None or handler.key is None:
        what = "is a stage" if handler is None else "has no key: none of its messages belongs to a key"
        raise ConfigError(f"{app.name}.{name} of {target!r} {what}; replay is for handlers with a key")
    return handler


def _facts_of(handler: Handler) -> HandlerFacts:
    return HandlerFacts(
        wants_state=handler.wants_state,
        is_async=handler.is_async,
        time_limit_ms=handler.time_limit_ms,
        attempts=handler.retry.attempts,
        crashes_allowed=crashes_allowed(handler.retry),
    )


def _answer(handler: Handler, key: bytes, replies: IO[bytes]) -> None:
    calls: queue.SimpleQueue[AttemptCall] = queue.SimpleQueue()

    def take_calls() -> None:
        while (call := read_frame(sys.stdin.buffer, AttemptCall)) is not None:
            calls.put(call)
        os._exit(0)  # a handler may still run

    threading.Thread(target=take_calls, name="millstream-calls", daemon=True).start()
    with asyncio.Runner() as runner:  # one event loop: an async handler may keep what belongs to it
        while True:
            write_frame(replies, _attempt(handler, key, calls.get(), runner))


def _attempt(handler: Handler, key: bytes, call: AttemptCall, runner: asyncio.Runner) -> AttemptReply:
    message = Message(call.stream, call.id, list(call.pairs), attempt=call.attempt, fence=1)
    try:
        message.key = handler.key_of(message)
    except DecodeError:
        message.key = None  # `check_key` says why
    if message.key not in (None, key):
        return AttemptReply(result="other-key", state=call.state)
    return _reply_of(_outcome_of(handler, message, call, runner), call.state)


def _outcome_of(handler: Handler, message: Message, call: AttemptCall, runner: asyncio.Runner) -> Outcome:
    if call.ended == "time limit":
        return timed_out(handler, message)
    if call.ended == "crash":
        return outcome_after_last_attempt(handler, DeadLettered("crashed", call.cause))
    state = call.state if message.key is not None else b""
    if (refusal := check_key(handler, message)) is not None:
        return refusal
    if handler.in_batches:
        one = [message]
        ended = attempt_list(handler, one, state) if handler.is_async else None
        return (runner.run(ended) if ended else attempt_list_plain(handler, one, state))[1]
    if handler.is_async:
        return runner.run(attempt(handler, message, state))
    return attempt_plain(handler, message, state)


def _reply_of(outcome: Outcome, before: bytes) -> AttemptReply:
    if isinstance(outcome, Done):
        outputs = [unpack_output(one) for one in outcome.outputs]
        timers = [_timer_reply(one) for one in outcome.timers]
        return AttemptReply(result="done", outputs=outputs, timers=timers, state=outcome.state)
    if isinstance(outcome, DeadLettered | Parked):
        return AttemptReply(
            result="parked" if isinstance(outcome, Parked) else "dead-letter",
            state=before,
            reason=outcome.reason,
            error=outcome.error,
            traceback=outcome.traceback,
        )
    return AttemptReply(result="retry", state=before, error=outcome.error)


def _timer_reply(change: TimerChange) -> TimerReply:
    own_id, delay_ms, packed = change
    name = name_of_timer(own_id)
    if delay_ms == "":
        return TimerReply(name=name)
    return TimerReply(name=name, delay_ms=delay_ms, pairs=own_pairs(unpack_output(packed)))
