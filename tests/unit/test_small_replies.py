"""Many small replies to XRANGE as one run: the same entries as of the parser that makes Python objects, or a misfit."""

import socket
import threading
from contextlib import suppress
from typing import Any

import hiredis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.spark.source.reply_segments import ReceiveBuffer
from millstream.spark.source.small_replies import SmallReplies

pytestmark = [pytest.mark.spark]

Entries = list[list[Any]]

_NOTHING = object()

plain = st.binary(max_size=6).filter(lambda text: b"\r\n" not in text)
breaks = st.sampled_from([b"\r\n", b"*1", b"x\r\n*1\r\n*2\r\n$3\r\n9-9\r\n*2\r\n$1\r\na\r\n$1", b"\r\n-ERR"])


def replies_of(value: st.SearchStrategy[bytes], least: int) -> st.SearchStrategy[list[Entries]]:
    ids = st.builds(lambda ms, seq: b"%d-%d" % (ms, seq), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
    fields = st.lists(st.tuples(value, value), min_size=1, max_size=3).map(lambda pairs: [*sum(pairs, ())])
    return st.lists(st.lists(st.tuples(ids, fields).map(list), min_size=least, max_size=12), min_size=1, max_size=12)


def resp(value: Any) -> bytes:
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n%b" % (len(value), b"".join(map(resp, value)))


def read(sent: bytes, count: int, pieces: list[int], *, expected_bytes: int = 0) -> tuple[SmallReplies, list[Any]]:
    """Read `count` replies of a peer that sends them in `pieces` of these sizes, the last one as long as the rest."""
    here, peer = socket.socketpair()

    def send() -> None:
        rest = sent
        with peer, suppress(BrokenPipeError):
            for size in pieces:
                peer.sendall(rest[:size])
                rest = rest[size:]
            peer.sendall(rest)

    reader = SmallReplies(float("inf"), ReceiveBuffer(), expected_bytes)
    sending = threading.Thread(target=send)
    with here:
        sending.start()
        try:
            return reader, reader.read_all(here, hiredis.Reader(notEnoughData=_NOTHING), _NOTHING, count)
        finally:
            here.shutdown(socket.SHUT_RDWR)
            sending.join()


@settings(deadline=None, max_examples=150)
@given(replies_of(plain, 1), st.lists(st.integers(1, 80), max_size=8), st.sampled_from([0, 100, 1 << 20]))
def test_entries_are_those_that_were_sent_however_they_arrive(
    replies: list[Entries], pieces: list[int], expected_bytes: int
) -> None:
    """Also if more bytes are expected than come."""
    sent = b"".join(map(resp, replies))
    reader, received = read(sent, len(replies), pieces, expected_bytes=expected_bytes)
    assert not reader.has_misfit
    assert received == [[]] * len(replies)
    assert [list(reply) for reply in reader.split()] == replies
    assert reader.counts.tolist() == [len(reply) for reply in replies]
    assert reader.last_ids().to_pylist() == [reply[-1][0] for reply in replies]
    assert reader.total_bytes == len(sent)


@settings(deadline=None, max_examples=150)
@given(replies_of(st.one_of(plain, plain, breaks), 0), st.lists(st.integers(1, 80), max_size=8))
def test_values_with_line_breaks_and_empty_replies_are_never_mistaken(
    replies: list[Entries], pieces: list[int]
) -> None:
    sent = b"".join(map(resp, replies))
    reader, received = read(sent, len(replies), pieces)
    assert (received if reader.has_misfit else [list(reply) for reply in reader.split()]) == replies
    assert reader.has_misfit or all(replies)
    assert reader.total_bytes == len(sent)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "other", [b"-ERR no such thing\r\n", b"*0\r\n", b"*-1\r\n", b"_\r\n", b"$1\r\nx\r\n", b":1\r\n"]
)
@pytest.mark.parametrize("cut", [1, 5, 30, 1_000])
def test_what_is_no_list_of_entries_is_left_to_the_other_parser(place: int, other: bytes, cut: int) -> None:
    entries = [[[b"1-0", [b"a", b"b"]]], [[b"2-0", [b"a", b"b"]], [b"2-1", [b"a", b"b"]]]]
    texts = [*map(resp, entries)]
    texts.insert(place, other)
    reader, received = read(b"".join(texts), 3, [cut])
    assert reader.has_misfit
    received.pop(place)
    assert received == entries


def test_a_number_is_no_beginning_of_a_reply_although_it_equals_the_number_of_entries_after_it() -> None:
    entry = [b"1-0", [b"a", b"b"]]
    reader, received = read(b":1\r\n" + resp(entry), 2, [])
    assert reader.has_misfit
    assert received == [1, entry]


def test_a_list_within_a_reply_is_no_beginning_of_the_next_one() -> None:
    """The second reply has not come yet."""
    entry = resp([b"1-0", [b"a", b"b"]])
    with pytest.raises(ConnectionResetError):
        read(b"*2\r\n" + entry + b"*1\r\n" + entry, 2, [])


def test_more_entries_than_a_number_of_three_digits_are_left_to_the_other_parser() -> None:
    replies = [[[b"%d-0" % n, [b"a", b"b"]] for n in range(count)] for count in (1, 999, 1_000)]
    for some in (replies[:2], replies):
        reader, received = read(b"".join(map(resp, some)), len(some), [])
        assert reader.has_misfit == (len(some) == 3)
        assert (received if reader.has_misfit else [list(reply) for reply in reader.split()]) == some


def test_a_connection_that_breaks_within_replies_is_an_error() -> None:
    """Also where an entry ends, of which the last reply has more than one."""
    sent = b"".join(map(resp, [[[b"1-0", [b"a", b"b"]]], [[b"%d-0" % n, [b"a", b"b"]] for n in (2, 3)]]))
    for size in range(len(sent)):
        with pytest.raises(ConnectionResetError):
            read(sent[:size], 2, [])


def test_replies_of_many_megabytes_are_read_in_several_segments() -> None:
    replies = [[[b"%d-%d" % (n, reply), [b"name", b"x" * 300]] for n in range(9)] for reply in range(900)]
    sent = b"".join(map(resp, replies))
    reader, _ = read(sent, len(replies), [], expected_bytes=len(sent))
    assert [list(reply) for reply in reader.split()] == replies
    assert len({id(segment.data) for segment, _, _ in reader.entries.parts}) > 1, "more than one buffer"
    assert reader.last_ids().to_pylist() == [reply[-1][0] for reply in replies]
    assert np.unique(reader.counts).tolist() == [9]


def test_more_replies_than_were_asked_for_are_a_misfit() -> None:
    replies = [[[b"%d-0" % n, [b"a", b"b"]]] for n in range(3)]
    reader, received = read(b"".join(map(resp, replies)), 2, [])
    assert reader.has_misfit
    assert received == replies[:2]
