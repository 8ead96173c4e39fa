"""The window of a breaker: which outcomes open it."""

from collections.abc import Callable
from typing import Any

import pytest

from millstream import App, Breaker, Message
from millstream.delivery.pause import Pause, parse_pause
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import ConfigError
from millstream.handlers.attempt import DeadLettered
from millstream.handlers.breaker_window import BreakerWindow, Trip
from millstream.redis_client.client import Client
from millstream.worker.breaker import HandlerBreaker

pytestmark = [pytest.mark.worker]


def trips(window: BreakerWindow, outcomes: str) -> list[int]:
    """The positions at which it opens, of outcomes: "." is processed, a letter is the cause of a dead letter."""
    opened = []
    for at, one in enumerate(outcomes, 1):
        if one == ".":
            window.on_processed()
        elif window.on_dead(one, "why") is not None:
            opened.append(at)
    return opened


@pytest.mark.parametrize(
    ("outcomes", "first"),
    [
        ("a" * 4, None),
        ("a" * 5, 5),
        ("." + "a" * 8, None),
        ("." + "a" * 9, 10),
        ("ab" * 50, None),
        ("." * 1_000 + "a" * 9, 1_009),
        ("aaaa.aaa.aaa.aaa", None),
        (".aaaaaaa.aaaaaaaa", 11),
        ("." * 10 + "aaaa.aaaaa", 20),
    ],
)
def test_a_breaker_opens_at_the_first_message_that_meets_its_threshold(outcomes: str, first: int | None) -> None:
    found = trips(BreakerWindow(Breaker(first=5, window=10)), outcomes)
    assert (found[0] if found else None) == first


@pytest.mark.parametrize(
    ("processed", "dead", "opens"),
    [
        (0, {"a": (19, "x")}, False),
        (0, {"a": (20, "x")}, True),
        (100_000, {"a": (5_000, "x")}, False),
        (5_000, {"a": (100_000, "x")}, True),
        (1, {"a": (10, "x"), "b": (10, "y")}, False),
        (20, {"a": (100, "x")}, False),
        (0, {}, False),
    ],
)
def test_a_mixed_batch_opens_the_breaker_by_its_share_of_dead_letters(
    processed: int, dead: dict[str, tuple[int, str]], opens: bool
) -> None:
    assert (BreakerWindow(Breaker()).on_mixed(processed, dead) is not None) is opens


def test_a_trip_has_the_number_of_dead_letters_and_of_messages() -> None:
    window = BreakerWindow(Breaker(first=2))
    window.on_dead("a", "one")
    assert window.on_dead("a", "two") == Trip("a", 2, 2, "two")


@pytest.mark.parametrize(
    "options",
    [
        {"first": 0},
        {"first": 50, "window": 20},
        {"share": 0},
        {"share": 1.1},
        {"retry_after_s": 0},
        {"retry_after_s": float("inf")},
    ],
)
def test_a_policy_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Breaker"):
        Breaker(**options)


def test_a_handler_has_a_breaker_unless_it_is_disabled() -> None:
    app = App("app")

    def handle(message: Message) -> None: ...

    for name, options in (("usual", {}), ("own", {"breaker": Breaker(first=3)}), ("none", {"breaker": None})):
        app.handler("in", name=name, **options)(handle)
    assert [one.breaker for one in app.handlers.values()] == [Breaker(), Breaker(first=3), None]
    with pytest.raises(ConfigError, match="breaker must be a Breaker"):
        app.handler("in", name="wrong", breaker=20)(handle)  # type: ignore[arg-type]


def test_a_pause_can_be_read_back_until_it_ends() -> None:
    pause = Pause(by="breaker", at_ms=5, until_ms=1_000, worker="w", cause="missing-key", count=20, of=20, error="é")
    assert parse_pause(pause.encode(), 999) == pause
    assert parse_pause(pause.encode(), 1_000) is None
    assert parse_pause(None, 0) is None
    for damaged in (b"1", b"\xff", b'{"by": "nobody"}'):
        assert parse_pause(damaged, 0) == Pause()


class Forgetting(set[str]):
    """A set that calls `on_clear` when it is emptied."""

    def __init__(self, on_clear: Callable[[], object]) -> None:
        super().__init__()
        self._on_clear = on_clear

    def clear(self) -> None:
        self._on_clear()
        super().clear()


def test_a_breaker_that_opens_while_an_earlier_pause_ends_stays_open() -> None:
    app = App("app")

    def handle(message: Message) -> None: ...

    app.handler("in", name="handle", breaker=Breaker(first=1))(handle)
    breaker = HandlerBreaker(app.handlers["handle"], "w")
    with Client("redis://127.0.0.1:1") as nowhere:
        stream = ReliableStream(nowhere, "in", app="app", handler="handle", consumer="w")
        one = Delivery(stream, b"1-0", [b"n", b"1"])
        breaker._stored = Forgetting(lambda: breaker.admits(one, DeadLettered("failed", "why", "", "here")))
        ended = Pause(by="breaker", at_ms=5, until_ms=1_000, worker="w2", cause="failed", count=20, of=20, error="e")
        assert breaker.follow(stream, ended)
    assert breaker.is_open()
