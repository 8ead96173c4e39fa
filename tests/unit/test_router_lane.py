"""What a lane asks for and when, told by the commands it sends."""

from typing import Any

import pytest

from millstream.metrics import NOBODY
from millstream.router.asking import LaneCalls
from millstream.router.inbox import Cursor, Inbox
from millstream.router.lane import Lane
from millstream.router.shelf import Calls, Shelf

pytestmark = [pytest.mark.router]


class Told:
    """A link that keeps what it is asked, for the test to answer."""

    def __init__(self) -> None:
        self.up = True
        self.received_bytes = 0
        self.asked: list[tuple[list[Any], Any]] = []

    def ask(self, commands: list[Any], then: Any) -> None:
        self.asked.append((list(commands), then))

    def answer(self, *replies: Any, size: int = 100) -> None:
        self.received_bytes += size
        self.asked.pop(0)[1](list(replies))


def info(last: int) -> dict[bytes, Any]:
    return {
        b"length": last, b"last-generated-id": b"%d-0" % last, b"entries-added": last, b"max-deleted-entry-id": b"0-0",
        b"first-entry": [b"1-0", []], b"last-entry": [b"%d-0" % last, []],
    }  # fmt: skip


class Bench:
    """A lane with a stream or more, each with one subscriber."""

    def __init__(self, *streams: bytes) -> None:
        self.link = Told()
        shelf = Shelf(Calls(want=self._want, wake=lambda inbox: None), NOBODY)
        calls = LaneCalls(
            done=lambda cursor: None, want=self._want, moved=lambda: None,
            ask_at=lambda node, cursors: None, later=lambda delay_ms, action: None,
        )  # fmt: skip
        link: Any = self.link
        self.lane = Lane(link, shelf, calls, streams=10, count=100, reply_bytes=10_000, by_slot=False)
        self.inboxes = [Inbox(name.decode(), 1000, "wait") for name in streams]
        for name, inbox in zip(streams, self.inboxes, strict=True):
            shelf.add(inbox, name, b"0-0")
        self.lane.go()

    def _want(self, cursor: Cursor) -> None:
        self.lane.want(cursor)

    def cursor(self, at: int = 0) -> Cursor:
        found = self.inboxes[at].cursor
        assert found is not None
        return found


def test_what_changes_while_it_is_read_is_read_again() -> None:
    bench = Bench(b"s")
    bench.lane.want(bench.cursor(), changed=True)
    bench.link.answer({b"s": [[b"1-0", []]]}, info(1))
    bench.lane.go()
    [(commands, _)] = bench.link.asked
    assert commands[0][-2:] == (b"s", b"0-18446744073709551615"), "from the entry that it has got"


def test_replies_stay_small_whatever_the_size_of_entries() -> None:
    bench = Bench(b"s")
    bench.link.answer({b"s": [[b"1-0", []]]}, info(1), size=100)
    counts = []
    for size in (2_000, 1_000_000, 100):
        bench.lane.want(bench.cursor())
        bench.lane.go()
        counts.append(bench.link.asked[0][0][0][2])
        bench.link.answer({b"s": [[b"1-0", []]]}, size=size)
    assert counts[0] > counts[1] == 10_000 // 2_000 + 1 > counts[2] == 2


def test_changes_do_not_wait_behind_a_long_history() -> None:
    bench = Bench(b"old", b"new")
    bench.link.answer({b"old": [[b"1-0", []]], b"new": [[b"1-0", []]]}, info(1), info(1))
    bench.lane.want(bench.cursor(0))
    bench.lane.go()
    bench.lane.want(bench.cursor(1), changed=True)
    bench.lane.go()
    assert [commands[0][4] for commands, _ in bench.link.asked] == [b"old", b"new"]


def test_a_broken_link_leaves_nothing_waiting() -> None:
    bench = Bench(b"a", b"b")
    bench.lane.want(bench.cursor(0), changed=True)
    bench.lane.reset()
    assert not any(cursor.asked or cursor.queued or cursor.stale for cursor in (bench.cursor(0), bench.cursor(1)))
    bench.link.asked.clear()
    bench.lane.want(bench.cursor(0))
    bench.lane.go()
    assert len(bench.link.asked) == 1


def test_what_is_pushed_meanwhile_does_not_count_as_size_of_entries() -> None:
    bench = Bench(b"s")
    bench.link.answer({b"s": [[b"1-0", []]]}, info(1), size=100)
    for _ in range(2):
        bench.lane.want(bench.cursor())
        bench.lane.go()
        [(commands, _)] = bench.link.asked
        bench.lane.heard([b"other"] * 1000)
        bench.link.answer(
            {b"s": [[b"1-0", []]]}, size=100 + 1000 * len(">2\r\n$10\r\ninvalidate\r\n*1\r\n$5\r\nother\r\n")
        )
    assert commands[0][2] > 10_000 // 256, "no fewer than were guessed in the beginning"


def test_of_large_entries_fewer_streams_are_read_at_a_time_rather_than_one_entry_of_each() -> None:
    names = [b"a", b"b", b"c"]
    bench = Bench(*names)
    bench.link.answer({name: [[b"1-0", []]] for name in names}, info(1), info(1), info(1), size=3 * 2000)
    for at in range(3):
        bench.lane.want(bench.cursor(at))
    bench.lane.go()
    [(commands, _)] = bench.link.asked
    assert commands == [("XREAD", "COUNT", 6, "STREAMS", b"a", b"0-18446744073709551615")]
