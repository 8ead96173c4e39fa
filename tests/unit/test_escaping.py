"""Bytes of Redis as text: nothing unprintable is left, and all of it can be restored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.redis_client.escaping import escape, escape_line, unescape

pytestmark = [pytest.mark.cli]


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_one_line_of_printable_text_and_restored_from_it(data: bytes) -> None:
    shown = escape(data)
    assert shown.isprintable()
    assert unescape(shown) == data
    assert escape_line(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown", "line"),
    [
        ("a\\b", "a\\\\b", "a\\b"),
        ("\t\r\n", "\\t\\r\\n", "\\t\\r\\n"),
        ("\x1b[2J", "\\x1b[2J", "\\x1b[2J"),
        ("é\x85\u2028€", "é\\xc2\\x85\\xe2\\x80\\xa8€", "é\\xc2\\x85\\xe2\\x80\\xa8€"),
        ("\udcff\ud800", "\\xff\\xed\\xa0\\x80", "\\xff\\xed\\xa0\\x80"),
    ],
)
def test_each_unprintable_character_has_its_escape(text: str, shown: str, line: str) -> None:
    assert (escape(text), escape_line(text)) == (shown, line)
    assert (escape(text), escape_line(text)) == (shown, line), "the second time, too"
