"""`millstream.testing.run`: one handler, one message, no Redis."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from millstream import App, Message, Reject, Retry, State
from millstream.errors import ConfigError, DecodeError, OutputError
from millstream.handlers.attempt import (
    MAX_OUTPUTS,
    DeadLettered,
    Done,
    RetryLater,
    attempt_batch_plain,
    attempt_list_plain,
)
from millstream.testing import HandlerRun, run

pytestmark = [pytest.mark.worker]

app = App("shop")


@dataclass
class Order:
    customer: str
    amount: float


@dataclass
class Total:
    customer: str
    sum: float


@app.handler("orders", key="customer", retry=Retry(attempts=3), into="totals")
def total(order: Order, state: State) -> dict[str, Any]:
    state["sum"] = state.get("sum", 0) + order.amount
    if order.amount < 0:
        raise Reject("an order cannot be negative")
    if order.amount == 13:
        raise RuntimeError("unlucky")
    if order.amount == 14:
        state["bad"] = object()
    return {"customer": order.customer, "sum": state["sum"]}


@app.handler("orders", key="customer", retry=Retry(attempts=2, then="park"))
def parking(order: Order) -> None:
    raise RuntimeError("gateway says no")


@app.handler("orders", key="customer", retry=Retry(then="block"))
async def blocking(message: Message) -> None:
    raise RuntimeError(f"attempt {message.attempt}")


@app.handler("orders", key="customer", missing_key="unordered", into="seen")
def lenient(message: Message, state: State) -> dict[str, Any]:
    state["seen"] = True
    return {"key": message.key, "stream": message.stream, "had": len(state)}


@app.handler("orders", into="sizes")
async def sizes(orders: list[Order]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"size": len(orders)}


@app.handler("orders")
def without_into(order: Order) -> dict[str, Any]:
    return {"lost": order.amount}


def test_a_message_is_decoded_and_its_outputs_and_state_come_back_as_redis_would_have_them() -> None:
    done = run(app, total, {"customer": "ann", "amount": "7"}, state={"sum": 10})
    assert done == HandlerRun(result="done", outputs=[{"customer": "ann", "sum": "17.0"}], state=State({"sum": 17.0}))
    assert done.outputs_as(Total) == [Total("ann", 17.0)]


def test_a_model_is_encoded_as_a_producer_does() -> None:
    assert run(app, "total", Order("ann", 1.5)).outputs == [{"customer": "ann", "sum": "1.5"}]


@pytest.mark.parametrize(
    ("message", "reason", "error"),
    [
        ({"customer": "ann", "amount": "-1"}, "rejected", "an order cannot be negative"),
        ({"customer": "ann", "amount": "much"}, "undecodable", "amount"),
        ({"amount": "1"}, "missing-key", "the message has no field 'customer'"),
        ({"customer": "ann", "amount": "13"}, "failed", "RuntimeError: unlucky"),
        ({"customer": "ann", "amount": "14"}, "bad-output", "the state cannot be stored"),
    ],
)
def test_a_message_that_becomes_a_dead_letter_shows_its_reason_and_changes_no_state(
    message: dict[str, str], reason: str, error: str
) -> None:
    found = run(app, total, message, state={"sum": 10})
    assert (found.result, found.reason, found.outputs) == ("dead-letter", reason, ())
    assert error in found.error
    assert found.state == ({"sum": 10} if "customer" in message else {})
    assert ("in total\n" in found.traceback) == (reason == "failed")


def test_an_early_attempt_is_retried_and_the_last_ends_as_the_policy_says() -> None:
    unlucky = {"customer": "ann", "amount": "13"}
    assert run(app, total, unlucky, attempt=2).result == "retry"
    assert run(app, total, unlucky, attempt=3).result == "dead-letter"
    parked = run(app, parking, unlucky)
    assert (parked.result, parked.reason, parked.error) == ("parked", "failed", "RuntimeError: gateway says no")
    assert run(app, blocking, unlucky).error == "RuntimeError: attempt 4"


def test_an_output_without_a_stream_is_a_dead_letter() -> None:
    assert run(app, without_into, Order("ann", 1)).reason == "bad-output"


@app.handler("orders", into="rows")
def many(order: Order) -> Iterator[dict[str, bytes]]:
    for number in range(int(order.amount)):
        assert number <= MAX_OUTPUTS, "the outputs were read on"
        yield {"row": order.customer.encode()}


@app.handler("orders", into="rows", batch_size=10)
def many_of_batch(orders: list[Order]) -> list[dict[str, str]]:
    return [{"row": order.customer} for order in orders for _ in range(int(order.amount))]


def test_a_message_has_at_most_so_many_outputs_and_an_endless_generator_is_stopped_there() -> None:
    assert len(run(app, many, Order("ann", MAX_OUTPUTS)).outputs) == MAX_OUTPUTS
    refused = run(app, many, Order("ann", 10 * MAX_OUTPUTS))
    assert (refused.result, refused.reason) == ("dead-letter", "bad-output")
    assert "more than 10,000 outputs" in refused.error
    assert "millstream.producer.Producer" in refused.error


def test_a_message_has_at_most_so_many_bytes_of_outputs() -> None:
    row = "x" * (16 * 2**20 - 10)  # packed with its name exactly half of the bound
    assert len(run(app, many, Order(row, 2)).outputs) == 2
    assert run(app, many, Order(row, 3)).reason == "bad-output"
    assert run(app, many, Order(row + "x", 2)).reason == "bad-output"


@app.handler("orders", into="rows")
def alone(order: Order) -> dict[str, Any]:
    return {"row": order.customer}


def test_one_output_has_at_most_so_many_bytes() -> None:
    row = "x" * 32 * 2**20
    assert len(run(app, alone, Order(row[:-20], 1)).outputs) == 1
    assert run(app, alone, Order(row, 1)).reason == "bad-output"


def test_the_outputs_of_a_batch_have_the_same_bounds_and_its_messages_are_run_alone_beyond_them() -> None:
    def message(amount: int) -> Message:
        return Message("orders", "5-1", [b"customer", b"ann", b"amount", str(amount).encode()])

    handler = app.handlers["many_of_batch"]
    half, whole = message(MAX_OUTPUTS // 2 + 1), message(MAX_OUTPUTS + 1)
    assert isinstance(attempt_batch_plain(handler, [half, half])[1], RetryLater)
    alone = attempt_batch_plain(handler, [whole])[1]
    assert isinstance(alone, DeadLettered)
    assert alone.reason == "bad-output"


def test_a_message_without_a_key_has_no_state() -> None:
    found = run(app, lenient, {"other": "1"}, state={"seen": 1, "more": 2}, stream="orders.eu")
    assert (found.outputs, found.state) == ([{"stream": "orders.eu", "had": "1"}], {})


@app.handler("orders", key="customer")
def counting(message: Message, state: State) -> None:
    state["count"] = state.get("count", 0) + 1


def test_the_state_of_a_handler_that_returns_nothing_is_changed() -> None:
    assert run(app, counting, {"customer": "ann"}, state={"count": 1}).state == {"count": 2}


def test_an_async_handler_runs_also_where_a_loop_is_running() -> None:
    async def in_loop() -> HandlerRun:
        return run(app, sizes, Order("ann", 1))

    assert asyncio.run(in_loop()).outputs == run(app, sizes, Order("ann", 1)).outputs == [{"size": "1"}]


def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator whose function takes its arguments by name alone."""
    if asyncio.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(**arguments: Any) -> Any:
            return await function(**arguments)
    else:

        @functools.wraps(function)
        def wrapper(**arguments: Any) -> Any:
            return function(**arguments)

    return wrapper


