"""Timers of a key: what a handler may return, and the error of each mistake."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from millstream import After, App, Cancel, Limit, Message, Retry, State
from millstream.delivery.effects import Effects
from millstream.handlers.attempt import Done, RetryLater, attempt, attempt_plain
from millstream.handlers.encoding import unpack_output
from millstream.handlers.time_limit import TimeLimit
from millstream.testing import HandlerRun, SetTimer, run

pytestmark = [pytest.mark.worker]


@dataclass
class Event:
    order: str
    kind: str = "placed"


def outcome(result: Any, **options: Any) -> HandlerRun:
    """What an engine makes of a handler with the key `order` that returns `result`."""
    app = App("shop")

    def handle(event: Event, state: State) -> Any:
        state["seen"] = True
        return result() if callable(result) else result

    app.handler("orders", **{"key": "order", **options})(handle)
    return run(app, handle, Event("o1"))


def problem(result: Any, **options: Any) -> str:
    """The error of the dead letter that such a handler makes; it has no effect."""
    found = outcome(result, **options)
    assert (found.result, found.reason, found.timers, found.state) == ("dead-letter", "bad-output", {}, {})
    return found.error


def test_a_timer_is_returned_alone_in_a_list_or_from_an_iterator_and_needs_no_output_stream() -> None:
    remind = After("30m", Event("o1", "remind"), name="remind")
    expected = {"remind": SetTimer(delay_ms=1_800_000, fields={"order": "o1", "kind": "remind"})}
    for result in (remind, [remind], (remind,), lambda: iter([remind])):
        found = outcome(result)
        assert (found.result, found.timers, found.outputs, found.state) == ("done", expected, [], {"seen": True})
    mixed = outcome([{"a": "1"}, remind, {"a": "2"}], into="out")
    assert mixed.outputs == [{"a": "1"}, {"a": "2"}]
    assert mixed.timers == expected
    assert outcome(Cancel(name="remind")).timers == {"remind": None}
    assert outcome([remind, Cancel(name="remind")]).timers == {"remind": None}
    assert outcome([]).result == "done"


def test_a_message_that_lacks_the_field_of_the_key_gets_it() -> None:
    found = outcome(After("1d", {"kind": "remind"}, name="remind"))
    assert found.timers == {"remind": SetTimer(delay_ms=86_400_000, fields={"order": "o1", "kind": "remind"})}


def test_a_key_function_and_a_whole_stream_find_the_key_of_the_message() -> None:
    remind = After("0s", Event("o2", "remind"), name="remind")
    assert outcome(remind, key=lambda message: message.fields["order"][:1]).timers
    assert outcome(remind, key=None, order="stream").timers
    assert "its message has the key b'2', and the message that sets it b'1'" in problem(
        remind, key=lambda message: message.fields["order"][1:]
    )
    assert "the key function raised KeyError" in problem(
        After("0s", {"order": "x"}, name="remind"), key=lambda message: message.fields["kind"]
    )


@pytest.mark.parametrize(
    ("delay", "delay_ms"),
    [
        ("0s", 0),
        ("366d", 366 * 86_400_000),
        (timedelta(milliseconds=20), 20),
        (timedelta(microseconds=1), 1),
        (timedelta(0), 0),
    ],
)
def test_a_delay_is_text_or_a_timedelta_and_is_rounded_up(delay: Any, delay_ms: int) -> None:
    assert After(delay, {}, name="x").delay_ms == delay_ms


@pytest.mark.parametrize(
    "delay", ["", "30", "-1s", "1.5h", "367d", "30 m", "tomorrow", 30, None, True, timedelta(-1), timedelta.max]
)
def test_any_other_delay_is_an_error_that_names_the_forms(delay: Any) -> None:
    assert "the delay must be text like '30s', '5m', '2h' or '7d', or a timedelta, from 0 to 366 days" in problem(
        lambda: After(delay, Event("o1"), name="remind")
    )


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 101, b"remind", None, 7])
def test_an_impossible_name_is_an_error(name: Any) -> None:
    for make in (lambda: After("1s", Event("o1"), name=name), lambda: Cancel(name=name)):
        assert "must be 1 to 100 letters, digits, '_' or '-'" in problem(make)


def test_a_message_that_the_handler_could_not_take_is_an_error_at_once() -> None:
    where = "shop.handle: After(name='remind'): "
    assert problem(After("1s", {"kind": object()}, name="remind")).startswith(
        where + "field 'kind' cannot be written: a builtins.object has no text form"
    )
    assert problem(After("1s", {}, name="remind")).startswith(where + "the output has no field to write")
    assert problem(After("1s", Event("o2"), name="remind")) == where + (
        "its message has the key b'o2', and the message that sets it b'o1'; use the same key"
    )
    assert problem(After("1s", {"kind": b"\xff"}, name="remind")).startswith(
        where + "the handler cannot take its message: "
    )


def of_tenant(result: Any, **fields: Any) -> HandlerRun:
    """What an engine makes of a handler with a limit of tenants, by cost, that returns `result` after a message of acme."""
    app = App("shop")
    limit = Limit(per="tenant", rate="100/m", cost="tokens")
    app.handler("orders", name="handle", key="order", limit=limit)(lambda message: result)
    return run(app, "handle", {"order": "o1", "tenant": "acme", "tokens": 1, **fields})


def test_a_message_that_the_limit_of_the_handler_could_not_price_is_an_error_at_once() -> None:
    for cost in ({}, {"tokens": "many"}, {"tokens": 101}):
        found = of_tenant(After("1s", {"kind": "remind", **cost}, name="remind"))
        assert (found.result, found.reason, found.timers) == ("dead-letter", "bad-output", {})
        assert found.error.startswith("shop.handle: After(name='remind'): the handler cannot take its message: ")
        assert "tokens" in found.error


def test_a_message_that_lacks_the_field_of_the_limit_gets_it() -> None:
    remind = {"kind": "remind", "tokens": 5}
    found = of_tenant(After("1s", remind, name="remind")).timers["remind"]
    assert found == SetTimer(delay_ms=1_000, fields={"order": "o1", "kind": "remind", "tokens": "5", "tenant": "acme"})
    other = of_tenant(After("1s", {**remind, "tenant": "zeta"}, name="remind")).timers["remind"]
    assert other is not None
    assert other.fields["tenant"] == "zeta"
    app = App("shop")
    app.handler("orders", name="handle", key="order", limit=Limit(per="tenant", at_once=1))(
        lambda message: After("1s", {"kind": "remind"}, name="remind")
    )
    without = run(app, "handle", {"order": "o1"}).timers["remind"]
    assert without is not None
    assert without.fields == {"order": "o1", "kind": "remind"}, "both count for the empty value"


def test_a_handler_without_a_key_or_with_partitions_gets_an_error_that_names_the_option() -> None:
    for one in (After("1s", {"a": 1}, name="remind"), Cancel(name="remind")):
        app = App("shop")
        app.handler("orders", name="handle")(lambda message: one)  # noqa: B023 - run at once
        found = run(app, "handle", {"order": "o1"})
        assert (found.result, found.reason) == ("dead-letter", "bad-output")
        assert found.error.endswith('a timer belongs to a key; give the handler key="field"')
        assert "a handler of partitions cannot have timers" in problem(one, partitions=4)


def test_the_message_of_a_timer_has_the_current_version_unless_it_names_one() -> None:
    upcasts = [lambda fields: {**fields, "kind": "upcast"}]
    found = outcome(After("1s", {"kind": "remind"}, name="remind"), message_upcasts=upcasts)
    fields = {"order": "o1", "kind": "remind", "schema_version": "2"}
    assert found.timers == {"remind": SetTimer(delay_ms=1_000, fields=fields)}
    app, seen = App("shop"), list[Event]()
    app.handler("orders", name="handle", key="order", message_upcasts=upcasts)(seen_by(seen))
    assert run(app, "handle", fields).result == "done"
    assert [event.kind for event in seen] == ["remind"]
    named = outcome(After("1s", {"kind": "remind", "schema_version": 1}, name="remind"), message_upcasts=upcasts)
    assert named.timers["remind"] == SetTimer(delay_ms=1_000, fields={**fields, "schema_version": "1"})


def seen_by(seen: list[Event]) -> Any:
    """A handler that keeps its messages."""

    def handle(event: Event) -> None:
        seen.append(event)

    return handle


@pytest.mark.parametrize("option", ["key", "message_upcasts"])
def test_a_time_limit_that_ends_while_the_message_of_a_timer_is_checked_is_a_failed_attempt(option: str) -> None:
    def find(fields: Any) -> Any:
        if fields["order"] == b"slow":
            raise TimeLimit
        return fields

    app = App("shop")
    options: dict[str, Any] = (
        {"key": lambda message: find(message.fields) and b"k"} if option == "key" else {"message_upcasts": [find]}
    )
    slow = After("1s", {"order": "slow", "schema_version": 1}, name="remind")
    app.handler("orders", name="handle", retry=Retry(attempts=2), **{"key": lambda _: b"k", **options})(lambda _: slow)
    message = Message("orders", "1-0", [b"order", b"o1"], b"k")
    found = attempt_plain(app.handlers["handle"], message, b"")
    assert isinstance(found, RetryLater)
    assert isinstance(found.raised, TimeLimit)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_timer_has_the_key_of_its_message_though_the_handler_changes_the_message(kind: str) -> None:
    remind = After("1s", {"kind": "remind"}, name="remind")

    def change(message: Message) -> After:
        message.key, message.stream = b"other", "elsewhere"
        return remind

    async def change_async(message: Message) -> After:
        return change(message)

    app = App("shop")
    app.handler("orders", name="plain", key="order")(change)
    app.handler("orders", name="async", key="order")(change_async)
    message = Message("orders", "1-0", [b"order", b"o1"], b"o1")
    handler = app.handlers[kind]
    found = attempt_plain(handler, message, b"") if kind == "plain" else asyncio.run(attempt(handler, message, b""))
    assert isinstance(found, Done)
    ((own_id, _, packed),) = found.timers
    assert own_id == f"timer:shop.{kind}:remind:o1".encode()
    assert unpack_output(packed)[-4:] == [b"order", b"o1", b"kind", b"remind"]


def test_an_output_without_an_output_stream_is_still_an_error() -> None:
    assert "returned a list but has no into=" in problem([After("1s", Event("o1"), name="x"), {"a": 1}])


def test_a_commit_without_timers_has_no_argument_for_them() -> None:
    unit = Effects(b"kk", b"1", last_id="5-0", first_id="5-0", message_count=1, outputs=[b"\x91x"])
    before = unit.args(0)
    assert before == [b"kk", b"1", "5-0", "5-0", 1, 0, "", "", "", 0, 1, 8, 0, b"x", 0]
    assert unit.is_ack_only is False
    timed = Effects(b"kk", b"1", last_id="5-0", first_id="5-0", message_count=1, outputs=[b"\x91x"])
    timed.add_timers([(b"t", 5, b"yy"), (b"u", "", b"")])
    assert timed.args(0) == [*before[:-1], "T", 2, b"t", 5, b"yy", b"u", "", b"", 0]
    assert timed.size == unit.size + 4
    assert not Effects(b"kk", b"1", timers=[(b"u", "", b"")]).is_ack_only
