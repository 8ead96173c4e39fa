"""Large entries in JSON, part by part: the same as in one piece."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.redis_client.escaping import iter_json_fields, json_fields

pytestmark = [pytest.mark.router]

texts = st.text(alphabet=st.sampled_from('aä€😀"\\\n\x00'), max_size=40).map(str.encode)
values = st.one_of(texts, st.binary(max_size=40))
entries = st.lists(st.tuples(st.one_of(st.sampled_from([b"a", b"b", b"\xff"]), values), values), max_size=5)


def joined(pairs: list[bytes], part_bytes: int) -> Any:
    return json.loads(b"{%s}" % b"".join(iter_json_fields(pairs, part_bytes)))


@given(entries, st.integers(1, 8))
def test_the_parts_of_an_entry_join_to_the_json_of_the_whole(entry: list[tuple[bytes, bytes]], part_bytes: int) -> None:
    pairs = [one for pair in entry for one in pair]
    assert joined(pairs, part_bytes) == json.loads(json.dumps(json_fields(pairs)))


def test_every_part_is_small_and_ascii() -> None:
    large = [b"text", "ä\n".encode() * 100_000, b"bytes", b"\xff" * 300_000, b"nearly text", b"a" * 300_000 + b"\xff"]
    parts = list(iter_json_fields(large, 1_000))
    assert max(map(len, parts)) <= 6_100
    assert b"".join(parts).isascii()
    assert len(parts) > 1_000
