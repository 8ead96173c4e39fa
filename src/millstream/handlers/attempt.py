"""One attempt of a handler on a message or batch: decode, run, and return the outcome.

Nothing here does I/O or waits: the engine commits, retries, dead-letters or parks by the outcome.
"""

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import TracebackType
from typing import Any, Protocol

import msgspec

from millstream.errors import DecodeError, MissingKey, OutputError, Reject, text_of
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.handlers.deadlines import Deadlines, deadlines_of
from millstream.handlers.encoding import pack_output
from millstream.handlers.handler import Handler
from millstream.handlers.key_timers import After, Cancel, Origin, TimerChange, TimerChanges, encode_timer, origin_of
from millstream.handlers.time_limit import TimeLimit
from millstream.handlers.upcasting import NewerState, current_state, encode_state
from millstream.model import Message, Retry, State

KEY_FUNCTION = "key function"
"""The `place` of an error that kept a message from having a key."""

MAX_OUTPUTS = 10_000
"""Most outputs of one message, or of one batch: one script writes all of them, and Redis serves nothing else meanwhile."""

MAX_OUTPUT_BYTES = 32 * 2**20
"""Most bytes of these outputs, packed."""

MIN_NEWER_CODE_WAIT_MS, MAX_NEWER_CODE_WAIT_MS = 1_000.0, 60_000.0
"""Bounds of a wait for newer code, before jitter, whatever the retry policy is."""


class Done(msgspec.Struct):
    """The handler succeeded: commit its outputs, its state (b"" = an empty one), and changes of timers of the key."""

    outputs: "Outputs"
    state: bytes
    timers: TimerChanges = ()


class DeadLettered(msgspec.Struct):
    """The message cannot be processed: commit its dead letter. `place`: the error's type and where it was raised."""

    reason: Reason
    error: str
    traceback: str = ""
    place: str = ""


@dataclass(slots=True)
class RetryLater:
    """The handler failed and has attempts left: run it again after `delay_ms` milliseconds.

    `waits`: the handler did not run. The message waits for newer code, without end, and that uses up no attempt.
    `limited`: the handler did not run either. The message waits for a permit of this value of its limit's field; Redis
    knows until when, and `delay_ms` is an estimate.
    """

    delay_ms: float
    error: str
    raised: BaseException | None = field(default=None, compare=False, repr=False)
    waits: bool = False
    limited: bytes | None = None

    def failed_attempts(self, attempt: int) -> int:
        """How many attempts on the message have failed, if this is the outcome of `attempt`."""
        return attempt - 1 if self.waits or self.limited is not None else attempt


class Parked(msgspec.Struct):
    """The message cannot be processed: park its key until an operator acts."""

    reason: Reason
    error: str
    traceback: str = ""


Outcome = Done | DeadLettered | RetryLater | Parked
Outputs = Sequence[bytes]
"""Entries for the output stream, each packed by `pack_output`."""

NO_EFFECTS = Done((), b"")
"""The outcome of a message without a run of the handler."""

BatchOutcome = tuple[list[DeadLettered | None], Outcome]
"""The dead letter of each message that could not be decoded, else None; and the common outcome of the others."""

ListOutcome = tuple[int, Outcome]
"""Of how many messages of a list the outcome is, from the first on, and this outcome. Of several messages it is that
they are done together, or that each has to be run again by itself.
"""

RunResult = tuple[Outputs, TimerChanges, BaseException | None]
"""The outputs of a handler, its changes of timers, and the exception that it raised, if any."""


class TimeLimiter(Protocol):
    """How an engine calls a plain function with its arguments under a time limit in milliseconds: after that time it
    raises TimeLimit in the function, as soon as the function executes Python code.
    """

    def __call__(self, work: Callable[..., RunResult], limit_ms: float, /, *arguments: Any) -> RunResult:
        """Return what the function returns. TimeLimit may also be raised just after it returned."""


Arguments = dict[str, Any] | None
"""The arguments of a handler by name; None: the message alone, by position."""

