"""The arguments of a command as JSON: the schema of them, and the command line for an object of the schema."""

from typing import Any

import pytest

from millstream.cli.command_schemas import CommandSchema
from millstream.errors import ConfigError

pytestmark = [pytest.mark.cli]


def test_a_schema_has_the_types_limits_and_choices_of_the_parameters_and_which_are_required() -> None:
    found = CommandSchema("key list").describe()
    known = found["properties"]
    assert found.keys() == {"type", "properties", "required", "additionalProperties"}
    assert (found["type"], found["required"], found["additionalProperties"]) == ("object", [], False)
    assert known["limit"].items() >= {"type": "integer", "minimum": 1}.items()
    assert known["count"]["type"] == "boolean"
    assert known["state"]["type"] == "string"
    assert "parked" in known["state"]["enum"]
    assert all(one["description"] for one in known.values())
    assert CommandSchema("why").describe()["required"] == ["handler", "key"]
    several = CommandSchema("dlq show").describe()["properties"]["selection"]
    assert (several["type"], several["items"]) == ("array", {"type": "string"})


def test_a_hidden_parameter_is_neither_in_the_schema_nor_accepted() -> None:
    whole, less = CommandSchema("key list"), CommandSchema("key list", hidden=["url", "as_json"])
    assert whole.describe()["properties"].keys() - less.describe()["properties"].keys() == {"url", "json"}
    with pytest.raises(ConfigError, match=r"^there is no argument 'url'; use handlers, "):
        less.argv({"url": "redis://127.0.0.1:1"})


@pytest.mark.parametrize(
    ("words", "arguments", "line"),
    [
        ("key list", {}, ["--"]),
        ("key list", {"limit": 5, "handlers": "shop.pay"}, ["--limit=5", "--", "shop.pay"]),
        ("key list", {"count": True}, ["--count", "--"]),
        ("key list", {"count": False}, ["--"]),
        ("key list", {"state": "--count"}, ["--state=--count", "--"]),
        ("why", {"key": "--url", "handler": "shop.pay"}, ["--", "shop.pay", "--url"]),
        ("doctor", {"older_than": "1m"}, ["--older-than=1m", "--"]),
        ("dlq show", {"selection": ["shop.pay", "shop.bill"]}, ["--", "shop.pay", "shop.bill"]),
    ],
)
def test_arguments_become_a_command_line_on_which_no_value_is_an_option(
    words: str, arguments: dict[str, Any], line: list[str]
) -> None:
    schema = CommandSchema(words)
    assert schema.argv(arguments) == line
    schema.command.make_context(words, line, resilient_parsing=True)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("limit", "5", "integer"),
        ("limit", True, "integer"),
        ("count", 1, "boolean"),
        ("handlers", ["shop.pay"], "string"),
        ("state", None, "string"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: .* is not of the type {wanted}$"):
        CommandSchema("key list").argv({name: value})
