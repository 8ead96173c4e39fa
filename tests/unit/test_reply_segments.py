"""Replies to XRANGE as segments: the same entries, and the same columns, as of the parser that makes Python objects."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import hiredis
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.model import value_of
from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.spark.key_blocks import read_chunks
from millstream.spark.source.entry_segment import EntrySegment, RawEntries
from millstream.spark.source.options import Columns
from millstream.spark.source.reply_segments import ReceiveBuffer, ReplySegments
from millstream.spark.source.row_decoder import pair_columns, typed_columns
from millstream.spark.source.row_layout import batch_maker
from millstream.spark.source.schema import default_schema
from millstream.spark.versions import arrow_schema

pytestmark = [pytest.mark.spark]

Entries = list[list[Any]]

LOOKALIKES = [b"$1", b"*4", b"$15", b"", b"\r", b"\n", b"*0", b"\n\r", b"x\r"]
"""Values that look like lines of Redis' protocol."""
BREAKS = [b"*2", b"\r\n", b"\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n", b"a\r\n", b"\r\n$1"]

plain = st.one_of(st.sampled_from(LOOKALIKES), st.binary(max_size=12).filter(lambda text: b"\r\n" not in text))
sized = st.sampled_from([9, 10, 99, 100, 255, 256, 999, 1_000, 65_535, 65_536]).map(lambda size: b"x" * size)
any_value = st.one_of(plain, plain, plain, st.sampled_from(BREAKS))


