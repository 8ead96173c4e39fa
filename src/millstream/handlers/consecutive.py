"""Consecutive attempts: a plain handler runs on one message of a key after another, in one loop for all of them.

Spark's engine runs most messages so: a call for each step of an attempt costs more than the step itself. What the loop
leaves out, `attempt_plain` does: it has the same outcome for every message.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from millstream.errors import DecodeError
from millstream.handlers.attempt import (
    MAX_OUTPUT_BYTES,
    NO_RESULTS,
    NO_STATE,
    UNSTORABLE,
    Done,
    Outcome,
    TimeLimiter,
    attempt_plain,
    encode_results,
    outcome_of,
    outcome_of_unprepared,
)
from millstream.handlers.encoding import pack_output
from millstream.handlers.handler import Handler
from millstream.handlers.key_timers import TimerChange, origin_of
from millstream.handlers.time_limit import TimeLimit
from millstream.handlers.upcasting import current_state, encode_state
from millstream.model import Message

PackedEntry = tuple[bytes, bytes]
"""An entry of a stream: its id as text, and its names and values as one msgpack list of binaries."""

MessageOf = Callable[[bytes, bytes], Message]
"""Makes the message of a packed entry."""

unpack = msgspec.msgpack.Decoder(list[bytes]).decode
"""Unpacks the names and values of an entry."""


class AttemptTimer(Protocol):
    """How an engine limits the time of attempts in its own thread.

    * `begin`: from now on it raises TimeLimit in that thread, after so many milliseconds, as long as it is `armed`
    * `guard`: does both for one call
    """

    armed: bool

    @property
    def guard(self) -> TimeLimiter:
        """See above."""

    def begin(self, limit_ms: float, /) -> None:
        """See above. TimeLimit may also be raised just before `armed` becomes False."""


class Room(NamedTuple):
    """When a stretch ends: after so many messages; or once it has so many bytes, or so many outputs and changes of timers."""

    messages: int
    bytes: int
    outputs: int


class Stretch(msgspec.Struct):
    """What attempts on consecutive messages of a key have come to.

    * `count`: so many messages are done, with these `outputs`, `timers` and, after the last, this `state`
    * `size`: the bytes of the outputs and changes of timers, and of the state after each message
    * `stopped_by`: the message after them, and its outcome, if it is another one than Done
    """

    state: bytes
    count: int = 0
    size: int = 0
    outputs: list[bytes] = []
    timers: list[TimerChange] = []
    stopped_by: tuple[Message, Outcome] | None = None


def attempt_consecutive(
    handler: Handler,
    entries: Iterable[PackedEntry],
    message_of: MessageOf,
    blob: bytes,
    timer: AttemptTimer,
    room: Room,
) -> Stretch:
    """Run a plain `handler` once on each of `entries`, all of one key, until there is no more room or an outcome is not Done.

    `blob`: the state of the key. Never raises. The entries after the last one that was run are not touched.
    """
    if handler.is_direct:
        return _attempt_directly(handler, entries, message_of, blob, timer, room)
    done = Stretch(blob)
    guard = timer.guard
    for entry_id, packed in entries:
        if (
            done.count >= room.messages
            or done.size >= room.bytes
            or len(done.outputs) + len(done.timers) >= room.outputs
        ):
            break
        message = message_of(entry_id, packed)
        outcome = attempt_plain(handler, message, done.state, guard)
        if not isinstance(outcome, Done):
            done.stopped_by = message, outcome
            break
        done.state = outcome.state
        done.count += 1
        done.size += len(outcome.state) + _size_of(outcome.outputs, outcome.timers)
        done.outputs += outcome.outputs
        done.timers += outcome.timers
    return done


def _size_of(outputs: Iterable[bytes], timers: Iterable[TimerChange]) -> int:
    return sum(map(len, outputs)) + sum(len(own_id) + len(packed) for own_id, _, packed in timers)


def _attempt_directly(
    handler: Handler,
    entries: Iterable[PackedEntry],
    message_of: MessageOf,
    blob: bytes,
    timer: AttemptTimer,
    room: Room,
) -> Stretch:
    """As `attempt_consecutive`, for a handler that is direct: without a call for each step, and without a message for a model."""
    function: Callable[..., Any] = handler.function
    wants_state, writes, limit_ms = handler.wants_state, handler.into is not None, handler.time_limit_ms
    upcasts, version, decode = handler.state_upcasts, handler.state_version, handler.decoder
    done, count, size = Stretch(blob), 0, 0
    outputs, timers = done.outputs, done.timers
    for entry in entries:
        if count >= room.messages or size >= room.bytes or len(outputs) + len(timers) >= room.outputs:
            break
        first: Any = message_of(*entry) if decode is None else unpack(entry[1])
        origin = origin_of(handler, first) if decode is None else None  # before the run, which may change the message
        try:
            state = current_state(blob, upcasts) if wants_state else NO_STATE
            first = first if decode is None else decode(first)
        except (DecodeError, ValueError) as error:
            done.stopped_by = message_of(*entry), outcome_of_unprepared(handler, error)
            break
        output, ended = b"", NO_RESULTS
        try:
            try:
                timer.begin(limit_ms)
                try:
                    result = function(first, state) if wants_state else function(first)
                    if not (type(result) is dict and writes and len(output := pack_output(result)) <= MAX_OUTPUT_BYTES):
                        ended = encode_results(handler, origin or origin_of(handler, message_of(*entry)), result)
                except BaseException as error:  # noqa: BLE001 - a handler may raise anything, as in `attempt.py`
                    ended = (), (), error
            finally:
                timer.armed = False
        except TimeLimit as error:  # the alarm fired just after the function returned
            timer.armed = False
            ended = (), (), error
        stored: bytes | None = b"" if ended[2] is None else None
        if wants_state and stored is not None:
            try:
                stored = encode_state(state, version)
            except UNSTORABLE:
                stored, ended = None, ((output,), (), None) if output else ended
        if stored is None:
            message = first if decode is None else message_of(*entry)
            done.stopped_by = message, outcome_of(handler, message, state, ended)
            break
        blob = stored
        count, size = count + 1, size + len(blob) + len(output)
        if output:
            outputs.append(output)
        elif ended is not NO_RESULTS:
            outputs += ended[0]
            timers += ended[1]
            size += _size_of(*ended[:2])
    done.state, done.count, done.size = blob, count, size
    return done
