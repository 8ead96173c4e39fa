"""A limit as it is declared, and what a message takes of it."""

from dataclasses import dataclass
from typing import Any

import pytest

from millstream import App, Limit
from millstream.errors import ConfigError, DecodeError
from millstream.handlers.handler import Handler
from millstream.handlers.limits import share_of

pytestmark = [pytest.mark.worker]


@dataclass
class Prompt:
    session: str
    tenant: str
    tokens: int


def take(prompt: Prompt) -> None: ...


def take_all(prompts: list[Prompt]) -> None: ...


def made(function: Any = take, **options: Any) -> Handler:
    app = App("app")
    app.handler("in", name="handle", **options)(function)
    return app.handlers["handle"]


def problem(function: Any = take, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(function, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "give it at_once=4"),
        ({"per": "tenant"}, "give it at_once=4"),
        ({"at_once": 0}, "from 1 to 1,000"),
        ({"at_once": True}, "from 1 to 1,000"),
        ({"at_once": 1_001}, "from 1 to 1,000"),
        ({"at_once": 1, "per": ""}, "per must be the name of a field"),
        ({"at_once": 1, "cost": "tokens"}, "add one"),
        ({"rate": "60"}, "must be like"),
        ({"rate": "60/w"}, "must be like"),
        ({"rate": "-1/s"}, "must be like"),
        ({"rate": True}, "must be like"),
        ({"rate": 0}, "at least 0.000001"),
        ({"rate": 10**400}, "at least 0.000001"),
        ({"rate": float("inf")}, "at least 0.000001"),
        ({"rate": "0.01/d"}, "at least 0.000001"),
    ],
)
def test_a_limit_out_of_range_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Limit(**fields)


def test_a_handler_that_cannot_have_a_limit_of_messages_is_refused_and_the_error_says_what_to_do() -> None:
    limit = Limit(per="tenant", at_once=1)
    assert 'give it key="field"' in problem(limit=limit)
    assert 'give it key="field" instead' in problem(limit=limit, order="stream")
    assert "take one message" in problem(take_all, limit=limit, key="session")
    assert "drop partitions, or the limit" in problem(limit=limit, key="session", partitions=4)
    assert "exclude one another" in problem(limit=Limit(rate=5), rate=5)
    assert "limit must be a Limit" in problem(limit=4)
    assert "'tenat' is not a field of Prompt" in problem(limit=Limit(per="tenat", at_once=1), key="session")
    assert "'token' is not a field of Prompt" in problem(limit=Limit(rate="9/s", cost="token"), key="session")


def test_the_rate_of_all_messages_is_the_option_rate() -> None:
    found = made(limit=Limit(rate="60/m"))
    assert (found.rate, found.limit) == (1.0, None)
    found = made(limit=Limit(rate=0.5, at_once=3), key="session")
    assert (found.rate, found.limit) == (0.5, Limit(at_once=3))
    limit = Limit(per="tenant", rate=0.5)
    found = made(limit=limit, key="session")
    assert (found.rate, found.limit) == (None, limit)
    assert made().limit is None


def test_a_message_takes_its_cost_of_the_rate_of_its_value() -> None:
    pairs = [b"tenant", b"a", b"tokens", b"2.5"]
    assert share_of(Limit(per="tenant", at_once=1), pairs) == (b"a", None)
    assert share_of(Limit(per="tenant", rate="60/m"), pairs) == (b"a", 1_000)
    assert share_of(Limit(per="tenant", rate="60/m", cost="tokens"), pairs) == (b"a", 2_500)
    assert share_of(Limit(per="region", rate=2), pairs) == (b"", 500)
    assert share_of(Limit(rate="10/s", cost="tokens"), pairs) == (b"", 250)


@pytest.mark.parametrize("cost", [b"", b"x", b"-1", b"nan", b"inf", b"10.1", b"1_0", b"\xff"])
def test_a_cost_that_is_none_is_refused(cost: bytes) -> None:
    with pytest.raises(DecodeError, match="from 0 to 10"):
        share_of(Limit(rate="10/s", cost="tokens"), [b"tokens", cost])
    with pytest.raises(DecodeError, match="no field 'tokens'"):
        share_of(Limit(rate="10/s", cost="tokens"), [b"n", b"1"])


def test_a_misspelt_field_of_a_limit_is_refused_by_python() -> None:
    with pytest.raises(TypeError):
        Limit(at_one=4)  # type: ignore[call-arg]
