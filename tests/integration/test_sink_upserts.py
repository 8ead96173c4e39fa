"""Rows as queryable state: an older one never overwrites a newer one, whatever the order in which they come."""

import itertools
import json
from typing import Any

import pytest

from millstream.errors import ConfigError, WrongType
from millstream.redis_client.client import Client
from millstream.spark.sink.upserts import upsert

pytestmark = [pytest.mark.sink]


def put(client: Client, guard: str, key: str = "k", gone: tuple[str, ...] = (), **fields: Any) -> int:
    flat = [item for pair in fields.items() for item in pair]
    return upsert(client, "hash", "g", [(key, guard, (len(gone), *gone, *flat))], patience_ms=0)


def put_json(client: Client, guard: str, **fields: Any) -> int:
    text = json.dumps({"g": guard, **fields}, separators=(",", ":"))
    return upsert(client, "json", "g", [("j", guard, (text,))], patience_ms=0)


@pytest.mark.parametrize("order", [*itertools.permutations(["5-9", "5-10", "18446744073709551615-1", "6"])])
def test_the_greatest_guard_wins_in_any_order(client: Client, order: tuple[str, ...]) -> None:
    for guard in (*order, *order):  # written again after a crash
        put(client, guard, v=guard)
        put_json(client, guard, v=guard)
    assert client.execute("HGET", "k", "v") == b"18446744073709551615-1"
    assert json.loads(client.execute("GET", "j"))["v"] == "18446744073709551615-1"


def test_a_newer_row_removes_fields_that_are_null_and_an_older_one_changes_nothing(client: Client) -> None:
    assert put(client, "1", a="1", b="2") == 0
    assert put(client, "2", gone=("a",), b="3") == 0
    assert put(client, "1", a="1", b="2") == 1
    assert client.execute("HGETALL", "k") == [b"g", b"2", b"b", b"3"]


def test_an_equal_guard_is_written_again(client: Client) -> None:
    put(client, "7", a="half")
    assert put(client, "7-0", a="whole") == 0
    assert client.execute("HGET", "k", "a") == b"whole"


def test_a_value_without_a_guard_is_not_overwritten(client: Client) -> None:
    client.execute("HSET", "k", "a", "1")
    with pytest.raises(ConfigError, match="the key 'k' holds a value that was written without the guard 'g'"):
        put(client, "1", a="2")
    for text in ('{"a":1}', '{"g":1}', '{"g":""}', "", '{"gg":"1"}'):
        client.execute("SET", "j", text)
        with pytest.raises(ConfigError, match="written without the guard"):
            put_json(client, "1", a=2)
    client.execute("SET", "k", "text")
    with pytest.raises(WrongType, match="k holds a string where a hash is needed"):
        put(client, "1", a="2")
