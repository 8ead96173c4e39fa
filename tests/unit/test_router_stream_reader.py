"""What a stream reader asks for and when, by the commands that it sends."""

from collections.abc import Callable
from typing import Any

import pytest

from millstream.errors import CommandFailed
from millstream.model import Message
from millstream.observability.metrics import NO_METRICS
from millstream.router.budget import Budget
from millstream.router.cursors import CursorCallbacks, CursorTable
from millstream.router.oversized_streams import MOST_BREAKS
from millstream.router.read_request import ReaderCallbacks
from millstream.router.stream_reader import StreamReader
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer

pytestmark = [pytest.mark.router]

RECOVERY_MS = 10_000.0


class RecordingLink:
    """A link that keeps what it is asked, for the test to answer."""

    def __init__(self) -> None:
        self.up = True
        self.asked: list[tuple[list[Any], Any]] = []

    def request(self, commands: list[Any], then: Any) -> None:
        self.asked.append((list(commands), then))

    def answer(self, *replies: Any) -> None:
        self.asked.pop(0)[1](list(replies))


def info(last: int) -> dict[bytes, Any]:
    return {
        b"length": last,
        b"last-generated-id": b"%d-0" % last,
        b"entries-added": last,
        b"max-deleted-entry-id": b"0-0",
        b"first-entry": [b"1-0", []],
        b"last-entry": [b"%d-0" % last, []],
    }


class Bench:
    """A stream reader with a stream or more, each with one subscriber."""

    def __init__(self, *streams: bytes, reply_bytes: int = 1_000_000) -> None:
        self.link = RecordingLink()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        budget = Budget(1 << 30)
        wakes = CursorCallbacks(schedule=self._want, wake=lambda inbox: None)
        self.table = buffer = CursorTable(wakes, NO_METRICS, budget)
        calls = ReaderCallbacks(
            on_read=lambda cursor: None,
            schedule=self._want,
            on_moved=lambda: None,
            read_at=lambda node, cursors: None,
            call_later=lambda delay_ms, action: self.timers.append((delay_ms, action)),
        )
        link: Any = self.link
        self.reader = StreamReader(link, buffer, calls, streams=10, count=100, reply_bytes=reply_bytes, by_slot=False)
        self.inboxes = [
            SubscriberBuffer(name.decode(), budget, limit=1000, limit_bytes=1 << 30, when_full="wait")
            for name in streams
        ]
        for name, inbox in zip(streams, self.inboxes, strict=True):
            buffer.add(inbox, name, b"0-0")
        self.reader.flush()

    def _want(self, cursor: Cursor) -> None:
        self.reader.schedule(cursor)

    def cursor(self, at: int = 0) -> Cursor:
        found = self.inboxes[at].cursor
        assert found is not None
        return found


def test_a_stream_that_changes_while_it_is_read_is_read_again() -> None:
    bench = Bench(b"s")
    bench.reader.schedule(bench.cursor(), changed=True)
    bench.link.answer({b"s": [[b"1-0", []]]}, info(1))
    bench.reader.flush()
    [(commands, _)] = bench.link.asked
    assert commands[0][-2:] == (b"s", b"0-18446744073709551615"), "from the entry that it has got"


def test_replies_stay_small_whatever_the_size_of_entries() -> None:
    bench = Bench(b"s", reply_bytes=10_000)
    counts = [bench.link.asked[0][0][0][2]]
    for number, size in enumerate((100, 2_000, 1_000_000), 1):
        bench.link.answer({b"s": [[b"%d-0" % number, [b"n", b"x" * size]]]}, *[info(1)][: number == 1])
        bench.cursor().ordinal = None
        bench.reader.schedule(bench.cursor())
        bench.reader.flush()
        counts.append(bench.link.asked[0][0][0][2])
        bench.cursor().last = b"0-0"
    one = 1  # the last entry is read again each time
    assert Bench(b"s").link.asked[0][0][0][2] == 1 + one, "of a stream that was never read, a single entry"
    assert counts[1] > counts[2] > counts[3] == 1 + one


