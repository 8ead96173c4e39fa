"""Apps and handlers: a mistake in the app file is one clear line that says what to change."""

import functools
import importlib
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream import App, Message, Retry, State, load_app
from millstream.errors import ConfigError, DecodeError
from millstream.model import EntryId
from millstream.redis_client.key_names import HandlerKeys, hash_tag

pytestmark = [pytest.mark.worker, pytest.mark.cli]


@dataclass
class Order:
    """A model."""

    customer: str
    amount: int


def takes_order(order: Order) -> None:
    """A well-formed handler."""


def takes_state(order: Order, state: State) -> None:
    """A well-formed handler with state."""


def takes_two_models(order: Order, other: Order) -> None:
    """Has one model too many."""


def takes_nothing() -> None:
    """Takes no message."""


def takes_only_state(state: State) -> None:
    """Takes no message."""


def takes_unknown(order: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Its annotation cannot be read."""


def takes_rest(*orders: Order) -> None:
    """Has a parameter that cannot be filled."""


def takes_orders(orders: list[Order]) -> None:
    """A well-formed handler of batches."""


def takes_orders_and_state(orders: list[Order], state: State) -> None:
    """State belongs to one key."""


def takes_orders_and_message(orders: list[Order], message: Message) -> None:
    """Mixes lists and single things."""


def takes_list_of_anything(orders: list[Any]) -> None:
    """Does not say what it takes."""


def takes_number(amount: int) -> None:
    """Takes a field where it can take the whole message."""


def takes_number_and_mapping(amount: int, rest: dict[str, str]) -> None:
    """Takes two things that are no models."""


def takes_order_and_mapping(order: Order, rest: dict[str, str]) -> None:
    """Has an annotation that nothing fills."""


def takes_order_and_rest(order: Order, rest) -> None:  # type: ignore[no-untyped-def]
    """Has a parameter without an annotation."""


async def yields_outputs(order: Order) -> AsyncIterator[dict[str, str]]:
    """Would return an iterator that no engine reads."""
    yield {}


class MakesAnObject:
    """Would be called for each message, and process none."""

    def __init__(self, order: Order) -> None: ...


class Callables:
    """An object that can be called, and one of its methods."""

    def __call__(self, order: Order) -> None: ...

    def method(self, order: Order) -> None:
        """A well-formed handler."""


async def async_key(message: Message) -> str:
    """A key function that cannot be used."""
    return ""


MISTAKES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (takes_order, (), {}, "name the streams it reads"),
    (takes_order, ("a",), {"pattern": "b*"}, "one of the three"),
    (takes_order, ("a", "a"), {}, "named twice"),
    (takes_order, ("",), {}, "non-empty text"),
    (takes_order, (["a", "b"],), {}, 'give several streams one after the other, like "orders", "payments"'),
    (takes_order, ("orders:*",), {}, "'orders:*' is a pattern, not a stream: write pattern='orders:*'"),
    (takes_order, ("a",), {"keyy": "customer"}, "unknown option 'keyy'; did you mean 'key'?"),
    (takes_order, ("a",), {"colour": 1}, "unknown option 'colour'; known options: pattern, key"),
    (takes_order, ("a",), {"key": "custmer"}, "not a field of Order; did you mean 'customer'?"),
    (takes_order, ("a",), {"key": "zzz"}, "not a field of Order; it has customer, amount"),
    (takes_order, ("a",), {"key": 7}, "key must be the name of a field or a function"),
    (takes_order, ("a",), {"key": async_key}, "must be a plain function, not async"),
    (takes_order, ("a",), {"retry": 3}, "retry must be a Retry"),
    (takes_order, ("a",), {"into": "a"}, "read its own output"),
    (takes_order, (), {"pattern": "a*", "into": "abc"}, "one of its streams"),
    (takes_order, ("a,b",), {}, "must not contain a comma"),
    (takes_order, ("a",), {"into": 5}, "into must be the name of a stream"),
    (takes_order, ("a",), {"into_maxlen": 0, "into": "b"}, "positive number"),
    (takes_order, ("a",), {"missing_key": "ignore"}, "'dead-letter' or 'unordered'"),
    (takes_order, ("a",), {"concurrency": 0}, "at least 1"),
    (takes_order, ("a",), {"name": "a b"}, "letters, digits"),
    (takes_state, ("a",), {}, "takes a State but has no key"),
    (takes_order, ("a",), {"key": "customer", "state_ttl_ms": 5}, "for handlers that take a State"),
    (takes_state, ("a",), {"key": "customer", "state_ttl_ms": 0}, "a whole number of milliseconds from 1 to"),
    (takes_state, ("a",), {"key": "customer", "state_ttl_ms": 1.5}, "a whole number of milliseconds from 1 to"),
    (takes_state, ("a",), {"key": "customer", "state_ttl_ms": True}, "a whole number of milliseconds from 1 to"),
    (takes_two_models, ("a",), {}, "parameter 'other' must be annotated, not with"),
    (takes_order_and_mapping, ("a",), {}, "parameter 'rest' must be annotated, not with dict[str, str]: use a model"),
    (takes_order_and_rest, ("a",), {}, "parameter 'rest' must be annotated: use a model"),
    (takes_number_and_mapping, ("a",), {}, "parameter 'amount': int is not a model; use a dataclass"),
    (MakesAnObject, ("a",), {}, "handler 'MakesAnObject' is a class: write a function with def"),
    (yields_outputs, ("a",), {}, "handler 'yields_outputs' is an async generator: return its outputs as a list"),
    (functools.partial(takes_order), ("a",), {}, "has no name: write a function with def that calls it"),
    (functools.partial(takes_order), ("a",), {"name": "h"}, "cannot be read: functools.partial("),
    (Callables(), ("a",), {"name": "h"}, "class, method, or function; write a function with def that calls it"),
    (takes_nothing, ("a",), {}, "must take the message"),
    (takes_only_state, ("a",), {"key": "customer"}, "must take the message"),
    (takes_unknown, ("a",), {}, "annotations cannot be read: name 'Missing'"),
    (takes_rest, ("a",), {}, "must be a plain parameter"),
    (takes_orders, ("a",), {"order": "stream"}, 'order="stream" runs one message at a time'),
    (takes_orders, ("a",), {"key": "k", "retry": Retry(then="cancel")}, "is for handlers of one message at a time"),
    (takes_orders_and_state, ("a",), {}, "takes a State but has no key"),
    (takes_orders_and_message, ("a",), {}, "takes lists and single values"),
    (
        takes_list_of_anything,
        ("a",),
        {},
        "handler 'takes_list_of_anything': parameter 'orders': Any is not a model; use a dataclass",
    ),
    (takes_number, ("a",), {}, "handler 'takes_number': parameter 'amount': int is not a model; use a dataclass"),
    (takes_order, ("a",), {"batch_size": 5}, "batch_size is for handlers that take a list"),
    (takes_orders, ("a",), {"batch_size": 0}, "batch_size must be a whole number from 1"),
    (takes_orders, ("a",), {"batch_wait_ms": -1}, "batch_wait_ms must be a number"),
    (takes_order, ("a",), {"rate": 0}, "rate must be a number of messages a second, at least 0.000001"),
    (takes_order, ("a",), {"rate": True}, "rate must be a number of messages"),
]


@pytest.mark.parametrize(("function", "streams", "options", "reason"), MISTAKES, ids=[m[3] for m in MISTAKES])
def test_a_mistake_in_a_handler_is_one_line_that_says_what_to_change(
    function: Callable[..., Any], streams: tuple[Any, ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        App("app").handler(*streams, **options)(function)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_function_is_refused_by_its_value() -> None:
    app: Any = App("app")
    for register, kind in (
        (app.handler("a"), "handler"),
        (app.stage("a"), "stage"),
        (app.every("5m", stream="a"), "schedule"),
    ):
        with pytest.raises(ConfigError, match=f"^42 is not a function; a {kind} is a function, with @app"):
            register(42)


def test_a_bound_method_and_a_partial_with_the_names_of_its_function_are_handlers() -> None:
    app = App("app")
    app.handler("a")(Callables().method)
    app.handler("a")(functools.update_wrapper(functools.partial(takes_order), takes_order))
    assert [one.arguments for one in app.handlers.values()] == [(("order", "model"),)] * 2


def test_a_bare_decorator_is_explained() -> None:
    with pytest.raises(ConfigError, match="needs a stream to read"):
        App("app").handler(takes_order)  # type: ignore[arg-type]


def test_two_handlers_of_one_name_are_refused() -> None:
    app = App("app")
    app.handler("a")(takes_order)
    with pytest.raises(ConfigError, match="two handlers or stages named 'takes_order'"):
        app.handler("b")(takes_order)


@pytest.mark.parametrize(
    "values", [{"attempts": 0}, {"delay_ms": -1}, {"factor": 0.5}, {"jitter": -0.1}, {"delay_ms": 10_001}]
)
def test_a_retry_policy_that_makes_no_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Retry"):
        Retry(**values)


def test_retry_delays_grow_by_the_factor_up_to_their_limit() -> None:
    retry = Retry(delay_ms=100, factor=3, max_delay_ms=500, jitter=0)
    assert [retry.delay_after(n) for n in (1, 2, 3, 1000)] == [100, 300, 500, 500]
    jittered = [Retry(delay_ms=100, jitter=0.5).delay_after(1) for _ in range(200)]
    assert all(100 <= wait <= 150 for wait in jittered)
    assert len(set(jittered)) > 100


def test_arguments_are_filled_by_annotation_in_any_order() -> None:
    app = App("app")

    @app.handler("a", key="customer")
    def handle(state: State, message: Message, order: Order) -> None: ...

    message = Message("a", "1-0", [b"customer", b"ann", b"amount", b"3"])
    state = State(n=1)
    assert app.handlers["handle"].bind(message, state) == {
        "state": state,
        "message": message,
        "order": Order("ann", 3),
    }


def test_a_key_function_may_return_text_bytes_or_a_number_and_anything_else_is_refused() -> None:
    def key_of(result: Any) -> bytes | None:
        app = App("app")
        app.handler("a", key=lambda message: result)(takes_order)
        return app.handlers["takes_order"].key_of(Message("a", "1-0", []))

    assert [key_of(value) for value in ("é", b"\xff", 7, 0, None, "", b"")] == [
        "é".encode(),
        b"\xff",
        b"7",
        b"0",
        None,
        None,
        None,
    ]
    for wrong in (1.5, ["a"], True):
        with pytest.raises(DecodeError, match="key function returned"):
            key_of(wrong)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_this_name", "needs the module 'nothing_of_this_name', which is not installed"),
        ("1 / 0", r"ZeroDivisionError: division by zero .*line 1\)"),
        ("x = 1\ndef broken(:", r"SyntaxError: invalid syntax \(.*/app_\d+\.py, line 2\)$"),
        ("x = 1", r"no App named 'app'; define one"),
        ("from millstream import App\napp = App('a')", "has no handlers"),
        ("from millstream import App\nother = App('a')", r"no App named 'app'; it has other: use .*:other"),
        ("from millstream import App\napp = App('a b')", "must be 1 to 100 letters"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_a_mistake_in_an_app_file_is_one_clear_line(tmp_path: Path, text: str, reason: str) -> None:
    name = f"app_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_app(str(tmp_path / f"{name}.py:app"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["", ":app", "./shop:app", "..shop"])
def test_what_names_neither_a_file_nor_a_module_is_refused_with_what_to_give(target: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"names neither a file nor a module: give path/to/file\.py:app, or module:app from its folder$",
    ):
        load_app(target)


def test_a_missing_file_or_module_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file 'nowhere/app\.py'"):
        load_app("nowhere/app.py:app")
    with pytest.raises(ConfigError, match="module 'no_such_module_here' not found"):
        load_app("no_such_module_here:app")


def test_a_module_that_an_app_lacks_is_named_with_the_file_and_line_that_import_it(tmp_path: Path) -> None:
    (tmp_path / "app_that_lacks_a_module.py").write_text("import os\n\nimport helper_that_lacks_a_module\n")
    helper = tmp_path / "helper_that_lacks_a_module.py"
    for text in ("import no_such_thing\n", "from importlib import import_module\n\nimport_module('no_such_thing')\n"):
        helper.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_app(str(tmp_path / "app_that_lacks_a_module.py:app"))
        line = text.count("\n")
        assert f"needs the module 'no_such_thing', which is not installed here ({helper}, line {line}); inst" in str(
            caught.value
        )
        assert "\n" not in str(caught.value)
        importlib.invalidate_caches()


def test_an_app_file_is_importable_by_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    (tmp_path / "good_app_of_this_test.py").write_text(
        "from millstream import App, Message\napp = App('good')\n@app.handler('a')\ndef handle(message: Message): ...\n"
    )
    assert list(load_app(str(tmp_path / "good_app_of_this_test.py")).handlers) == ["handle"]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "elsewhere"]


def test_entry_ids_are_ordered_as_numbers() -> None:
    assert EntryId.parse("5-10") > EntryId.parse(b"5-9")
    assert str(EntryId.parse("7", default_seq=3)) == "7-3"
    for wrong in ("", "-", "5-", "-5", "a-b", "5-1-2", "+5-1", "٣-1"):
        with pytest.raises(ConfigError, match="is not an entry id"):
            EntryId.parse(wrong)


STREAMS = ["plain", "a:b.c", "orders:{1}", "{x}y", "a{b", "a{b}:c}:d", "{x}:y:h.z:meta", "sp ace", "n\udcff"]


@pytest.mark.parametrize("stream", STREAMS)
def test_all_keys_of_a_handler_share_the_streams_slot_and_can_be_read_back(stream: str) -> None:
    keys = HandlerKeys("app", "handler", stream)
    for key in (keys.meta, keys.offsets, keys.state, keys.crashes, keys.dead_letters):
        assert hash_tag(key) == hash_tag(stream)
        assert HandlerKeys.parse(key) == keys
    for foreign in ("other:key", "millstream:{a}:a:x", "", "millstream:{a}:b:x.y:meta"):
        with pytest.raises(ConfigError):
            HandlerKeys.parse(foreign)


def test_the_hash_tag_is_the_one_that_redis_computes() -> None:
    # Redis Cluster specification, "Hash tags", with its own examples.
    tags = {
        "{user1000}.following": "user1000",
        "foo{}{bar}": "foo{}{bar}",
        "foo{{bar}}zap": "{bar",
        "foo{bar}{zap}": "bar",
    }
    assert {key: hash_tag(key) for key in tags} == tags
    assert [hash_tag(key) for key in ("plain", "a}b", "}{a}", "{a")] == ["plain", "a}b", "a", "{a"]


@pytest.mark.parametrize("stream", ["a}b", "a}:b", "x{}:y", "odd{}name", "}"])
def test_a_stream_whose_slot_no_other_key_can_share_is_refused(stream: str) -> None:
    with pytest.raises(ConfigError, match=r"stream name .* cannot be used"):
        HandlerKeys("app", "handler", stream)
    with pytest.raises(ConfigError, match=r"stream name .* cannot be used"):
        App("app").handler(stream)(takes_order)
    assert "}" not in hash_tag("{x}" + stream)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("queue.py", "shadow Python's own module 'queue'"),
        ("json.py", "shadow Python's own module 'json'"),
        ("my.app.py", "cannot be imported by its name"),
        ("__main__.py", "cannot be imported by its name"),
        ("msgspec.py", r"has the name of the module 'msgspec' in .*__init__\.py"),
    ],
)
def test_a_file_that_workers_could_not_import_by_its_name_must_be_renamed(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / name).write_text("from millstream import App\napp = App('a')\n")
    with pytest.raises(ConfigError, match=rf"{reason}.*; rename it"):
        load_app(f"{tmp_path / name}:app")
    assert str(tmp_path) not in os.environ.get("PYTHONPATH", "")


def test_a_file_with_a_dash_in_its_name_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "my-app-of-this-test.py").write_text(
        "from millstream import App, Message\napp = App('good')\n@app.handler('a')\ndef handle(message: Message): ...\n"
    )
    assert list(load_app(str(tmp_path / "my-app-of-this-test.py")).handlers) == ["handle"]


def test_a_file_beside_the_app_that_hides_a_module_of_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "neighbour_app.py").write_text("")
    (tmp_path / "json.py").write_text("")
    with pytest.raises(
        ConfigError, match=r"^'json\.py', beside the app, has the name of a module of Python, .*; rename it$"
    ):
        load_app(f"{tmp_path}/neighbour_app.py:app")
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("Retry(atempts=3)", "did you mean 'attempts'?"),
        ("Breaker(windwo=3)", "did you mean 'window'?"),
        ("Retry(zzz=3)", "it has attempts, delay_ms, factor, max_delay_ms, jitter, then"),
    ],
)
def test_a_misspelt_parameter_of_a_policy_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, hint: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    path = tmp_path / f"{tmp_path.name.replace('-', '_')}.py"
    path.write_text(f"from millstream import App, Breaker, Retry\napp = App('a')\nretry = {policy}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path.name}, line 3); {hint}")):
        load_app(str(path))