def by_name_alone(*, message: Message) -> dict[str, str]:
    return {"id": message.id}


async def by_name_alone_async(*, message: Message) -> dict[str, str]:
    return {"id": message.id}


@by_name
def decorated(message: Message) -> dict[str, str]:
    return {"id": message.id}


@by_name
async def decorated_async(message: Message) -> dict[str, str]:
    return {"id": message.id}


@pytest.mark.parametrize("function", [by_name_alone, by_name_alone_async, decorated, decorated_async])
def test_a_handler_of_the_message_may_take_it_by_name_alone(function: Callable[..., Any]) -> None:
    own = App("named")
    own.handler("in", into="out")(function)
    assert run(own, function, {"n": "1"}).outputs == [{"id": "1-1"}]


def test_an_output_of_any_bytes_is_read_back_unchanged() -> None:
    binary = App("binary")

    @binary.handler("orders", into="copies")
    def copy(message: Message) -> dict[str, bytes]:
        return {"body": message.fields["body"]}

    @dataclass
    class Copy:
        body: bytes

    found = run(binary, copy, Message("orders", "5-1", [b"body", b"\xff\x00"]))
    assert found.outputs_as(Copy) == [Copy(b"\xff\x00")]
    with pytest.raises(DecodeError):
        found.outputs_as(Order)


def test_a_run_with_a_wrong_handler_state_or_message_is_refused() -> None:
    with pytest.raises(ConfigError, match="app 'shop' has no handler 'nothing'; it has total, parking"):
        run(app, "nothing", {"a": 1})
    with pytest.raises(ConfigError, match="takes no State"):
        run(app, without_into, Order("ann", 1), state={})
    with pytest.raises(OutputError):
        run(app, total, {"customer": object()})


@app.handler("orders", key="customer", into="rows", batch_size=10)
def many_of_key(orders: list[Order], state: State) -> dict[str, int]:
    state["count"] = state.get("count", 0) + len(orders)
    return {"count": state["count"]}


def test_a_handler_of_lists_of_a_key_gets_a_list_of_one_and_the_state() -> None:
    done = run(app, many_of_key, Order("ann", 1), state={"count": 4})
    assert (done.outputs, done.state) == ([{"count": "5"}], {"count": 5})


def test_a_list_of_a_key_ends_before_the_first_message_that_cannot_be_decoded() -> None:
    good, bad = (Message("orders", "5-1", [b"customer", b"ann", b"amount", amount], b"ann") for amount in (b"1", b"x"))
    handler = app.handlers["many_of_key"]
    count, outcome = attempt_list_plain(handler, [good, good, bad, good], b"")
    assert (count, isinstance(outcome, Done)) == (2, True)
    count, outcome = attempt_list_plain(handler, [bad, good], b"")
    assert (count, isinstance(outcome, DeadLettered)) == (1, True)