NO_STATE = State()
NO_RESULTS: RunResult = (), (), None
UNSTORABLE = (TypeError, OverflowError, RecursionError, ValueError)
"""What `encode_state` raises."""
_AS_PUBLISHED: tuple[State, None] = NO_STATE, None


def is_limited(outcome: Outcome) -> bool:
    """True if a message was refused a permit, and did not run."""
    return isinstance(outcome, RetryLater) and outcome.limited is not None


async def attempt(handler: Handler, message: Message, blob: bytes, deadlines: Deadlines | None = None) -> Outcome:
    """Run an async `handler` once on `message` with the state in `blob` and return the outcome. Never raises.

    A cancellation of the current task during the attempt ends with the attempt; context variables that the handler sets
    remain set. Call it in a task of its own, or in one with other messages of its key. If the caller cancels the task,
    it must ignore the outcome. `deadlines`: those of the running loop and this handler, if the caller has them.
    """
    prepared = _AS_PUBLISHED if handler.takes_published else _prepare(handler, message, blob)
    if not isinstance(prepared, tuple):
        return prepared
    state, arguments = prepared
    ended = await _run(handler, message, arguments, deadlines)
    return NO_EFFECTS if ended is NO_RESULTS and state is NO_STATE else outcome_of(handler, message, state, ended)


def attempt_plain(handler: Handler, message: Message, blob: bytes, guard: TimeLimiter | None = None) -> Outcome:
    """Run a plain `handler` once, under `guard` if given, and return the outcome. Never raises."""
    prepared = _AS_PUBLISHED if handler.takes_published else _prepare(handler, message, blob)
    if not isinstance(prepared, tuple):
        return prepared
    state, arguments = prepared
    ended = _call(handler, message, arguments) if guard is None else _run_plain(handler, message, arguments, guard)
    return NO_EFFECTS if ended is NO_RESULTS and state is NO_STATE else outcome_of(handler, message, state, ended)


def timed_out(handler: Handler, message: Message, *, where: TracebackType | None = None, alone: bool = True) -> Outcome:
    """Return the outcome of an attempt, `alone` or in a batch, that exceeded its time limit and did not end.

    `where`: where the handler is, for the log and the dead letter.
    """
    error = TimeLimit().with_traceback(where)
    return _failure_outcome(handler, message, error) if alone else _retry_singly(handler, error)


async def attempt_batch(handler: Handler, messages: Sequence[Message]) -> BatchOutcome:
    """Run an async `handler` once on all of `messages` that can be decoded. Never raises; call it as `attempt`."""
    run, dead, arguments = _prepare_batch(handler, messages)
    return dead, _batch_outcome(handler, run, await _run(handler, run[0], arguments)) if run else NO_EFFECTS


def attempt_batch_plain(
    handler: Handler, messages: Sequence[Message], guard: TimeLimiter | None = None
) -> BatchOutcome:
    """Run a plain `handler` once, under `guard` if given, on all of `messages` that can be decoded. Never raises."""
    run, dead, arguments = _prepare_batch(handler, messages)
    return dead, _batch_outcome(handler, run, _run_plain(handler, run[0], arguments, guard)) if run else NO_EFFECTS


def _prepare_batch(
    handler: Handler, messages: Sequence[Message]
) -> tuple[list[Message], list[DeadLettered | None], dict[str, list[Any]]]:
    prepared = [_prepare(handler, message, b"") for message in messages]
    dead = [one if isinstance(one, DeadLettered) else None for one in prepared]
    run = [message for message, one in zip(messages, dead, strict=True) if one is None]
    bound = [one[1] for one in prepared if isinstance(one, tuple)]
    return run, dead, {name: [arguments[name] for arguments in bound] for name, _ in handler.arguments}


def _batch_outcome(handler: Handler, messages: Sequence[Message], ended: RunResult, state: State = NO_STATE) -> Outcome:
    raised = ended[2]
    if len(messages) > 1 and raised is not None:
        return _retry_singly(handler, raised)
    return outcome_of(handler, messages[0], state, ended)


