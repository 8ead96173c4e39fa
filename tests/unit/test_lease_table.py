"""The rules by which the leases of a consumer begin and end, without Redis: replies and times are values."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.balancer.lease_table import Change, LeaseEnded, LeaseTable, UnrenewedLeases
from millstream.balancer.notifications import Lease, StreamAdded, StreamDisowned, StreamExpired
from millstream.balancer.protocol import HeartbeatReply

pytestmark = [pytest.mark.balancer]

LEASE_MS, DRAIN_MS = 5_000, 30_000
EMPTY = HeartbeatReply(
    created="1",
    is_new=False,
    next_expiry_ms=None,
    total=0,
    held=0,
    share=0,
    excess=0,
    has_more=False,
    newest_ids=(b"0-0", b"0-0"),
    owner_losses=0,
    recovery_ms=None,
    added=(),
    unassigned=(),
    all_held=(),
)


def lease(stream: str, token: int = 1) -> Lease:
    return Lease(stream=stream, token=token)


class Heartbeats:
    """A table, and the replies to its heartbeats: each is sent at `now_ms`, and arrives at once."""

    def __init__(self, *added: Lease) -> None:
        self.table = LeaseTable(lease_ms=LEASE_MS, drain_ms=DRAIN_MS)
        self.now_ms = 1_000.0
        self.reply(is_new=True, added=added)

    def reply(
        self,
        *,
        added: tuple[Lease, ...] = (),
        held: int | None = None,
        is_new: bool = False,
        created: str = "1",
        all_held: tuple[Lease, ...] = (),
    ) -> list[Change]:
        """The changes that a heartbeat brings; `held`: the number of leases in Redis, by default that of the table."""
        unrenewed = self.table.expired(self.now_ms)
        there = held if held is not None else self.table_size_after(added, all_held, unrenewed, is_new)
        answer = replace(EMPTY, added=added, held=there, is_new=is_new, created=created, all_held=all_held)
        return self.table.apply(answer, unrenewed, sent_ms=self.now_ms, now_ms=self.now_ms)

    def table_size_after(
        self, added: tuple[Lease, ...], all_held: tuple[Lease, ...], unrenewed: UnrenewedLeases, is_new: bool
    ) -> int:
        if self.table.requests_all and not is_new:
            return len(all_held)
        left = set() if is_new else {one.stream for one in self.table.recent_leases}
        left -= {held.lease.stream for held in (*unrenewed.stuck, *unrenewed.overran)}
        return len(left | {one.stream for one in added})

    @property
    def leases(self) -> list[Lease]:
        return self.table.leases(self.now_ms)


def notices(changes: list[Change]) -> list[object]:
    return [change for change in changes if not isinstance(change, LeaseEnded)]


def reasons(changes: list[Change]) -> dict[str, str]:
    """Why the program is to stop work on each stream; each such lease has left the table for the same reason."""
    found = {notice.stream: notice.why for notice in changes if isinstance(notice, StreamDisowned)}
    ended = {change.lease.stream: change.how for change in changes if isinstance(change, LeaseEnded)}
    assert found == {stream: how for stream, how in ended.items() if stream in found}
    return dict(found)


# --- validity ---


def test_no_lease_is_valid_before_the_first_reply() -> None:
    table = LeaseTable(lease_ms=LEASE_MS, drain_ms=DRAIN_MS)
    assert table.is_new
    assert not table.is_valid(0.0)
    assert not table.has_lapsed(10_000.0), "what never began cannot expire"
    assert table.end_reason(10_000.0) == "released"


def test_a_new_lease_is_valid_and_announced_once() -> None:
    beats = Heartbeats()
    assert beats.reply(added=(lease("s"),)) == [StreamAdded(lease=lease("s"))]
    assert beats.reply() == []
    assert (beats.leases, beats.table.lease("s", beats.now_ms)) == ([lease("s")], lease("s"))
    assert not beats.table.is_new


def test_an_expired_lease_is_not_used_any_more() -> None:
    beats = Heartbeats(lease("s"))
    beats.now_ms += LEASE_MS - 1
    assert beats.leases == [lease("s")]
    beats.now_ms += 1
    assert (beats.leases, beats.table.lease("s", beats.now_ms)) == ([], None)
    assert beats.table.has_lapsed(beats.now_ms)


def test_a_lease_counts_from_the_moment_its_request_was_sent() -> None:
    beats = Heartbeats(lease("s"))
    beats.table.apply(replace(EMPTY, held=1), UnrenewedLeases(), sent_ms=2_000, now_ms=6_500)
    assert beats.table.leases(2_000 + LEASE_MS - 1) == [lease("s")]
    assert beats.table.leases(2_000 + LEASE_MS) == []


def test_the_reply_to_an_older_request_changes_nothing() -> None:
    beats = Heartbeats(lease("s"))
    beats.now_ms = 3_000
    beats.reply()
    late = replace(EMPTY, is_new=True, added=(lease("t"),))
    assert beats.table.apply(late, UnrenewedLeases(), sent_ms=2_000, now_ms=9_000) == []
    assert beats.table.leases(3_000 + LEASE_MS - 1) == [lease("s")]


# --- a consumer that Redis does not know ---


def test_the_leases_of_an_evicted_consumer_end_and_new_ones_begin_in_this_order() -> None:
    beats = Heartbeats(lease("s"), lease("t"))
    changes = beats.reply(is_new=True, added=(lease("s", 2),))
    assert notices(changes) == [
        StreamDisowned(lease=lease("s"), why="expired"),
        StreamDisowned(lease=lease("t"), why="expired"),
        StreamAdded(lease=lease("s", 2)),
    ]
    assert beats.leases == [lease("s", 2)]


def test_leases_of_a_lost_state_end_as_forgotten_and_their_streams_are_to_be_announced_again() -> None:
    beats = Heartbeats(lease("s"))
    lost = replace(EMPTY, is_new=True, created="2")
    assert beats.table.is_state_lost(lost)
    assert beats.table.recent_leases == [lease("s")]
    assert reasons(beats.reply(is_new=True, created="2")) == {"s": "forgotten"}
    assert beats.leases == []
    assert not beats.table.is_state_lost(lost), "once"


def test_a_lost_state_is_still_known_when_the_first_attempt_to_announce_its_streams_failed() -> None:
    beats = Heartbeats(lease("s"))
    beats.table.mark_uncertain()  # the announcement failed, and the consumer is known by now
    assert beats.table.is_state_lost(replace(EMPTY, created="2"))
    assert reasons(beats.reply(created="2")) == {"s": "forgotten"}


def test_streams_whose_leases_expired_before_the_state_was_lost_are_announced_again_too() -> None:
    beats = Heartbeats(lease("s"))
    beats.now_ms += LEASE_MS
    assert reasons(beats.table.lapse(beats.now_ms)) == {"s": "expired"}
    assert beats.table.recent_leases == [lease("s")]
    beats.reply(is_new=True)
    assert beats.table.recent_leases == [], "the reply shows that Redis has its state"


# --- limits of single leases ---


def test_a_lease_without_progress_is_not_renewed_and_ends_as_stuck() -> None:
    beats = Heartbeats(lease("s"), lease("t"))
    assert not beats.table.has_limits
    beats.table.expect("s", 100, beats.now_ms)
    beats.table.expect("elsewhere", 100, beats.now_ms)
    assert beats.table.has_limits
    beats.now_ms += 99
    assert beats.table.expired(beats.now_ms) == ([], [])
    beats.now_ms += 1
    assert [held.lease for held in beats.table.expired(beats.now_ms).stuck] == [lease("s")]
    assert reasons(beats.reply()) == {"s": "stuck"}
    assert beats.leases == [lease("t")]


def test_a_stuck_stream_may_come_back_under_a_new_token_in_the_same_reply() -> None:
    beats = Heartbeats(lease("s"))
    beats.table.expect("s", 0, beats.now_ms)
    changes = beats.reply(added=(lease("s", 2),))
    assert notices(changes) == [StreamDisowned(lease=lease("s"), why="stuck"), StreamAdded(lease=lease("s", 2))]
    assert beats.leases == [lease("s", 2)]
    assert not beats.table.has_limits, "the deadline was that of the old lease"


def test_progress_moves_the_deadline_and_none_removes_it() -> None:
    beats = Heartbeats(lease("s"))
    beats.table.expect("s", 100, beats.now_ms)
    beats.now_ms += 90
    beats.table.expect("s", 100, beats.now_ms)
    beats.now_ms += 90
    assert beats.table.expired(beats.now_ms) == ([], [])
    beats.table.expect("s", None, beats.now_ms)
    beats.now_ms += 1_000_000
    assert beats.table.expired(beats.now_ms) == ([], [])


def test_a_lease_that_the_program_ended_while_it_was_late_is_not_ended_again() -> None:
    beats = Heartbeats(lease("s"))
    beats.table.expect("s", 0, beats.now_ms)
    late = beats.table.expired(beats.now_ms)
    beats.table.end(["s"], "released", beats.now_ms)
    beats.table.add_claimed(lease("s", 2), beats.now_ms)
    changes = beats.table.apply(replace(EMPTY, held=1), late, sent_ms=beats.now_ms, now_ms=beats.now_ms)
    assert changes == []
    assert beats.leases == [lease("s", 2)]


# --- leases that Redis and the table may see differently ---


def test_a_call_without_a_reply_makes_the_next_heartbeat_compare_all_leases() -> None:
    beats = Heartbeats(lease("kept"), lease("ended"), lease("renewed"))
    beats.table.mark_uncertain()
    assert beats.table.requests_all
    changes = beats.reply(all_held=(lease("kept"), lease("renewed", 2), lease("added")))
    assert reasons(changes) == {"ended": "forgotten", "renewed": "forgotten"}
    assert [change for change in changes if isinstance(change, StreamAdded)] == [
        StreamAdded(lease=lease("renewed", 2)),
        StreamAdded(lease=lease("added")),
    ]
    assert beats.leases == [lease("kept"), lease("renewed", 2), lease("added")]
    assert not beats.table.requests_all
    beats.reply(held=2)
    found = reasons(beats.reply(all_held=(lease("kept"), lease("added"))))
    assert found == {"renewed": "taken away"}, "the comparison has removed the doubt"


def test_a_lease_that_an_operator_ended_is_found_by_the_number_of_leases() -> None:
    beats = Heartbeats(lease("s"), lease("t"))
    assert beats.reply(held=1) == []
    assert beats.table.requests_all
    assert reasons(beats.reply(all_held=(lease("t"),))) == {"s": "taken away"}
    assert beats.leases == [lease("t")]
    assert not beats.table.requests_all


def test_a_stream_that_ended_and_was_assigned_anew_between_two_heartbeats_changes_its_token() -> None:
    beats = Heartbeats(lease("s"))
    changes = beats.reply(added=(lease("s", 2),))
    assert notices(changes) == [StreamDisowned(lease=lease("s"), why="taken away"), StreamAdded(lease=lease("s", 2))]
    assert beats.leases == [lease("s", 2)]


# --- the program's own calls ---


def test_a_claimed_lease_is_there_without_a_notification_and_keeps_its_deadline_when_claimed_again() -> None:
    beats = Heartbeats()
    beats.table.add_claimed(lease("s"), beats.now_ms)
    beats.table.expect("s", 100, beats.now_ms)
    beats.table.add_claimed(lease("s"), beats.now_ms)
    assert beats.table.has_limits
    assert beats.reply(held=1) == []
    beats.table.add_claimed(lease("s", 2), beats.now_ms)
    assert beats.leases == [lease("s", 2)]


def test_a_lease_is_held_under_its_own_token_only() -> None:
    beats = Heartbeats(lease("s", 2), lease("t"))
    ours, others = beats.table.held(["t", lease("s", 2), "t", lease("s", 1), "elsewhere"])
    assert (ours, others) == ([lease("t"), lease("s", 2)], ["s", "elsewhere"])


def test_leases_that_the_program_ended_are_gone_without_a_notification() -> None:
    beats = Heartbeats(lease("s"), lease("t"), lease("u"))
    beats.now_ms += 50
    ended = beats.table.end(["s"], "done", beats.now_ms)
    assert ended == [LeaseEnded(lease=lease("s"), how="done", held_ms=50)]
    assert beats.leases == [lease("t"), lease("u")]
    assert notices(beats.table.end_all("closed", beats.now_ms)) == []
    assert (beats.leases, len(beats.table)) == ([], 0)


# --- balance ---


def test_a_revoked_lease_stays_valid_until_the_time_to_release_it_has_passed() -> None:
    beats = Heartbeats(lease("s"))
    (disowned,) = beats.table.revoke_excess(1, beats.now_ms)
    assert disowned == StreamDisowned(lease=lease("s"), why="rebalanced", drain_ms=DRAIN_MS)
    assert beats.leases == [lease("s")], "so that the program can finish its work"
    assert (beats.table.revoked_count, beats.table.has_limits) == (1, True)
    assert beats.table.revoke_excess(1, beats.now_ms) == [], "once"
    for _ in range(DRAIN_MS // 1_000 - 1):
        beats.now_ms += 1_000
        assert beats.reply() == []
    beats.now_ms += 1_000
    assert [held.lease for held in beats.table.expired(beats.now_ms).overran] == [lease("s")]
    assert reasons(beats.reply()) == {"s": "stuck"}
    assert (beats.leases, beats.table.revoked_count) == ([], 0)


def test_the_newest_leases_are_revoked_first_and_those_with_a_deadline_last() -> None:
    beats = Heartbeats(*(lease(name) for name in "abcd"))
    beats.table.expect("d", 1_000, beats.now_ms)
    beats.table.expect("b", 1_000, beats.now_ms)
    order = [beats.table.revoke_excess(1, beats.now_ms) for _ in range(4)]
    assert [notice.stream for (notice,) in order if isinstance(notice, StreamDisowned)] == ["c", "a", "d", "b"]
    assert beats.table.revoke_excess(-1, beats.now_ms) == []


def test_a_revoked_lease_without_progress_counts_as_stuck_and_not_as_late_to_be_released() -> None:
    beats = Heartbeats(lease("s"))
    beats.table.revoke_excess(1, beats.now_ms)
    beats.table.expect("s", 10, beats.now_ms)
    stuck, overran = beats.table.expired(beats.now_ms + DRAIN_MS)
    assert ([held.lease for held in stuck], overran) == ([lease("s")], [])


def test_leases_of_queued_notifications_are_found_unless_they_were_revoked_or_replaced() -> None:
    beats = Heartbeats(lease("a"), lease("b"), lease("c", 2))
    beats.table.revoke_excess(1, beats.now_ms)  # c
    assert beats.table.not_revoked([lease("c", 2), lease("b"), lease("a", 9), lease("gone")]) == [lease("b")]
    assert beats.table.not_revoked([lease("b"), lease("a")]) == [lease("a"), lease("b")]


# --- the end of all leases ---


@pytest.mark.parametrize(
    ("uncertain", "reason", "why"), [(False, "expired", "expired"), (True, "lapsed", "lost contact")]
)
def test_leases_that_ran_out_end_as_a_loss_of_their_owner_unless_redis_was_unavailable(
    uncertain: bool, reason: str, why: str
) -> None:
    beats = Heartbeats(lease("s"))
    if uncertain:
        beats.table.mark_uncertain()
    beats.now_ms += LEASE_MS - 1
    assert beats.table.end_reason(beats.now_ms) == "released"
    beats.now_ms += 1
    assert beats.table.end_reason(beats.now_ms) == reason
    assert reasons(beats.table.lapse(beats.now_ms)) == {"s": why}
    assert beats.table.lapse(beats.now_ms) == [], "once"
    beats.table.rejoin()
    assert beats.table.end_reason(beats.now_ms) == "released"
    assert not beats.table.has_lapsed(beats.now_ms)


# --- streams without an owner ---


def test_an_unassigned_stream_is_announced_again_after_a_lease_unless_it_was_claimed_or_assigned() -> None:
    table = LeaseTable(lease_ms=LEASE_MS, drain_ms=DRAIN_MS)

    def announced(*unassigned: str, room: int = 10) -> list[str]:
        changes = table.announce_unassigned(unassigned, room, sent_ms=now_ms)
        return [notice.stream for notice in changes if isinstance(notice, StreamExpired)]

    now_ms = 1_000.0
    assert announced("a", "b", "a") == ["a", "b"]
    now_ms += LEASE_MS - 1
    assert announced("a", "b") == []
    assert announced("a") == []  # b has an owner
    now_ms += 1
    assert announced("a", "b") == ["a", "b"]
    table.add_claimed(lease("a"), now_ms)
    assert announced("a", "b") == ["a"], "it was claimed, and is without an owner again"


def test_an_unassigned_stream_without_room_for_its_notification_is_announced_later() -> None:
    table = LeaseTable(lease_ms=LEASE_MS, drain_ms=DRAIN_MS)
    assert table.announce_unassigned("abc", 2, sent_ms=0) == [StreamExpired(stream="a"), StreamExpired(stream="b")]
    assert table.announce_unassigned("abc", -1, sent_ms=1) == []
    assert table.announce_unassigned("abc", 5, sent_ms=2) == [StreamExpired(stream="c")]


# --- any order of events ---

names = st.sampled_from("abcd")
tokens = st.integers(1, 3)
some_leases = st.dictionaries(names, tokens, max_size=4).map(lambda found: tuple(lease(*one) for one in found.items()))
heartbeats = st.tuples(st.booleans(), some_leases, some_leases, st.integers(0, 4), st.sampled_from("12"))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("heartbeat"), heartbeats),
        st.tuples(st.just("fail"), st.none()),
        st.tuples(st.just("revoke"), st.integers(0, 3)),
        st.tuples(st.just("expect"), names),
        st.tuples(st.just("end"), names),
        st.tuples(st.just("wait"), st.sampled_from([10, LEASE_MS, DRAIN_MS])),
    ),
    max_size=30,
)


@given(steps)
def test_a_program_that_follows_its_notifications_works_on_the_streams_of_the_table(
    events: list[tuple[str, object]],
) -> None:
    beats, working = Heartbeats(), dict[str, Lease]()
    for kind, detail in events:
        changes: list[Change] = []
        match kind, detail:
            case "heartbeat", (bool(is_new), tuple(added), tuple(all_held), int(held), str(created)):
                changes = beats.reply(added=added, held=held, is_new=is_new, created=created, all_held=all_held)
            case "fail", _:
                beats.table.mark_uncertain()
            case "revoke", int(count):
                changes = beats.table.revoke_excess(count, beats.now_ms)
            case "expect", str(stream):
                beats.table.expect(stream, 5, beats.now_ms)
            case "end", str(stream):
                ours, _ = beats.table.held([stream])
                changes = beats.table.end([one.stream for one in ours], "released", beats.now_ms)
                working.pop(stream, None)
            case "wait", int(duration_ms):
                beats.now_ms += duration_ms
        for change in changes:
            if isinstance(change, StreamAdded):
                assert change.stream not in working, "a stream is disowned before it is added again"
                working[change.stream] = change.lease
            elif isinstance(change, StreamDisowned) and change.why != "rebalanced":
                assert working.pop(change.stream) == change.lease
        ours, _ = beats.table.held("abcd")
        assert {one.stream: one for one in ours} == working