def test_changes_do_not_wait_behind_a_long_history() -> None:
    bench = Bench(b"old", b"new")
    bench.link.answer({b"old": [[b"1-0", []]], b"new": [[b"1-0", []]]}, info(1), info(1))
    bench.reader.schedule(bench.cursor(0))
    bench.reader.flush()
    bench.reader.schedule(bench.cursor(1), changed=True)
    bench.reader.flush()
    assert [commands[0][4] for commands, _ in bench.link.asked] == [b"old", b"new"]


def test_a_broken_connection_leaves_no_cursor_waiting() -> None:
    bench = Bench(b"a", b"b")
    bench.reader.schedule(bench.cursor(0), changed=True)
    bench.reader.reset()
    assert not any(cursor.in_flight or cursor.queued or cursor.stale for cursor in (bench.cursor(0), bench.cursor(1)))
    bench.link.asked.clear()
    bench.reader.schedule(bench.cursor(0))
    bench.reader.flush()
    assert len(bench.link.asked) == 1


def test_large_entries_reduce_the_streams_of_a_read_rather_than_the_entries_of_each() -> None:
    names = [b"a", b"b", b"c"]
    bench = Bench(*names, reply_bytes=100_000)
    bench.link.answer({name: [[b"1-0", [b"n", b"x" * 20_000]]] for name in names}, info(1), info(1), info(1))
    for at in range(3):
        bench.reader.schedule(bench.cursor(at))
    bench.reader.flush()
    [(commands, _)] = bench.link.asked
    assert streams_asked(bench) == [{b"a", b"b"}]
    assert commands[0][2] == 100_000 // (2 << 14) + 1, "several entries of each, and the last one again"


def test_streams_whose_read_was_interrupted_are_read_first() -> None:
    names = [b"%d" % n for n in range(30)]
    bench = Bench(*names)
    bench.link.answer({}, *[info(0)] * 10)
    bench.reader.flush()
    bench.reader.reset()
    assert [cursor.key for cursor in bench.reader.pop_interrupted()] == names[10:], (
        "of ten each, the first request is answered"
    )
    assert not bench.reader.pop_interrupted()


def hang_up(bench: Bench) -> None:
    """The server ends the connection, and everything is read again on a new one."""
    bench.link.asked.clear()
    bench.reader.reset(closed_by_server=True)
    for cursor in [bench.cursor(at) for at, inbox in enumerate(bench.inboxes) if inbox.cursor]:
        bench.reader.schedule(cursor)
    bench.reader.flush()


def rest(bench: Bench) -> float:
    """Let the time pass for which suspects rest; returns how long that is."""
    waits = [timer for timer in bench.timers if timer[0] < RECOVERY_MS]
    bench.timers = [timer for timer in bench.timers if timer[0] >= RECOVERY_MS]
    for _, action in waits:
        action()
    bench.reader.flush()
    return max(wait_ms for wait_ms, _ in waits)


def nothing_new(bench: Bench) -> None:
    """Answer the first request under way."""
    bench.link.answer(*[{} if command[0] == "XREAD" else info(0) for command in bench.link.asked[0][0]])
    bench.reader.flush()