def replies_of(value: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[Entries]]:
    ids = st.builds(lambda ms, seq: b"%d-%d" % (ms, seq), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
    pair = st.tuples(st.one_of(st.sampled_from([b"a", b"b", b"key"]), value), value)
    fields = st.lists(pair, min_size=1, max_size=20).map(lambda pairs: [text for pair in pairs for text in pair])
    return st.lists(st.lists(st.tuples(ids, fields).map(list), max_size=6), min_size=1, max_size=6)


def resp(value: Any) -> bytes:
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n%b" % (len(value), b"".join(map(resp, value)))


def read(
    sent: bytes, count: int, *, most: float = float("inf"), pieces: Sequence[int] = ()
) -> tuple[ReplySegments, Any]:
    """Read `count` replies of a peer that sends them in `pieces` of these sizes, the last one as long as the rest."""
    here, peer = socket.socketpair()

    def send() -> None:
        rest = sent
        with peer, suppress(BrokenPipeError):  # of a reader that has read enough
            for size in pieces:
                peer.sendall(rest[:size])
                rest = rest[size:]
            peer.sendall(rest)

    reader = ReplySegments(most, ReceiveBuffer())
    sending = threading.Thread(target=send)
    with here:
        sending.start()
        try:
            return reader, reader.read_all(here, hiredis.Reader(notEnoughData=None), None, count)
        finally:
            here.shutdown(socket.SHUT_RDWR)
            sending.join()


def as_lists(replies: Any) -> list[Entries]:
    return [list(reply) for reply in replies]


def read_as_sent(replies: list[Entries], pieces: list[int]) -> tuple[ReplySegments, Any]:
    """Read replies that arrive in pieces, and check that their entries and bytes are those that were sent."""
    sent = b"".join(map(resp, replies))
    reader, received = read(sent, len(replies), pieces=pieces)
    assert as_lists(received) == replies
    assert reader.total_bytes == len(sent)
    return reader, received


@settings(deadline=None, max_examples=300)
@given(replies_of(plain), st.lists(st.integers(1, 60), max_size=8))
def test_segments_have_the_entries_that_were_sent_however_they_arrive(
    replies: list[Entries], pieces: list[int]
) -> None:
    reader, received = read_as_sent(replies, pieces)
    assert not reader.has_misfit
    assert all(isinstance(reply, RawEntries) for reply in received)
    assert [reply.last_id for reply in received if reply] == [reply[-1][0] for reply in replies if reply]


@settings(deadline=None, max_examples=300)
@given(replies_of(any_value), st.lists(st.integers(1, 60), max_size=4))
def test_values_with_line_breaks_are_never_mistaken_for_others(replies: list[Entries], pieces: list[int]) -> None:
    read_as_sent(replies, pieces)


def test_a_value_whose_lines_fit_those_after_it_is_no_entry() -> None:
    """Only its length shows it: with the line that begins the second reply, the lines in it are one more entry."""
    value = b"x\r\n*2\r\n*2\r\n$3\r\n9-9\r\n*2\r\n$1\r\na\r\n$2"
    replies = [[[b"1-0", [b"a", value]]], [[b"2-0", [b"a", b"b"]]]]
    reader, received = read(b"".join(map(resp, replies)), 2)
    assert as_lists(received) == replies
    assert reader.has_misfit


@settings(deadline=None, max_examples=60)
@given(replies_of(st.one_of(plain, sized)))
def test_values_of_all_sizes_are_read(replies: list[Entries]) -> None:
    reader, received = read(b"".join(map(resp, replies)), len(replies))
    assert as_lists(received) == replies
    assert not reader.has_misfit


def test_replies_of_many_megabytes_are_read_in_several_segments() -> None:
    replies = [[[b"%d-%d" % (n, reply), [b"name", b"x" * 300 + b"%d" % n]] for n in range(9_000)] for reply in range(3)]
    reader, received = read(b"".join(map(resp, replies)), 3)
    assert as_lists(received) == replies
    assert not reader.has_misfit
    assert len({id(segment.data) for reply in received for segment, _, _ in reply.parts}) > 1, "more than one buffer"


def test_an_entry_larger_than_the_buffer_is_left_to_the_other_parser() -> None:
    replies = [[[b"1-0", [b"a", b"small"]], [b"2-0", [b"a", b"x" * (5 << 20)]], [b"3-0", [b"a", b"b"]]]]
    reader, received = read(resp(replies[0]), 1)
    assert as_lists(received) == replies
    assert reader.has_misfit


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_among_replies_is_returned_in_its_place(place: int) -> None:
    entries = [[[b"1-0", [b"a", b"b"]]], [[b"2-0", [b"a", b"b"]]]]
    texts = [*map(resp, entries)]
    texts.insert(place, b"-ERR no such thing\r\n")
    _, received = read(b"".join(texts), 3)
    assert str(received.pop(place)) == "ERR no such thing"
    assert as_lists(received) == entries


def test_a_connection_that_breaks_within_a_reply_is_an_error() -> None:
    sent = resp([[b"1-0", [b"a", b"b"]], [b"2-0", [b"a", b"b"]]])
    for size in (0, 10, len(sent) - 1, len(resp([[b"1-0", [b"a", b"b"]]]))):
        with pytest.raises(ConnectionResetError):
            read(sent[:size], 1)


def test_replies_beyond_the_limit_are_not_read_to_their_end() -> None:
    sent = resp([[b"%d-0" % n, [b"a", b"x" * 100]] for n in range(100_000)])
    with pytest.raises(ConnectionAbortedError, match="larger than 1,000,000 bytes"):
        read(sent, 1, most=1_000_000)


# --- Columns ----------------------------------------------------------------------------------------------------

ARRAY = arrow_schema(default_schema(Columns()))
TYPED = pa.schema([("a", pa.string()), ("b", pa.int64()), ("key", pa.binary()), ("absent", pa.string())])


def packed_columns(fields: Any, *, key_field: bytes) -> dict[str, pa.Array]:
    if isinstance(fields, EntrySegment):
        return {"fields": fields.packed(), "key": fields.last_values(key_field)}
    return {
        "fields": pa.array(map(msgspec.msgpack.encode, fields), pa.binary()),
        "key": pa.array([value_of(pairs, key_field) for pairs in fields], pa.binary()),
    }


MAKERS: dict[str, Callable[..., dict[str, pa.Array]]] = {
    "array": partial(pair_columns, schema=ARRAY),
    "packed": partial(packed_columns, key_field=b"key"),
    "typed": partial(typed_columns, schema=TYPED, names=TYPED.names, failfast=False),
}


@settings(deadline=None, max_examples=150)
@given(
    replies_of(st.one_of(plain, plain, sized)), st.sampled_from(sorted(MAKERS)), st.integers(0, 99), st.integers(0, 99)
)
def test_columns_of_segments_equal_those_of_lists(replies: list[Entries], name: str, start: int, length: int) -> None:
    """Of a part of the first segment, whose length depends on how the socket divides the replies."""
    make = MAKERS[name]
    _, received = read(b"".join(map(resp, replies)), len(replies))
    reply = next((one for one in received if len(one)), None)
    if reply is None:
        return
    segment = reply.parts[0][0]
    first = start % len(segment)
    part = segment.part(first, first + 1 + length % (len(segment) - first))
    assert make(part) == make(part.fields)


@pytest.mark.parametrize("width", [7, 8, 40, 40_000])
def test_entries_with_few_and_many_fields_are_packed(width: int) -> None:
    fields = [text for n in range(width) for text in (b"n%d" % n, b"v%d" % n)]
    replies = [[[b"1-0", fields], [b"2-0", [b"a", b"b"]], [b"3-0", fields]]]
    reader, received = read(resp(replies[0]), 1)
    assert reader.has_misfit == (width == 40_000)
    if not reader.has_misfit:
        segment = received[0].parts[0][0]
        assert MAKERS["packed"](segment) == MAKERS["packed"](segment.fields)


def test_segments_and_lists_make_one_record_batch_in_their_order() -> None:
    buffer = [[b"%d-0" % n, [b"key", b"%d" % n, b"a", b"x"]] for n in range(10)]
    _, (first, second) = read(resp(buffer[:3]) + resp(buffer[3:5]), 2)
    _, (third,) = read(resp(buffer[7:]), 1)
    columns = Columns(packed=True, key_field="key")
    make = batch_maker(columns, default_schema(columns))
    runs: list[Any] = [("s", first), ("t", second), ("s", buffer[5:6]), ("t", buffer[6:7]), ("s", third)]
    lists = [(stream, list(entries)) for stream, entries in runs]
    assert make(runs).equals(make(lists))
    (chunk,) = read_chunks([make(runs)])
    assert {place: messages[0] for place, messages in chunk.messages.items()} == {
        ("t" if n in {3, 4, 6} else "s", b"%d" % n): b"%d-0" % n for n in range(10)
    }


@pytest.mark.parametrize("redriven", [[], [0], [3, 4], list(range(10))])
def test_redriven_entries_of_segments_are_skipped(redriven: list[int]) -> None:
    entries = [[b"%d-0" % n, [REDRIVE_FIELD if n in redriven else b"a", b"x"]] for n in range(10)]
    _, received = read(resp(entries), 1)
    columns = Columns(packed=True, skip_redriven=True)
    batch = batch_maker(columns, default_schema(columns))([("s", received[0])])
    ids = [messages[::2] for chunk in read_chunks([batch]) for messages in chunk.messages.values()]
    assert ids == [[b"%d-0" % n for n in range(10) if n not in redriven]] * (len(redriven) < 10)
