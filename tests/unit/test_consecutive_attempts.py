"""Consecutive attempts: one loop over the messages of a key has the outcomes of one attempt after another."""

import functools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from millstream import After, App, Message, Reject, Retry, State
from millstream.handlers.attempt import MAX_OUTPUT_BYTES, DeadLettered, Done, Outcome, RetryLater, attempt_plain
from millstream.handlers.consecutive import PackedEntry, Room, Stretch, attempt_consecutive, unpack
from millstream.handlers.handler import Handler
from millstream.handlers.time_limit import TimeLimit
from millstream.handlers.upcasting import encode_state
from millstream.spark.engine import watchdog
from millstream.spark.engine.time_limit import AttemptTimeLimit
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.spark]

ENDLESS_S = 3_600.0
AMPLE = Room(1_000, 1 << 30, 10_000)
NAN = float("nan")


@dataclass
class Order:
    n: int
    do: str = ""
    note: str | None = None


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptTimeLimit]:
    for name in ("_MIN_GRACE_MS", "_MAX_GRACE_MS"):  # no watchdog kills a process that stands still
        monkeypatch.setattr(watchdog, name, FAIL_SAFE_S * 1_000)
    before = signal.getsignal(signal.SIGALRM)
    limit = AttemptTimeLimit()
    try:
        yield limit
    finally:
        limit.disarm()
        signal.signal(signal.SIGALRM, before)


# --- Handlers -------------------------------------------------------------------------------------------------------


def result_of(n: int, do: str) -> Any:
    """What the handlers below return for an order, or raise."""
    if do in ERRORS:
        error = ERRORS[do]()
        raise error
    return RESULTS[do](n) if do in RESULTS else {"n": n}


