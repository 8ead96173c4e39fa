"""The values of an entry's fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import Message
from millstream.model import value_of

pytestmark = [pytest.mark.worker, pytest.mark.spark]

NAMES = st.sampled_from([b"key", b"a", b"b"])


@given(st.lists(st.tuples(NAMES, NAMES), min_size=1), NAMES)
def test_the_value_of_a_field_is_that_of_the_mapping_of_fields(fields: list[tuple[bytes, bytes]], name: bytes) -> None:
    pairs = [part for field in fields for part in field]
    assert value_of(pairs, name) == Message("s", "1-0", pairs).fields.get(name.decode())
