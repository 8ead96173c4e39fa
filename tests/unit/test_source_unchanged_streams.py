"""What the planner of the Spark source need not check again: by the versions of offsets and subscriptions. No Redis."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.model import EntryId
from millstream.spark.source.fair_shares import MAX_PARTIAL_STREAMS, Rotation
from millstream.spark.source.offsets import Offsets, Position
from millstream.spark.source.subscription import SubscribedStreams
from millstream.spark.source.unchanged_streams import UnchangedStreams

pytestmark = [pytest.mark.spark]


def offsets(**ids: int) -> Offsets:
    return Offsets({name: Position(EntryId(ms, 0), ms) for name, ms in ids.items()})


def subscribed(*names: str, version: int = 0) -> SubscribedStreams:
    return SubscribedStreams(version, dict.fromkeys(names).keys())


def test_offsets_are_a_mapping_that_does_not_change_with_a_version_of_their_own() -> None:
    one, other = offsets(a=1, b=2), offsets(a=1, b=2)
    assert one == other == dict(one)
    assert one != offsets(a=1)
    assert one.version != other.version
    assert (list(one), len(one), one["b"].id, one.get("c"), "a" in one) == (["a", "b"], 2, EntryId(2, 0), None, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.version = other.version  # type: ignore[misc]


def test_a_stream_with_nothing_to_do_is_not_checked_again_until_it_changes() -> None:
    streams, start, names = UnchangedStreams(), offsets(a=1, b=1), subscribed("a", "b", "c")
    assert streams.to_check(start, names) == ["a", "b", "c"]
    streams.mark_idle(["a", "c"], start, start)
    assert streams.to_check(start, names) == ["b"], "it has a backlog that the batch had no room for"
    streams.add_changed({"c"})
    assert sorted(streams.to_check(start, names)) == ["b", "c"]


def test_what_was_found_holds_at_the_start_and_at_the_end_of_the_plan() -> None:
    streams, start, names = UnchangedStreams(), offsets(a=1, b=1), subscribed("a", "b")
    streams.to_check(start, names)
    end = offsets(a=1, b=2)
    streams.mark_idle(["a"], start, end)
    assert streams.to_check(end, names) == ["b"]
    assert streams.to_check(start, names) == ["b"], "Spark may repeat its question"


def test_other_offsets_are_checked_whole_even_if_their_positions_are_equal() -> None:
    streams, start, names = UnchangedStreams(), offsets(a=1), subscribed("a", "b")
    streams.to_check(start, names)
    streams.mark_idle(["a", "b"], start, start)
    assert streams.to_check(start, names) == []
    assert streams.to_check(offsets(a=1), names) == ["a", "b"]
    assert streams.to_check(start, names) == ["a", "b"], "those offsets are the known ones now"


def test_a_changed_subscription_is_checked_whole() -> None:
    streams, start = UnchangedStreams(), offsets(a=1)
    streams.to_check(start, subscribed("a"))
    streams.mark_idle(["a"], start, start)
    assert streams.to_check(start, subscribed("a", "b", version=1)) == ["a", "b"]


def test_all_streams_are_checked_where_any_may_have_changed() -> None:
    streams, start, names = UnchangedStreams(), offsets(a=1), subscribed("a", "b")
    streams.to_check(start, names)
    streams.mark_idle(["a", "b"], start, start)
    streams.add_changed(None)
    assert streams.to_check(start, names) == ["a", "b"]


@given(st.integers(MAX_PARTIAL_STREAMS + 1, 300), st.integers(MAX_PARTIAL_STREAMS + 1, 2_000))
def test_each_stream_is_served_before_the_rotation_serves_one_again(count: int, limit: int) -> None:
    rotation, backlogs = Rotation(), {f"s{n:03}": 50 for n in range(count)}
    served: list[str] = []
    while len(served) < count:
        shares = rotation.divide(backlogs, limit)
        assert list(shares) == rotation_order(backlogs, served)[: len(shares)]
        served += shares
    assert sorted(served[:count]) == sorted(backlogs)


def rotation_order(backlogs: dict[str, int], served: list[str]) -> list[str]:
    """All streams, those that were served last at the end."""
    names = sorted(backlogs)
    following = names.index(served[-1]) + 1 if served else 0
    return names[following:] + names[:following]


def test_a_rotation_continues_where_a_scan_ended_though_all_it_saw_was_served() -> None:
    rotation = Rotation()
    assert rotation.divide({"a": 1, "b": 1}, 10, are_all=False) == {"a": 1, "b": 1}
    assert rotation.order("abc") == ["c", "a", "b"]
    rotation.divide({"c": 1}, 10)
    assert rotation.order("abc") == ["a", "b", "c"], "all were served: begin anew"
