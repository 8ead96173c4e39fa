"""The ranking of streams by the figures that were read last."""

import pytest

from millstream.admin.reports import GroupReport, StreamReport
from millstream.admin.stream_order import StreamOrder, known_lag
from millstream.services.console.ranked_streams import MOST_RANKED, RankedStreams
from tests.support.stream_reports import stream

pytestmark = [pytest.mark.cli]


def group(read: int | None, *, pending: int = 0, last: int = 50) -> GroupReport:
    return GroupReport(name="g", consumers=1, pending=pending, last_delivered_id=f"{last}-0", entries_read=read)


def ranked(*found: StreamReport) -> RankedStreams:
    streams = RankedStreams(sorted(one.name for one in found))
    read(streams, 1_000, *found)
    return streams


def read(streams: RankedStreams, read_ms: float, *found: StreamReport) -> None:
    places = [streams.names.index(one.name) for one in found]
    streams.update(places, {one.name: one for one in found}, read_ms)


def first(streams: RankedStreams, order: StreamOrder, prefix: str = "") -> str:
    return "".join(streams.rank(prefix, order, 0).names)


def test_the_first_in_each_order_are_the_longest_the_oldest_and_those_farthest_behind() -> None:
    streams = ranked(
        stream("a", 100, group(60)),
        stream("b", 300, group(290), first=7),
        stream("c", 200, first=3),
        stream("d", 0),
        stream("e", 90, group(None), group(50, pending=70), first=9),
    )
    assert first(streams, "entries") == "bcaed"
    assert first(streams, "oldest") == "acbed"
    assert first(streams, "lag") == "eabcd"
    assert first(streams, "rate") == ""


def test_a_lag_is_what_redis_knows_within_what_the_stream_has() -> None:
    assert known_lag(stream("a", 100)) is None
    assert known_lag(stream("a", 100, group(60, pending=5))) == 45
    assert known_lag(stream("a", 100, group(60, last=100))) == 0
    assert known_lag(stream("a", 100, group(10, last=60), first=51, length=50)) == 50, "the others were trimmed"
    assert known_lag(stream("a", 100, group(None))) == 100


def test_rates_are_those_between_two_reads_and_are_kept_when_streams_come_and_go() -> None:
    streams = ranked(stream("a", 10), stream("b", 10), stream("c", 10))
    assert streams.rank("", "rate", 0).ranked == 0
    read(streams, 6_000, stream("a", 20), stream("b", 510))
    found = streams.rank("", "rate", 9_000)
    assert (list(found.names), found.ranked, found.age_ms) == (["b", "a"], 2, 3_000)
    later = RankedStreams(["a", "aa", "c", "d"], streams)
    found = later.rank("", "rate", 9_000)
    assert (list(found.names), found.ranked) == (["a"], 1)
    read(later, 8_000, stream("a", 20), stream("c", 700))
    assert first(later, "rate") == "ca"
    read(later, 11_000, stream("a", 9_000, first=100))
    assert first(later, "rate") == "c", "another stream has the name now"


def test_what_is_known_of_thousands_of_streams_stays_with_their_names() -> None:
    streams = ranked(*(stream(f"s{n:04}", n) for n in range(3_000)))
    names = [one for n, one in enumerate(streams.names) if n not in (7, 1_007, 2_999)]
    later = RankedStreams(sorted([*names, "a", "s0500+", "t"]), streams)
    found = later.rank("s", "entries", 2_000)
    assert found.ranked == 2_997
    assert list(found.names) == names[: -MOST_RANKED - 1 : -1]
    assert later.rank("s0500", "entries", 2_000).ranked == 1


def test_those_are_read_next_that_were_read_the_longest_ago_and_begin_with_what_is_asked_for() -> None:
    streams = RankedStreams(["a1", "a2", "a3", "b1", "c1"])
    assert streams.places(["a", "b", "a1"]) == [0, 1, 2, 3]
    read(streams, 2_000, stream("a1", 1))
    read(streams, 1_000, stream("a3", 1))
    assert streams.places(["a"]) == [1, 2, 0]
    assert not streams.is_read("a")
    read(streams, 3_000, stream("a2", 1))
    assert streams.is_read("a")
    assert streams.is_read("nothing")
    assert not streams.is_read("")


def test_of_a_prefix_the_first_thousand_are_ranked_and_a_stream_that_is_gone_is_the_last() -> None:
    names = [f"s{n:04}" for n in range(MOST_RANKED + 50)]
    streams = RankedStreams([*names, "t"])
    read(streams, 1_000, *(stream(name, n) for n, name in enumerate(names)), stream("t", 9_999))
    found = streams.rank("s", "entries", 1_500)
    assert list(found.names) == names[:49:-1]
    assert (found.ranked, found.age_ms) == (1_050, 500)
    streams.update([len(names)], {}, 2_000)
    assert streams.rank("", "entries", 2_000).names[0] == names[-1]
    assert streams.rank("t", "rate", 2_000).ranked == 1