def streams_asked(bench: Bench) -> list[set[bytes]]:
    """The streams of each request under way."""
    found = []
    for [command, *_], _ in bench.link.asked:
        names = command[command.index("STREAMS") + 1 :] if "STREAMS" in command else command[2:] * 2
        found.append(set(names[: len(names) // 2]))
    return found


def test_a_stream_that_breaks_every_connection_is_found_in_smaller_groups_and_ended() -> None:
    bench = Bench(*[b"%d" % n for n in range(9)], b"big")
    waits, others = [], 0
    while bench.inboxes[-1].ending is None:
        if not bench.link.asked:
            waits.append(rest(bench))
            continue
        [together] = streams_asked(bench)
        if bench.link.asked[0][0][0][-1] == "$":  # from the end of a stream, whatever its size, the reply is empty
            bench.link.answer(None)
        elif b"big" in together:
            hang_up(bench)
        else:  # others go on
            others += 1
            nothing_new(bench)
    assert isinstance(bench.inboxes[-1].ending, CommandFailed)
    assert "client-output-buffer-limit" in str(bench.inboxes[-1].ending)
    assert all(inbox.ending is None for inbox in bench.inboxes[:-1])
    assert waits == sorted(waits)
    assert others


def test_a_stream_that_is_answered_after_a_break_is_no_longer_suspected() -> None:
    bench = Bench(b"s")
    for _ in range(3 * MOST_BREAKS):
        hang_up(bench)
        rest(bench)
        nothing_new(bench)
        bench.reader.schedule(bench.cursor())
        bench.reader.flush()
    assert bench.inboxes[0].ending is None


def test_connections_that_break_at_every_command_have_no_stream_given_up() -> None:
    bench = Bench(b"s")
    for _ in range(3 * MOST_BREAKS):
        hang_up(bench)
        if not bench.link.asked:
            rest(bench)
    assert bench.inboxes[0].ending is None


def test_a_connection_that_timed_out_makes_no_stream_suspected() -> None:
    bench = Bench(b"s")
    for _ in range(3 * MOST_BREAKS):
        bench.reader.reset()
        bench.reader.schedule(bench.cursor())
        bench.reader.flush()
    assert bench.inboxes[0].ending is None
    assert not bench.timers


@pytest.mark.parametrize("reply", [{b"s": [[b"1-0", []]]}, None])
def test_every_reply_counts_as_a_read_for_the_sweep(reply: Any) -> None:
    bench = Bench(b"s")
    bench.table.step = 7
    bench.link.answer(reply, info(1))
    assert bench.cursor().read_step == 7


def test_counters_that_were_requested_are_used_although_the_last_entry_is_still_there() -> None:
    bench = Bench(b"s")
    bench.link.answer({b"s": [[b"1-0", []]]}, info(1))
    bench.cursor().needs_counters, bench.cursor().ordinal = True, None
    bench.reader.schedule(bench.cursor())
    bench.reader.flush()
    bench.link.answer({b"s": [[b"1-0", []], [b"2-0", []]]}, info(2))
    assert (bench.cursor().needs_counters, bench.cursor().ordinal) == (False, 2)


def test_after_broken_connections_one_request_is_in_flight_at_a_time() -> None:
    bench = Bench(b"a", b"b")
    bench.link.answer({}, info(0), info(0))
    for _ in range(2):
        bench.reader._read_size.on_break()
    bench.reader.schedule(bench.cursor(0))
    bench.reader.schedule(bench.cursor(1), changed=True)
    for _ in range(2):
        bench.reader.flush()
        assert len(bench.link.asked) == 1
        bench.link.answer({})
    assert not bench.link.asked


def test_a_subscriber_that_skips_entries_gets_those_after_them_up_to_its_limit() -> None:
    bench = Bench(b"s")
    [inbox] = bench.inboxes
    inbox.skip, inbox.policy = b"2-0", inbox.policy._replace(limit=2)
    bench.table.deliver(bench.cursor(), [[b"%d-0" % number, []] for number in range(1, 6)])
    delivered = [item.id for _ in range(2) if isinstance(item := inbox.next_item(), Message)]
    assert delivered == ["3-0", "4-0"]
    assert bench.cursor().last == b"4-0", "the rest is read once there is room"


@pytest.mark.parametrize(("first", "got"), [(3, ["4-0", "5-0"]), (5, [("3-0", None), "5-0"])])
def test_a_subscriber_that_skips_entries_gets_none_of_them_again_after_a_trim(first: int, got: list[Any]) -> None:
    bench = caught_up(b"s")
    [inbox] = bench.inboxes
    while inbox.next_item():
        pass
    inbox.skip = b"3-0"
    found = {b"s": [[b"%d-0" % number, []] for number in range(first, 6)]}
    counters = {**info(5), b"length": 6 - first, b"first-entry": found[b"s"][0]}
    bench.reader.schedule(bench.cursor(), changed=True)
    bench.reader.flush()
    bench.link.answer(found)
    bench.reader.flush()
    bench.link.answer(found, counters)
    items = [inbox.next_item() for _ in got]
    assert [item.id if isinstance(item, Message) else (item.after, item.missed) for item in items] == got  # type: ignore[union-attr]


def caught_up(*streams: bytes) -> Bench:
    """All streams are read to their only entry."""
    bench = Bench(*streams)
    bench.link.answer({name: [[b"1-0", []]] for name in streams}, *[info(1)] * len(streams))
    assert not bench.link.asked
    return bench
