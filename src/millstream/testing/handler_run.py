"""Runs one handler on one message without Redis, for unit tests of handlers."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from millstream.app import App
from millstream.errors import ConfigError, DecodeError
from millstream.handlers.attempt import (
    DeadLettered,
    Done,
    Outcome,
    Outputs,
    Parked,
    attempt_list,
    attempt_list_plain,
    attempt_plain,
    check_key,
)
from millstream.handlers.attempt import attempt as attempt_async
from millstream.handlers.dead_letter import Reason
from millstream.handlers.decoding import compile_decoder
from millstream.handlers.encoding import encode_output, unpack_output
from millstream.handlers.handler import Handler
from millstream.handlers.key_timers import TimerChange, name_of_timer
from millstream.handlers.upcasting import encode_state, parse_state
from millstream.model import Message, State
from millstream.redis_client.key_names import own_pairs
from millstream.redis_client.replies import mapping_of

T = TypeVar("T")

Result = Literal["done", "dead-letter", "parked", "retry"]
"""The outcome of an attempt: see `HandlerRun`."""


@dataclass(frozen=True, kw_only=True)
class SetTimer:
    """A timer that a handler has set: its delay in milliseconds, and the fields of its message, as text."""

    delay_ms: int
    fields: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HandlerRun:
    """The outcome of one attempt of a handler on one message.

    * `result`: "done"; "dead-letter"; "parked", its key waits for an operator; or "retry", after a back-off
    * `outputs`: the entries for the stream `into`, as text; bytes that are not UTF-8 are escaped as "surrogateescape"
    * `state`: the state of the message's key afterwards; unless the result is "done", the state before
    * `timers`: those that it sets, and by None those that it cancels, by name
    * `reason`, `error`, `traceback`: of a dead letter or a parked key; of a retry only `error`
    """

    result: Result
    outputs: Sequence[Mapping[str, str]] = ()
    state: State
    timers: Mapping[str, SetTimer | None] = field(default_factory=dict)
    reason: Reason | None = None
    error: str = ""
    traceback: str = ""

    def outputs_as(self, model: type[T]) -> list[T]:
        """Decode the outputs as a handler of the stream `into` with this model would.

        Raises DecodeError if one does not fit, and ConfigError if `model` is none.
        """
        decode: Callable[[Sequence[bytes]], Any] = compile_decoder(model)
        return [
            decode([part.encode("utf-8", "surrogateescape") for item in output.items() for part in item])
            for output in self.outputs
        ]


def run(
    app: App,
    handler: str | Callable[..., Any],
    message: object,
    *,
    state: Mapping[str, Any] | None = None,
    stream: str | None = None,
    attempt: int | None = None,
) -> HandlerRun:
    """Run `handler` of `app` once on `message`, as an engine would, but without Redis, retries and time limit.

    Decodes the message, finds its key, runs the handler with the state of the key, and checks and encodes outputs and
    state. A handler of lists gets a list of one. Async handlers run in an event loop of their own.

    * `handler`: its name or its function
    * `message`: a Message, or what a producer publishes: a mapping, dataclass, msgspec.Struct or pydantic model
    * `state`: the state of the message's key before, in the current version; empty by default, and always for a message without a key
    * `stream`: the message's stream; by default the handler's first
    * `attempt`: number of the attempt, from 1. By default the last, so that a handler that raises shows the final
      outcome of the message at once; with 1 it shows whether the message is retried

    Never raises what the handler raises. Raises ConfigError for an unknown handler, or a `state` for a handler that
    takes none; OutputError for a message that could not be published.
    """
    compiled = _handler_of(app, handler)
    number = compiled.retry.attempts if attempt is None else attempt
    checked = _message_of(compiled, message, stream, number)
    if state is not None and not compiled.wants_state:
        raise ConfigError(f"handler {compiled.name!r} takes no State: leave out state=")
    blob = encode_state(State(state or {}), compiled.state_version) if checked.key is not None else b""
    outcome = check_key(compiled, checked) or _outcome(compiled, checked, blob)
    before = parse_state(blob)
    if isinstance(outcome, Done):
        after = outcome.state if checked.key is not None else b""
        return HandlerRun(
            result="done",
            outputs=_texts(outcome.outputs),
            state=parse_state(after),
            timers=dict(map(_timer_of, outcome.timers)),
        )
    if isinstance(outcome, DeadLettered):
        return HandlerRun(
            result="dead-letter", state=before, reason=outcome.reason, error=outcome.error, traceback=outcome.traceback
        )
    if isinstance(outcome, Parked):
        return HandlerRun(result="parked", state=before, reason=outcome.reason, error=outcome.error)
    return HandlerRun(result="retry", state=before, error=outcome.error)


def _handler_of(app: App, handler: str | Callable[..., Any]) -> Handler:
    for name, compiled in app.handlers.items():
        if handler in (name, compiled.function):
            return compiled
    shown = handler if isinstance(handler, str) else getattr(handler, "__name__", repr(handler))
    raise ConfigError(f"app {app.name!r} has no handler {shown!r}; it has {', '.join(app.handlers) or 'none'}")


def _message_of(handler: Handler, message: object, stream: str | None, number: int) -> Message:
    template = message if isinstance(message, Message) else None
    pairs = encode_output(message) if template is None else template.pairs
    name = stream or (template.stream if template is not None else (handler.streams or ("stream",))[0])
    made = Message(name, "1-1" if template is None else template.id, list(pairs), attempt=number, fence=1)
    with contextlib.suppress(DecodeError):  # `check_key` says what is wrong with it
        made.key = handler.key_of(made)
    return made


def _outcome(handler: Handler, message: Message, blob: bytes) -> Outcome:
    if handler.is_async:
        return _in_own_loop(handler, message, blob)
    if handler.in_batches:
        return attempt_list_plain(handler, [message], blob)[1]
    return attempt_plain(handler, message, blob)


def _in_own_loop(handler: Handler, message: Message, blob: bytes) -> Outcome:
    """Run an async handler in a thread with a loop of its own: the caller's may be running."""
    found: list[Outcome] = []

    async def run_once() -> None:
        if handler.in_batches:
            found.append((await attempt_list(handler, [message], blob))[1])
        else:
            found.append(await attempt_async(handler, message, blob))

    thread = threading.Thread(target=lambda: asyncio.run(run_once()), name="millstream-handler")
    thread.start()
    thread.join()
    return found[0]


def _timer_of(change: TimerChange) -> tuple[str, SetTimer | None]:
    own_id, delay_ms, packed = change
    name = name_of_timer(own_id)
    if delay_ms == "":
        return name, None
    return name, SetTimer(delay_ms=delay_ms, fields=_text_of(own_pairs(unpack_output(packed))))


def _texts(outputs: Outputs) -> list[dict[str, str]]:
    return [_text_of(unpack_output(one)) for one in outputs]


def _text_of(pairs: Sequence[bytes]) -> dict[str, str]:
    return mapping_of([part.decode("utf-8", "surrogateescape") for part in pairs])