ERRORS: dict[str, Callable[[], BaseException]] = {
    "fail": lambda: RuntimeError("no"),
    "reject": lambda: Reject("never"),
    "exit": lambda: SystemExit(3),
    "stop": StopIteration,
    "overrun": TimeLimit,
}
RESULTS: dict[str, Callable[[int], Any]] = {
    "nothing": lambda _: None,
    "empty": lambda _: [],
    "two": lambda n: [{"n": n}, {"n": n, "again": True}],
    "each": lambda n: ({"n": n + more} for more in range(3)),
    "record": lambda n: Order(n, "record"),
    "timer": lambda n: [After("5s", Order(n), name="remind"), {"n": n}],
    "unnamed": lambda _: {"": 1},
    "no number": lambda _: {"n": NAN},
    "no record": lambda _: object(),
    "too large": lambda _: {"text": "x" * (MAX_OUTPUT_BYTES + 1)},
    "late error": lambda n: ({"n": 1 // (n - one)} for one in range(n + 1)),
}


def remember(state: State, n: int, do: str) -> None:
    """Change a state; it cannot be stored if `do` says so."""
    state["sum"] = state.get("sum", 0) + n
    if do == "forget":
        state.clear()
    if do == "bad name":
        state[b"n"] = 1  # type: ignore[index]
    if do == "bad state":
        state["n"] = object()


def of_model(order: Order) -> Any:
    return result_of(order.n, order.do)


def of_model_with_state(order: Order, state: State) -> Any:
    remember(state, order.n, order.do)
    return result_of(order.n, order.do)


def of_message(message: Message) -> Any:
    result = result_of(int(message.fields["n"]), message.text("do", ""))
    message.key, message.stream, message.id = b"other", "elsewhere", "0-1"  # a handler may change its message
    return result


def of_message_with_state(message: Message, state: State) -> Any:
    remember(state, int(message.fields["n"]), message.text("do", ""))
    return of_message(message)


def state_first(state: State, order: Order) -> Any:
    return of_model_with_state(order, state)


def of_all(order: Order, message: Message, state: State) -> Any:
    remember(state, order.n, order.do)
    return of_message(message)


@functools.wraps(of_model_with_state)
def decorated(*arguments: Any, **by_name: Any) -> Any:
    assert not arguments  # it may take its arguments by name alone
    return of_model_with_state(**by_name)


DIRECT = [of_model, of_model_with_state, of_message, of_message_with_state]
OTHERS = [state_first, of_all, decorated]
KINDS = pytest.mark.parametrize("function", DIRECT + OTHERS, ids=lambda one: one.__name__)


def handler_of(function: Callable[..., Any], **options: Any) -> Handler:
    app = App("app")
    defaults: dict[str, Any] = {"key": lambda _: b"k", "into": "out", "retry": Retry(attempts=2, delay_ms=1, jitter=0)}
    app.handler("in", name="handle", **{**defaults, **options})(function)
    return app.handlers["handle"]


# --- Both ways ------------------------------------------------------------------------------------------------------


def packed(*pairs: bytes | str) -> bytes:
    return msgspec.msgpack.encode([one if isinstance(one, bytes) else one.encode() for one in pairs])


def orders(*what: str) -> list[PackedEntry]:
    return [(b"%d-0" % n, packed("n", str(n), "do", do)) for n, do in enumerate(what, 1)]


def message_of(entry_id: bytes, fields: bytes) -> Message:
    return Message("in", entry_id.decode(), unpack(fields), b"k", 1, 7)


def one_by_one(handler: Handler, entries: Sequence[PackedEntry], blob: bytes, guard: Any) -> Stretch:
    """What attempts on `entries` come to, one after the other."""
    done = Stretch(blob)
    for entry in entries:
        message = message_of(*entry)
        outcome = attempt_plain(handler, message, done.state, guard)
        if not isinstance(outcome, Done):
            done.stopped_by = message, outcome
            break
        done.count += 1
        done.state = outcome.state
        done.outputs += outcome.outputs
        done.timers += outcome.timers
        done.size += len(outcome.state) + sum(map(len, outcome.outputs))
        done.size += sum(len(own_id) + len(entry) for own_id, _, entry in outcome.timers)
    return done


def comparable(outcome: Outcome) -> Any:
    """An outcome without what differs between two runs: the lines of tracebacks, and which of two equal errors it has."""
    if isinstance(outcome, RetryLater):
        return replace(outcome, raised=None), type(outcome.raised), str(outcome.raised)
    if isinstance(outcome, DeadLettered):
        return outcome.reason, outcome.error, outcome.place, outcome.traceback
    return outcome


def agree(handler: Handler, entries: Sequence[PackedEntry], blob: bytes, timer: AttemptTimeLimit) -> Stretch:
    """Run the entries in both ways, check that they agree, and return what they have come to."""
    expected = one_by_one(handler, entries, blob, timer.guard)
    found = attempt_consecutive(handler, entries, message_of, blob, timer, AMPLE)
    assert not timer.armed
    stops = []
    for done in (expected, found):
        stops.append(None if done.stopped_by is None else (done.stopped_by[0], comparable(done.stopped_by[1])))
        done.stopped_by = None
    assert found == expected
    assert stops[1] == stops[0]
    return found


@KINDS
@pytest.mark.parametrize("do", ["", *ERRORS, *RESULTS, "forget", "bad name", "bad state"])
@pytest.mark.parametrize("into", ["out", None])
def test_a_loop_has_the_outcome_of_each_attempt(
    function: Callable[..., Any], do: str, into: str | None, timer: AttemptTimeLimit
) -> None:
    handler = handler_of(function, into=into)
    for attempts in (1, 2):
        agree(replace(handler, retry=Retry(attempts=attempts, jitter=0)), orders("nothing", do, "nothing"), b"", timer)


@KINDS
def test_messages_between_two_that_write_nothing_are_done_together(
    function: Callable[..., Any], timer: AttemptTimeLimit
) -> None:
    found = agree(handler_of(function), orders("", "nothing", "two", "timer", "each", "record", ""), b"", timer)
    assert (found.count, len(found.outputs), len(found.timers)) == (7, 9, 1)
    if function not in (of_model, of_message):
        assert found.state == encode_state(State(sum=28))


@KINDS
@pytest.mark.parametrize(
    "fields",
    [
        packed("n", "1", "n", "2"),
        packed("n", "x"),
        packed("n", b"\xff"),
        packed("other", "1"),
        packed("n", "1", "do"),
        packed("", "", "n", "3", "", b"\x00\xff", "note", ""),
        packed(),
    ],
)
def test_a_message_of_other_fields_stops_the_loop_or_not_as_an_attempt_does(
    function: Callable[..., Any], fields: bytes, timer: AttemptTimeLimit
) -> None:
    agree(handler_of(function), [*orders(""), (b"2-0", fields), (b"3-0", packed("n", "3"))], b"", timer)


@KINDS
@pytest.mark.parametrize(
    "blob",
    [
        encode_state(State(sum=2)),
        encode_state(State(sum=2), 2),
        encode_state(State(sum=2), 3),
        b"\xc1",
        b"\x92\x01",
        b"\x93",
        msgspec.msgpack.encode([1]),
    ],
)
@pytest.mark.parametrize("upcasts", [(), (lambda state: {**state, "sum": state["sum"] + 10},)])
def test_a_state_of_any_version_and_a_damaged_one_are_read_as_by_an_attempt(
    function: Callable[..., Any], blob: bytes, upcasts: Sequence[Any], timer: AttemptTimeLimit
) -> None:
    agree(replace(handler_of(function), state_upcasts=upcasts), orders("", ""), blob, timer)


@KINDS
def test_messages_are_upcast(function: Callable[..., Any], timer: AttemptTimeLimit) -> None:
    def upcast(fields: dict[str, bytes]) -> dict[str, Any]:
        return {**fields, "n": int(fields["n"]) * 10}

    found = agree(handler_of(function, message_upcasts=[upcast]), orders("", ""), b"", timer)
    assert [msgspec.msgpack.decode(output) for output in found.outputs] == [["n", "10"], ["n", "20"]]


@pytest.mark.parametrize("function", DIRECT, ids=lambda one: one.__name__)
def test_a_handler_of_a_message_or_a_model_and_perhaps_a_state_is_direct(function: Callable[..., Any]) -> None:
    assert handler_of(function).is_direct


@pytest.mark.parametrize("function", OTHERS, ids=lambda one: one.__name__)
def test_a_handler_with_other_arguments_or_only_by_name_is_not_direct(function: Callable[..., Any]) -> None:
    assert not handler_of(function).is_direct
    assert not handler_of(of_model, message_upcasts=[dict]).is_direct


def test_the_traceback_of_a_failure_begins_in_the_handler(timer: AttemptTimeLimit) -> None:
    handler = handler_of(of_model, retry=Retry(attempts=1))
    stopped_by = attempt_consecutive(handler, orders("fail"), message_of, b"", timer, AMPLE).stopped_by
    assert stopped_by is not None
    assert isinstance(stopped_by[1], DeadLettered)
    first_frame = stopped_by[1].traceback.splitlines()[1]
    assert __file__ in first_frame
    assert first_frame.endswith("in of_model")


def test_a_handler_that_fails_has_changed_no_state(timer: AttemptTimeLimit) -> None:
    found = agree(handler_of(of_model_with_state), orders("", "", "fail"), b"", timer)
    assert (found.count, found.state) == (2, encode_state(State(sum=3)))


# --- How far it goes ------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("room", "count"),
    [
        (Room(3, 1 << 30, 10_000), 3),
        (Room(0, 1 << 30, 10_000), 0),
        (Room(1_000, 0, 10_000), 0),
        (Room(1_000, 1, 10_000), 1),
        (Room(1_000, 1 << 30, 3), 2),
        (Room(1_000, 1 << 30, 4), 2),
        (Room(1_000, 1 << 30, 5), 3),
    ],
)
def test_a_loop_ends_once_a_limit_of_one_commit_is_reached(
    function: Callable[..., Any], room: Room, count: int, timer: AttemptTimeLimit
) -> None:
    entries = iter(orders(*("timer",) * 6))
    found = attempt_consecutive(handler_of(function), entries, message_of, b"", timer, room)
    assert (found.count, len(found.outputs), len(found.timers), found.stopped_by) == (count, count, count, None)


# --- Time limits ----------------------------------------------------------------------------------------------------


def hanging(order: Order) -> dict[str, int]:
    if order.do == "hang":
        time.sleep(ENDLESS_S)
    return {"n": order.n}


@functools.wraps(hanging)
def hanging_by_name(**by_name: Any) -> dict[str, int]:
    return hanging(**by_name)


@pytest.mark.parametrize("function", [hanging, hanging_by_name], ids=lambda one: one.__name__)
def test_an_attempt_that_takes_too_long_ends_the_loop_and_those_before_it_are_done(
    function: Callable[..., Any], timer: AttemptTimeLimit
) -> None:
    handler = handler_of(function, time_limit_ms=300)
    count = 0
    while not count:  # this process may get no processor for as long as the limit
        found = attempt_consecutive(handler, orders("", "hang", ""), message_of, b"", timer, AMPLE)
        count = found.count
    assert (found.count, len(found.outputs)) == (1, 1)
    assert found.stopped_by is not None
    message, outcome = found.stopped_by
    assert message.id == "2-0"
    assert isinstance(outcome, RetryLater)
    assert isinstance(outcome.raised, TimeLimit)
    assert not timer.armed


class _LateTimer(AttemptTimeLimit):
    """The alarm of the second attempt fires just after its handler has returned, before `armed` is False."""

    _attempts = 0

    def begin(self, limit_ms: float, /) -> None:
        self._attempts += 1
        super().begin(limit_ms)

    @property
    def armed(self) -> bool:
        return self._is_armed

    @armed.setter
    def armed(self, armed: bool) -> None:
        self._is_armed = armed
        if not armed and self._attempts == 2:
            self._attempts += 1
            self._is_armed = True
            raise TimeLimit


@pytest.mark.parametrize("function", DIRECT, ids=lambda one: one.__name__)
def test_an_alarm_just_after_the_handler_has_returned_is_that_of_its_attempt(
    function: Callable[..., Any], timer: AttemptTimeLimit
) -> None:
    late = _LateTimer()
    found = attempt_consecutive(handler_of(function), orders("", "", ""), message_of, b"", late, AMPLE)
    assert (found.count, len(found.outputs)) == (1, 1)
    assert found.stopped_by is not None
    outcome = found.stopped_by[1]
    assert isinstance(outcome, RetryLater)
    assert isinstance(outcome.raised, TimeLimit)
    assert not late.armed
