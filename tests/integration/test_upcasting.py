"""Versions of states and messages: upcasts bring earlier ones to the current shape, and later states are left alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream import Message, Retry, State
from millstream.admin.key_queues import blocked_queues, explain, last_errors, read_queues
from millstream.admin.state_scan import StoredState
from millstream.errors import ConfigError
from millstream.handlers.attempt import DeadLettered, Done, RetryLater, attempt_list_plain, attempt_plain
from millstream.handlers.handler import Handler
from millstream.handlers.upcasting import encode_state, parse_state, parse_version_and_state
from millstream.observability.failure_log import Failure, FailureLog
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.spark.source.state_options import parse_state_options
from millstream.spark.source.state_partitions import record_batch
from millstream.worker.dry_run import dry_run
from tests.support.pages import run_tests
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, make, working

pytestmark = [pytest.mark.keys, pytest.mark.worker, pytest.mark.spark]

Engine = Callable[[Client, Handler, str], None]


def total(message: Message, state: State) -> dict[str, Any]:
    """The current version: cents of a currency."""
    state["cents"] += int(message.fields["n"])
    return {"n": state["cents"]}


def in_cents(state: dict[str, Any]) -> dict[str, Any]:
    return {"cents": int(state["sum"] * 100)}


def with_currency(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "currency": "EUR"}


def failing(state: dict[str, Any]) -> dict[str, Any]:
    return {"cents": state["total"]}


def current(**options: Any) -> Handler:
    return make(total, key="k", **{"state_upcasts": [in_cents, with_currency], **options})


def on_worker(client: Client, handler: Handler, until: str) -> None:
    with working(client, handler):
        eventually(lambda: client.execute("XLEN", until) > 0, f"an entry of {until}")


def on_spark(client: Client, handler: Handler, until: str) -> None:
    bench = TaskFixture(client)
    ((entry_id, fields),) = client.execute("XRANGE", "in", "-", "+")
    names = dict(zip(fields[::2], fields[1::2], strict=True))
    bench.process(handler, bench.rows((int(entry_id.partition(b"-")[0]), names[b"k"], names)))
    assert client.execute("XLEN", until) > 0


ENGINES = pytest.mark.parametrize("run", [on_worker, on_spark], ids=["workers", "spark"])


def stored(client: Client) -> bytes:
    found: bytes = client.execute("HGET", KEYS.state, "a")
    return found


def give_state(client: Client, blob: bytes) -> None:
    client.execute("HSET", KEYS.state, "a", blob)
    client.execute("XADD", "in", "1-0", "k", "a", "n", 50)


@ENGINES
@pytest.mark.parametrize(
    "blob",
    [
        encode_state(State(sum=1.5)),
        encode_state(State(cents=150), 2),
        encode_state(State(cents=150, currency="EUR"), 3),
    ],
    ids=["version 1", "version 2", "version 3"],
)
def test_a_state_of_any_version_is_current_for_the_handler_and_stored_as_current(
    client: Client, run: Engine, blob: bytes
) -> None:
    give_state(client, blob)
    run(client, current(), "out")
    assert parse_version_and_state(stored(client)) == (3, {"cents": 200, "currency": "EUR"})


@ENGINES
def test_a_failing_upcast_is_a_dead_letter_and_leaves_the_state_as_it_was(client: Client, run: Engine) -> None:
    before = encode_state(State(sum=1.5))
    give_state(client, before)
    run(client, current(state_upcasts=[failing, with_currency]), KEYS.dead_letters)
    ((_, letter),) = client.execute("XRANGE", KEYS.dead_letters, "-", "+")
    found = dict(zip(letter[::2], letter[1::2], strict=True))
    assert found[b"reason"] == b"undecodable"
    assert b"state_upcasts[0], from version 1 of the state of the key, raised KeyError: 'total'" in found[b"error"]
    assert stored(client) == before


def failing_first(attempts: list[int]) -> Callable[[Message, State], dict[str, Any]]:
    """The current version, whose first attempt fails; appends the number of each attempt to `attempts`."""

    def total_later(message: Message, state: State) -> dict[str, Any]:
        attempts.append(message.attempt)
        if len(attempts) == 1:
            raise RuntimeError("not yet")
        return total(message, state)

    return total_later


@pytest.mark.parametrize("is_older_stopped", [True, False], ids=["old stopped", "old and new at once"])
def test_workers_of_an_older_app_leave_a_newer_state_alone_until_a_newer_worker_takes_its_message(
    client: Client, is_older_stopped: bool
) -> None:
    before = encode_state(State(cents=150, currency="EUR"), 3)
    give_state(client, before)
    client.execute("XADD", "in", "2-0", "k", "other", "n", 7)
    at_once = Retry(attempts=2, delay_ms=0, max_delay_ms=0, then="park")
    older = make(older_total, key="k", state_upcasts=[in_cents], retry=at_once)
    due: set[bytes | None] = set()
    attempts: list[int] = []
    newer = make(failing_first(attempts), key="k", state_upcasts=[in_cents, with_currency], retry=at_once)

    def has_waited_beyond_the_policy() -> bool:
        due.add(client.execute("ZSCORE", KEYS.backoff, b"ka"))
        return len(due - {None}) > 2

    with working(client, older, "older") as loop:
        eventually(has_waited_beyond_the_policy)
        eventually(lambda: client.execute("XLEN", "out") == 1, "the message of another key")
        assert (stored(client), client.execute("XLEN", KEYS.dead_letters)) == (before, 0)
        if is_older_stopped:
            loop.stop()
            assert loop.ended.wait(FAIL_SAFE_S)
        with working(client, newer, "newer"):
            eventually(lambda: client.execute("XLEN", "out") == 2, "the message of the key")
    assert parse_version_and_state(stored(client)) == (3, {"cents": 200, "currency": "EUR"})
    assert (attempts, client.execute("HLEN", KEYS.crashes)) == ([1, 2], 0)


def test_nothing_remains_of_a_wait_for_newer_code(client: Client) -> None:
    give_state(client, encode_state(State(cents=150, currency="EUR"), 3))
    older = current(state_upcasts=[in_cents], retry=Retry(max_delay_ms=1_000))
    with working(client, older, "older"):
        eventually(lambda: client.execute("HGET", KEYS.crashes, "1-0f") == b"0", "a wait")
    with working(client, current(), "newer"):
        eventually(lambda: client.execute("XLEN", "out") == 1, "the message of the key")
    assert client.execute("HLEN", KEYS.crashes) == 0


def test_nothing_remains_of_a_wait_for_newer_code_on_spark(client: Client) -> None:
    give_state(client, encode_state(State(cents=150, currency="EUR"), 3))
    bench = TaskFixture(client)
    bench.process(
        current(state_upcasts=[in_cents], retry=Retry(max_delay_ms=1_000)), bench.rows((1, b"a", {"k": "a", "n": 50}))
    )
    assert client.execute("HGET", KEYS.crashes, "1-0f") == b"0"
    eventually(lambda: bench.runnable(current()).queues == [b"ka"], "the end of the wait")
    bench.process_deferred(current())
    assert (bench.outputs(), client.execute("HLEN", KEYS.crashes)) == ([200], 0)


def test_a_key_that_waits_for_newer_code_is_blocked_and_says_why(client: Client) -> None:
    give_state(client, encode_state(State(cents=150, currency="EUR"), 3))
    with working(client, current(state_upcasts=[in_cents], retry=Retry(max_delay_ms=60_000))):
        (queue,) = eventually(lambda: blocked_queues(client, KEYS), "the wait")
    (queue,) = read_queues(client, KEYS, [b"ka"])
    (last,) = last_errors(client, [(KEYS, queue)])
    assert explain(queue, last).startswith(
        "blocked, as it waits for newer code: attempt 1 of its first entry is due in"
    )
    assert last.error.startswith("the state of the key has version 3, and this handler knows versions up to 2")


def test_the_log_of_a_wait_names_no_failed_attempt_and_is_not_the_last_of_its_message() -> None:
    handler = current(state_upcasts=[in_cents], retry=Retry(attempts=1))
    outcome = attempt_plain(handler, MESSAGE, encode_state(State(cents=1), 3))
    assert isinstance(outcome, RetryLater)
    failures: list[Failure] = []
    log = FailureLog(handler, on_failure=lambda failure, _: failures.append(failure))
    log.attempt_failed("in", "1-0", b"a", 1, outcome, delay_ms=10_000)
    (failure,) = failures
    assert failure.text == (
        "app.handle: message 1-0 of in, key a waits for newer code: the state of the key has version 3, and this handler "
        "knows versions up to 2: deploy the newer app; it blocks its key, retrying in 10.0 s"
    )
    assert not failure.is_last


MESSAGE = Message("in", "1-0", [b"k", b"a", b"n", b"1"], b"a")


@pytest.mark.parametrize(
    ("longest_ms", "wait_ms"), [(0, 1_000), (1, 1_000), (10_000, 10_000), (60_000, 60_000), (10**9, 60_000)]
)
def test_a_wait_for_newer_code_lasts_as_long_as_the_longest_back_off_within_its_bounds(
    longest_ms: float, wait_ms: float
) -> None:
    handler = current(state_upcasts=[in_cents], retry=Retry(delay_ms=0, max_delay_ms=longest_ms, jitter=0))
    outcome = attempt_plain(handler, MESSAGE, encode_state(State(cents=1), 3))
    assert isinstance(outcome, RetryLater)
    assert outcome.delay_ms == wait_ms


def older_total(message: Message, state: State) -> dict[str, Any]:
    """Version 2."""
    state["cents"] = state.get("cents", 0) + int(message.fields["n"])
    return {"n": state["cents"]}


def test_a_run_of_an_older_app_on_spark_defers_the_message_of_a_newer_state_and_a_newer_run_continues(
    client: Client,
) -> None:
    before = encode_state(State(cents=150, currency="EUR"), 3)
    give_state(client, before)
    bench = TaskFixture(client)
    at_once = Retry(attempts=2, delay_ms=0, max_delay_ms=0, jitter=0)
    older = make(older_total, key="k", state_upcasts=[in_cents], retry=at_once)
    bench.process(older, bench.rows((1, b"a", {"k": "a", "n": 50}), (2, b"other", {"k": "other", "n": 7})))
    assert (stored(client), bench.dead(), bench.outputs()) == (before, [], [7])
    for again in (True, True, False):
        eventually(lambda: bench.runnable(older).queues == [b"ka"], "the end of the wait")
        if again:
            bench.process_deferred(older)
    attempts: list[int] = []
    newer = make(failing_first(attempts), key="k", state_upcasts=[in_cents, with_currency], retry=at_once)
    bench.process_deferred(newer)
    assert (bench.outputs(), parse_state(stored(client))["cents"], attempts) == ([7, 200], 200, [1, 2])
    assert client.execute("HLEN", KEYS.crashes) == 0


def test_a_check_of_an_older_app_reports_a_newer_state(client: Client) -> None:
    give_state(client, encode_state(State(cents=150, currency="EUR"), 3))
    (failure,) = dry_run(client, current(state_upcasts=[in_cents]), sample=10).failures
    assert "the state of the key has version 3, and this handler knows versions up to 2" in failure.error


def test_a_handler_without_versions_refuses_to_read_a_state_with_one() -> None:
    unversioned = make(total, key="k")
    message = Message("in", "1-0", [b"k", b"a", b"n", b"1"], b"a", attempt=9)
    blob = encode_state(State(cents=1), 2)
    outcome = attempt_plain(unversioned, message, blob)
    assert isinstance(outcome, RetryLater)
    assert "has version 2, and this handler knows versions up to 1" in outcome.error
    lists = make(total_of_list, key="k")
    assert isinstance(attempt_list_plain(lists, [message, message], blob)[1], RetryLater)


def total_of_list(messages: list[Message], state: State) -> None: ...


def test_states_of_handlers_without_versions_are_stored_as_before() -> None:
    assert encode_state(State(n=1)) == msgspec.msgpack.encode({"n": 1})
    outcome = attempt_plain(
        make(total, key="k"), Message("in", "1-0", [b"n", b"1"], b"a"), encode_state(State(cents=1))
    )
    assert isinstance(outcome, Done)
    assert outcome.state == msgspec.msgpack.encode({"cents": 2})


FORGED = msgspec.msgpack.encode((2**40, {"a": 1}))


@pytest.mark.parametrize(
    "blob", [b"\x92\x00\x80", b"\x92\xa1x\x80", b"\x92\x02", b"\x92\x02\x01", b"\x93\x02\x80\x80", FORGED]
)
def test_a_damaged_state_with_a_version_is_a_dead_letter(blob: bytes) -> None:
    outcome = attempt_plain(current(), Message("in", "1-0", [b"n", b"1"], b"a"), blob)
    assert isinstance(outcome, DeadLettered)
    assert "damaged" in outcome.error


@pytest.mark.parametrize("returned", [None, 5, [1]])
def test_an_upcast_that_returns_no_mapping_says_so(returned: Any) -> None:
    handler = current(state_upcasts=[lambda _: returned, with_currency])
    outcome = attempt_plain(handler, Message("in", "1-0", [b"n", b"1"], b"a"), encode_state(State(sum=1)))
    assert isinstance(outcome, DeadLettered)
    assert f"returned a {type(returned).__name__}; return a mapping" in outcome.error


@pytest.mark.parametrize("state_as", ["json", "binary"])
def test_a_state_with_a_forged_version_is_a_row_without_one_in_spark(state_as: str) -> None:
    options = parse_state_options({"url": "redis://127.0.0.1", "handler": "a.h", "stateAs": state_as}, {})
    page = [StoredState("in", b"a", one) for one in (FORGED, encode_state(State(n=1), 2), encode_state(State(n=1)))]
    rows = record_batch(page, options, options.schema).to_pylist()
    assert [one["version"] for one in rows] == [None, 2, 1]
    json_texts = [None, '{"n":1}', '{"n":1}']
    assert [one["state"] for one in rows] == (json_texts if state_as == "json" else [one.blob for one in page])


class Unreadable(Mapping[str, Any]):
    """A mapping that raises where it is read."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class Unnamed:
    """A name that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"\ud800": "x"}, "message_upcasts[0] returned what cannot be a message"),
        ({Unnamed(): "x"}, "message_upcasts[0] returned what cannot be a message"),
        (Unreadable(), "message_upcasts[0], from version 1 of the message, raised RuntimeError: a"),
    ],
)
def test_a_message_upcast_never_raises_out_of_an_attempt(returned: Any, says: str) -> None:
    handler = make(
        total_of_list, key="k", message_upcasts=[lambda fields: returned if fields["k"] == b"bad" else fields]
    )
    good, bad = Message("in", "1-0", [b"k", b"a"], b"a"), Message("in", "2-0", [b"k", b"bad"], b"a")
    count, _ = attempt_list_plain(handler, [good, bad], b"")
    assert count == 1
    outcome = attempt_list_plain(handler, [bad], b"")[1]
    assert isinstance(outcome, DeadLettered)
    assert says in outcome.error


def test_a_state_upcast_never_raises_out_of_an_attempt() -> None:
    handler = current(state_upcasts=[lambda _: Unreadable(), with_currency])
    outcome = attempt_plain(handler, Message("in", "1-0", [b"n", b"1"], b"a"), encode_state(State(sum=1)))
    assert isinstance(outcome, DeadLettered)
    assert "state_upcasts[0], from version 1 of the state of the key, raised RuntimeError: a" in outcome.error


@pytest.mark.parametrize("version", [b"", b"0", b"x", b"-1", b"9" * 10])
def test_a_version_of_a_message_that_is_no_whole_number_from_1_makes_a_dead_letter(version: bytes) -> None:
    handler = make(on_order, message_upcasts=[rename_n])
    outcome = attempt_plain(handler, Message("in", "1-0", [b"k", b"a", b"schema_version", version]), b"")
    assert isinstance(outcome, DeadLettered)
    assert "'schema_version' must be a whole number from 1" in outcome.error


@dataclass
class Order:
    k: str
    amount: int
    schema_version: int = 2


def test_the_program_of_the_page_and_its_tests_pass(tmp_path: Path) -> None:
    assert "2 passed" in run_tests("docs/upcasting.md", tmp_path)


def rename_n(fields: dict[str, bytes]) -> dict[str, object]:
    return {**fields, "amount": fields["n"]}


async def rename_later(fields: dict[str, bytes]) -> dict[str, object]:
    return rename_n(fields)


def on_order(order: Order) -> Order:
    return order


def test_a_model_that_declares_its_version_is_published_and_returned_with_it(client: Client) -> None:
    handler = make(on_order, key="k", message_upcasts=[rename_n])
    client.execute("XADD", "in", "1-0", "k", "a", "n", 50)
    with Producer(client.url) as producer:
        producer.publish("in", Order(k="a", amount=70))
    with working(client, handler):
        eventually(lambda: client.execute("XLEN", "out") == 2, "both outputs")
    fields = [entry[1] for entry in client.execute("XRANGE", "out", "-", "+")]
    assert fields == [[b"k", b"a", b"amount", amount, b"schema_version", b"2"] for amount in (b"50", b"70")]


def test_an_upcast_keeps_names_and_values_that_are_not_text() -> None:
    seen: list[Message] = []

    def see(message: Message) -> None:
        seen.append(message)

    handler = make(see, into=None, message_upcasts=[lambda fields: {**fields, "more": 1}])
    raw = Message("in", "1-0", [b"\xff", b"\xfe", b"n", b""])
    attempt_plain(handler, raw, b"")
    assert seen[0].pairs == [b"\xff", b"\xfe", b"n", b"", b"more", b"1", b"schema_version", b"2"]
    assert raw.pairs == [b"\xff", b"\xfe", b"n", b""]


def test_an_upcast_whose_result_cannot_be_a_message_makes_a_dead_letter() -> None:
    handler = make(on_order, message_upcasts=[lambda fields: {**fields, "amount": object()}])
    outcome = attempt_plain(handler, Message("in", "1-0", [b"k", b"a"]), b"")
    assert isinstance(outcome, DeadLettered)
    assert "message_upcasts[0] returned what cannot be a message: field b'amount'" in outcome.error


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (on_order, {"state_upcasts": [in_cents]}, "state_upcasts is for handlers that take a State"),
        (total, {"state_upcasts": in_cents}, "state_upcasts must be a list of functions"),
        (on_order, {"message_upcasts": ["to_2"]}, "message_upcasts must be a list of functions"),
        (on_order, {"message_upcasts": []}, "message_upcasts must be a list of functions"),
        (total, {"state_upcasts": ()}, "state_upcasts must be a list of functions"),
        (on_order, {"message_upcasts": [rename_later]}, r"message_upcasts\[0\] must be a plain function, not async"),
        (on_order, {"message_upcasts": [rename_n] * 2}, "lead to version 3, and Order.schema_version is 2 by default"),
    ],
)
def test_a_wrong_declaration_of_versions_is_refused_when_the_app_is_loaded(
    function: Callable[..., Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(function, key="k", **options)