async def attempt_list(handler: Handler, messages: Sequence[Message], blob: bytes) -> ListOutcome:
    """Run an async `handler` once on the first of `messages`, all of one key, and those after it.

    The list ends before the first that cannot be decoded. `blob`: the state of the key. Never raises; call it as
    `attempt`.
    """
    prepared = _prepare_list(handler, messages, blob)
    if not isinstance(prepared, tuple):
        return 1, prepared
    run, state, arguments = prepared
    return len(run), _batch_outcome(handler, run, await _run(handler, run[0], arguments), state)


def attempt_list_plain(
    handler: Handler, messages: Sequence[Message], blob: bytes, guard: TimeLimiter | None = None
) -> ListOutcome:
    """Run a plain `handler` as `attempt_list`, under `guard` if given."""
    prepared = _prepare_list(handler, messages, blob)
    if not isinstance(prepared, tuple):
        return 1, prepared
    run, state, arguments = prepared
    return len(run), _batch_outcome(handler, run, _run_plain(handler, run[0], arguments, guard), state)


def _prepare_list(
    handler: Handler, messages: Sequence[Message], blob: bytes
) -> tuple[Sequence[Message], State, dict[str, Any]] | DeadLettered | RetryLater:
    prepared = _prepare(handler, messages[0], blob)
    if not isinstance(prepared, tuple):
        return prepared
    state, first = prepared
    bound = [first]
    with contextlib.suppress(DecodeError):  # that message begins the next list, and becomes a dead letter
        for message in messages[1:]:
            bound.append(handler.bind(message, state))  # noqa: PERF401 - those before it are kept
    arguments = {
        name: state if source == "state" else [one[name] for one in bound] for name, source in handler.arguments
    }
    return messages[: len(bound)], state, arguments


def _retry_singly(handler: Handler, error: BaseException) -> RetryLater:
    # Any message of the batch may be the cause, so none is dead-lettered: each gets at least one attempt of its own.
    return RetryLater(handler.retry.delay_after(1), _error_text(handler, error), error)


def _prepare(
    handler: Handler, message: Message, blob: bytes
) -> tuple[State, dict[str, Any]] | DeadLettered | RetryLater:
    try:
        state = current_state(blob, handler.state_upcasts) if handler.wants_state else NO_STATE
        return state, handler.bind(message, state)
    except (DecodeError, ValueError) as error:
        return outcome_of_unprepared(handler, error)


def outcome_of_unprepared(handler: Handler, error: Exception) -> DeadLettered | RetryLater:
    """Return the outcome of a message whose arguments or state could not be decoded."""
    if isinstance(error, NewerState):  # the newer app that wrote it can process the message, so none is lost by waiting
        return RetryLater(_newer_code_wait_ms(handler.retry), str(error), waits=True)
    if isinstance(error, DecodeError):
        return DeadLettered("undecodable", str(error))
    # msgspec's own errors and invalid UTF-8
    return DeadLettered("undecodable", f"the key's state in Redis is damaged ({error}); see: millstream state show")


def _newer_code_wait_ms(retry: Retry) -> float:
    """The longest back-off of the policy, within the bounds: no attempt was made, and only a deploy ends the wait."""
    longest_ms = min(max(retry.max_delay_ms, MIN_NEWER_CODE_WAIT_MS), MAX_NEWER_CODE_WAIT_MS)
    return replace(retry, delay_ms=longest_ms, max_delay_ms=longest_ms).delay_after(1)


def outcome_of(handler: Handler, message: Message, state: State, ended: RunResult) -> Outcome:
    """Return the outcome of a run that has ended so and has left this state."""
    outputs, timers, raised = ended
    if raised is not None:
        return _error_outcome(handler, message, raised)
    if not handler.wants_state:
        return Done(outputs, b"", timers) if outputs or timers else NO_EFFECTS
    try:
        return Done(outputs, encode_state(state, handler.state_version), timers)
    except UNSTORABLE as error:
        return DeadLettered(
            "bad-output", f"the state cannot be stored: {error}; use text, bytes, numbers, lists and mappings"
        )


