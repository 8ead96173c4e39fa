"""Which connections are closed when there are too many, or when nothing comes."""

import logging
from typing import Any, cast

import pytest

from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.services.web.connections import Connection, Connections, Limits
from tests.support.clocks import ManualClock

pytestmark = [pytest.mark.router, pytest.mark.master]

REQUEST_MS = 10_000.0


class Transport:
    """The transport of a connection, as much as is asked of it."""

    def __init__(self) -> None:
        self.ended = ""
        self.unread = 0

    def abort(self) -> None:
        self.ended = "aborted"

    def close(self) -> None:
        self.ended = "closed"

    def get_write_buffer_size(self) -> int:
        return self.unread


class Listener:
    """A limit of so many connections, with a clock that the test moves."""

    def __init__(self, connections: int) -> None:
        self.clock = ManualClock()
        self.recorder = Recorder()
        limits = Limits(connections=connections, request_s=REQUEST_MS / 1000)
        self.all = Connections(limits, metrics=self.recorder, clock=self.clock)

    def come(self) -> tuple[Connection, Transport]:
        """One more. It is a moment later than the last."""
        self.clock.now_ms += 1
        transport = Transport()
        return self.all.open(cast("Any", transport)), transport

    def cut(self, reason: str) -> float:
        """How many were cut for this reason."""
        return self.recorder.value(m.HTTP_DROPPED, reason=reason)


def test_over_the_limit_the_connection_that_waited_longest_for_a_request_is_closed() -> None:
    listener = Listener(3)
    (first, first_transport), (_, second_transport), (third, third_transport) = (
        listener.come(),
        listener.come(),
        listener.come(),
    )
    listener.all.clear_wait(first)
    _, fourth_transport = listener.come()
    assert [
        transport.ended for transport in (first_transport, second_transport, third_transport, fourth_transport)
    ] == ["", "aborted", "", ""]
    listener.all.await_client(first)  # it was answered, and waits from now on
    listener.come()
    assert (first_transport.ended, third_transport.ended) == ("", "aborted")
    listener.all.remove(third, None)
    assert (len(listener.all), listener.cut("crowded")) == (3, 2)


def test_a_connection_that_sent_a_request_is_not_closed_for_a_new_one() -> None:
    listener = Listener(2)
    working = [listener.come() for _ in range(2)]
    for connection, _ in working:
        listener.all.clear_wait(connection)
    newcomer, transport = listener.come()
    _, later_transport = listener.come()
    assert [one.ended for _, one in working] == ["", ""]
    assert transport.ended == "aborted", "newcomers take each other's place"
    assert later_transport.ended == ""
    listener.all.await_client(newcomer)  # a report on a connection that is cut changes nothing
    assert len(listener.all) == 3


def test_a_request_is_refused_only_while_all_other_connections_are_busy() -> None:
    listener = Listener(1)
    (working, _), (asking, _) = listener.come(), listener.come()
    assert len(listener.all) == 1, "the first had sent nothing"
    listener = Listener(1)
    working, transport = listener.come()
    listener.all.clear_wait(working)
    asking, _ = listener.come()
    listener.all.clear_wait(asking)
    assert listener.all.is_full()
    listener.all.await_client(working)
    assert not listener.all.is_full()
    assert transport.ended == "aborted", "it was done, and made room"


def test_a_connection_is_closed_when_its_head_or_body_is_late() -> None:
    listener = Listener(10)
    (_, silent), (body, body_transport), (working, working_transport) = (
        listener.come(),
        listener.come(),
        listener.come(),
    )
    listener.all.await_body(body)
    listener.all.clear_wait(working)
    listener.clock.now_ms += REQUEST_MS - 3
    listener.all.sweep()
    assert silent.ended == ""
    listener.clock.now_ms += 3
    listener.all.sweep()
    assert (silent.ended, body_transport.ended) == ("aborted", "")
    listener.clock.now_ms += 2 * REQUEST_MS
    listener.all.sweep()
    assert (body_transport.ended, working_transport.ended) == ("aborted", "")
    listener.all.await_client(working)
    listener.clock.now_ms += REQUEST_MS
    listener.all.sweep()
    assert working_transport.ended == "aborted"
    assert listener.cut("late") == 3


def test_a_client_that_reads_an_answer_slowly_is_closed_only_to_make_room() -> None:
    listener = Listener(3)
    (loading, loading_transport), (last, last_transport), (stream, stream_transport) = (
        listener.come(),
        listener.come(),
        listener.come(),
    )
    stream.exempt_reading()
    for connection in (loading, last, stream):
        listener.all.clear_wait(connection)
    listener.all.await_client(loading, "reading")
    listener.all.await_client(stream, "reading")
    listener.all.await_client(last)
    last_transport.unread = 1  # of the answer that is complete
    listener.clock.now_ms += 100 * REQUEST_MS
    listener.all.sweep()
    assert [one.ended for one in (loading_transport, last_transport, stream_transport)] == ["", "", ""]
    listener.come()
    listener.come()
    assert [one.ended for one in (loading_transport, last_transport, stream_transport)] == ["aborted", "aborted", ""]


def test_the_time_for_the_next_request_begins_when_the_client_has_read_the_answer() -> None:
    listener = Listener(3)
    (done, done_transport), (going_on, going_on_transport), (stream, stream_transport) = (
        listener.come(),
        listener.come(),
        listener.come(),
    )
    stream.exempt_reading()
    for connection in (done, going_on, stream):
        listener.all.clear_wait(connection)
        listener.all.await_client(connection, "reading")
    listener.all.await_client(done)
    listener.clock.now_ms += REQUEST_MS
    for connection in (done, going_on, stream):
        listener.all.on_read(connection)
    listener.all.sweep()
    assert done_transport.ended == ""
    listener.clock.now_ms += REQUEST_MS
    listener.all.sweep()
    assert [one.ended for one in (done_transport, going_on_transport, stream_transport)] == ["aborted", "", ""]


def test_too_many_connections_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            listener.come()
        assert len(caplog.records) == 1
        listener.clock.now_ms += 60_000
        listener.come()
        listener.come()
    assert len(caplog.records) == 2


def test_a_stop_closes_waiting_connections_before_busy_ones() -> None:
    listener = Listener(2)
    (_, silent), (working, working_transport) = listener.come(), listener.come()
    listener.all.clear_wait(working)
    listener.all.close_waiting()
    assert (silent.ended, working_transport.ended) == ("closed", "")
    listener.all.abort_all()
    assert working_transport.ended == "aborted"