def _error_outcome(handler: Handler, message: Message, raised: BaseException) -> Outcome:
    if isinstance(raised, Reject):
        return DeadLettered("rejected", text_of(raised))
    if isinstance(raised, OutputError):
        return DeadLettered("bad-output", str(raised))
    return _failure_outcome(handler, message, raised)


async def _run(
    handler: Handler, message: Message, arguments: Arguments, deadlines: Deadlines | None = None
) -> RunResult:
    """Await the handler's coroutine in the current task, for at most its time limit. `message`: the first that it takes."""
    if deadlines is None:
        deadlines = deadlines_of(asyncio.get_running_loop(), handler.time_limit_ms / 1000)
    task = asyncio.current_task(deadlines.loop)
    assert task is not None
    origin = origin_of(handler, message)
    earlier = task.cancelling()
    deadlines.begin(task)
    try:
        result = await (handler.function(message) if arguments is None else handler.function(**arguments))
        ended: RunResult = NO_RESULTS if result is None else encode_results(handler, origin, result)
    # A handler may raise anything, SystemExit too: one message must not end the worker. It becomes an outcome.
    except BaseException as error:
        if isinstance(error, GeneratorExit) and asyncio.current_task(deadlines.loop) is not task:
            raise  # the handler did not raise it: the loop is closed
        # Of an attempt that took too long, the traceback shows what it waited for.
        ended = (), (), TimeLimit().with_traceback(error.__traceback__) if deadlines.end(task) else error
    else:
        deadlines.end(task)
    if task.cancelling():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # delivers a pending cancellation here, not to the engine
        while task.cancelling() > earlier:  # else a TaskGroup of the next message takes them for its own
            task.uncancel()
    return ended


def _run_plain(handler: Handler, message: Message, arguments: Arguments, guard: TimeLimiter | None) -> RunResult:
    if guard is None:
        return _call(handler, message, arguments)
    try:
        return guard(_call, handler.time_limit_ms, handler, message, arguments)
    except TimeLimit as error:  # the alarm fired just after the function returned
        return (), (), error


def _call(handler: Handler, message: Message, arguments: Arguments) -> RunResult:
    origin = origin_of(handler, message)
    # Errors are returned, not raised: a StopIteration, for one, cannot pass through a coroutine.
    try:
        result = handler.function(message) if arguments is None else handler.function(**arguments)
        return NO_RESULTS if result is None else encode_results(handler, origin, result)
    except BaseException as error:  # noqa: BLE001 - a handler may raise anything, SystemExit too; it becomes an outcome
        return (), (), error


def encode_results(handler: Handler, origin: Origin, result: object) -> RunResult:
    """Encode a handler's result: entries for its `into` stream, and changes of timers of the key of its message.

    They are at most `MAX_OUTPUTS` and `MAX_OUTPUT_BYTES` together. `origin`: what the message was before the run, since a
    handler may change its message. Raises OutputError.
    """
    if result is None:
        return NO_RESULTS
    if type(result) is dict and handler.into is not None:  # nearly all results: what follows does the same for them
        entry = pack_output(result)
        if len(entry) <= MAX_OUTPUT_BYTES:
            return [entry], (), None
    # Most results are a dict, and a check for an abstract class costs as much as packing a small one.
    is_one = type(result) is dict or not isinstance(result, (list, tuple, Iterator))
    results: Any = (result,) if is_one else result
    into = handler.into
    entries: list[bytes] = []
    timers: list[TimerChange] = []
    size = 0
    for one in results:  # an iterator may be endless: each output is checked as it comes
        if type(one) is not dict and isinstance(one, (After, Cancel)):
            change = encode_timer(handler, origin, one)
            timers.append(change)
            size += len(change[0]) + len(change[2])
        elif into is None:
            raise OutputError(
                f'{handler.label} returned a {type(result).__name__} but has no into="stream" to write it to'
            )
        else:
            entry = pack_output(one)
            entries.append(entry)
            size += len(entry)
        if len(entries) + len(timers) > MAX_OUTPUTS or size > MAX_OUTPUT_BYTES:
            raise OutputError(
                f"{handler.label} returned more than {MAX_OUTPUTS:,} outputs or {MAX_OUTPUT_BYTES // 2**20} MB at once, "
                "which one step writes while Redis serves nothing else; return fewer, or publish them with "
                "millstream.producer.Producer"
            )
    return entries, timers, None


def dead_letter_of(handler: Handler, message: Message, dead: DeadLettered) -> DeadLetter:
    """Return the dead letter of `message`."""
    return DeadLetter(
        stream=message.stream,
        id=message.id,
        pairs=message.pairs,
        key=message.key,
        app=handler.app,
        handler=handler.name,
        attempts=message.attempt - (dead.reason == "canceled"),  # it was not run
        reason=dead.reason,
        error=dead.error,
        traceback=dead.traceback,
        time_ms=time.time_ns() // 1_000_000,
    )


def cancels_rest(handler: Handler, outcome: Outcome) -> bool:
    """Whether the outcome of a message cancels the later messages of its key that are published by now."""
    return handler.retry.then == "cancel" and isinstance(outcome, DeadLettered) and outcome.reason != "canceled"


def canceled_outcome(canceled_by: str) -> DeadLettered:
    """Return the outcome of a message which the dead letter of the message `canceled_by` has canceled."""
    return DeadLettered("canceled", f"message {canceled_by} of its key became a dead letter before it")


def check_key(handler: Handler, message: Message) -> DeadLettered | None:
    """Dead-letter a keyed handler's message without a key; None if the handler may process it."""
    if handler.key is None or message.key is not None:
        return None
    try:
        handler.key_of(message)
    except DecodeError as error:
        return DeadLettered("undecodable", str(error), place=KEY_FUNCTION)
    if handler.missing_key == "unordered":
        return None
    missing: MissingKey = handler.missing_key_error()
    return DeadLettered("missing-key", str(missing))


def _failure_outcome(handler: Handler, message: Message, error: BaseException) -> Outcome:
    text = _error_text(handler, error)
    if message.attempt < handler.retry.attempts or handler.retry.then == "block":
        return RetryLater(handler.retry.delay_after(message.attempt), text, error)
    return outcome_after_last_attempt(handler, DeadLettered("failed", text, traceback_of(error), _place_of(error)))


def _place_of(error: BaseException) -> str:
    """Return the type of the error and the line that raised it: the same for failures of one cause."""
    last = error.__traceback__
    if last is None or isinstance(error, TimeLimit):  # a time limit ends a handler on any line
        return type(error).__name__
    while last.tb_next is not None:
        last = last.tb_next
    return f"{type(error).__name__} at {PurePath(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"


def traceback_of(error: BaseException | None) -> str:
    """Return the traceback of what a handler raised; "" if there is none. It begins with the user's own frames."""
    if error is None or error.__traceback__ is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, user_frames(error.__traceback__)))


_OWN_MODULES = (__name__, "millstream.handlers.consecutive")


def user_frames(frame: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below millstream's frames, which do not help to mend a handler."""
    found = frame
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__") in _OWN_MODULES:
            found = frame.tb_next
        frame = frame.tb_next
    return found


def outcome_after_last_attempt(handler: Handler, dead: DeadLettered) -> DeadLettered | Parked:
    """Return the outcome of a message after its last failed attempt, or after it crashed its process too often.

    A message that crashed its process (a poison pill) parks its key even under `then="block"`: retried without end, it
    would kill process after process.
    """
    return dead if handler.retry.then in ("dead-letter", "cancel") else Parked(dead.reason, dead.error, dead.traceback)


def _error_text(handler: Handler, error: BaseException) -> str:
    if isinstance(error, TimeLimit):
        return f"it took longer than its time limit of {handler.time_limit_ms:,.0f} ms"
    return f"{type(error).__name__}: {text_of(error)}"
