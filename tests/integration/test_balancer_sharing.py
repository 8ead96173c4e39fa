"""How many streams each consumer gets, what moves for it, and what is given up."""

import contextlib
import math
import threading
from functools import partial
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.balancer import Balancer, StreamAdded, StreamDisowned, StreamExpired
from millstream.balancer.protocol import ANNOUNCEMENT_FIELD
from millstream.errors import LeaseLost, WrongType
from millstream.observability.metrics import LEASE_NOTIFICATIONS, Recorder
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys
from tests.support.balancers import (
    KEYS,
    LONG_MS,
    SERVICE,
    StoppedClock,
    add_raw,
    announced,
    counts,
    dead,
    expire,
    heartbeat_of,
    heartbeat_request,
    heartbeats_later,
    is_silent,
    names,
    next_added,
    next_notice,
    owners,
    pass_deadline,
    peer,
    pending,
    rebalance,
    started,
    streams_of,
    trigger_heartbeats,
    unassigned,
    waits,
)
from tests.support.command_stats import commands_run
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.balancer]

# --- Shares ---


def test_a_backlog_is_divided_evenly_from_the_start(client: Client) -> None:
    for name in "abc":
        heartbeat_of(client, name)
    announced(client, *names(100))
    for name in "abc":
        heartbeat_of(client, name)
    assert sorted(counts(client).values()) == [33, 33, 34]


def test_shares_follow_weights_and_limits_and_consumers_without_a_limit_get_the_rest(client: Client) -> None:
    announced(client, *names(100))
    options = {"a": {"weight": 3.0}, "b": {"weight": 1.0}, "c": {"weight": 6.0, "limit": 10}}
    for _ in range(8):
        for name, option in options.items():
            found = heartbeat_of(client, name, requests_all=True, **option)
            peer(client, name).end_leases("released", found.all_held[: found.excess])
    assert counts(client) == {"a": 68, "b": 22, "c": 10} or counts(client) == {"a": 67, "b": 23, "c": 10}


def test_a_limit_that_is_just_met_is_kept_and_no_stream_stays_free(client: Client) -> None:
    """The consumer whose share is exactly its limit comes first for what cannot be divided."""
    announced(client, *names(7))
    options = {"a": {"weight": 2.0, "limit": 2}, "b": {"weight": 2.5}, "c": {"weight": 2.5}}
    heartbeat_of(client, "a", **options["a"])
    for name in "bc":
        heartbeat_of(client, name, max_new=0, **options[name])
    for _ in range(3):
        shares = {name: heartbeat_of(client, name, **option).share for name, option in options.items()}
    assert shares["a"] == 2
    assert sum(shares.values()) == 7
    assert sorted(counts(client).items())[0] == ("a", 2)
    assert sum(counts(client).values()) == 7


def test_streams_above_the_limits_of_all_consumers_wait_for_others(client: Client) -> None:
    announced(client, *names(10))
    rebalance(client, "a", "b", limit=3)
    assert counts(client) == {"a": 3, "b": 3}
    assert sum(found.total for found in rebalance(client, "c", rounds=1).values()) == 10
    assert counts(client) == {"a": 3, "b": 3, "c": 4}


@settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))
@given(
    total=st.integers(0, 30),
    bids=st.lists(
        st.tuples(st.sampled_from([0.001, 0.1, 1, 1, 2.5, 7, 1e6]), st.integers(0, 12)), min_size=1, max_size=5
    ),
)
def test_shares_add_up_to_all_streams_within_the_limits(
    millstream_url: str, total: int, bids: list[tuple[float, int]]
) -> None:
    with Client(millstream_url) as client:
        client.execute("FLUSHALL")
        announced(client, *names(total))
        for _ in range(2):  # in the second each knows of all others
            shares = [
                heartbeat_of(client, f"c{n}", weight=weight, limit=limit or None, max_new=0).share
                for n, (weight, limit) in enumerate(bids)
            ]
        assert all(0 <= share <= (limit or total) for share, (_, limit) in zip(shares, bids, strict=True))
        room = sum(limit or math.inf for _, limit in bids)
        assert sum(shares) == min(total, room)


def test_a_stream_that_cannot_be_divided_evenly_stays_with_its_owner(client: Client) -> None:
    announced(client, *names(3))
    heartbeat_of(client, "b", limit=2)
    heartbeat_of(client, "a")
    before = owners(client)
    assert counts(client) == {"b": 2, "a": 1}
    rebalance(client, "a", "b", rounds=5)
    assert owners(client) == before


def test_every_heartbeat_asks_for_the_weight(client: Client) -> None:
    weights = {"a": 1.0}
    announced(client, *names(10))
    with started(client.url, "a", weight=lambda: weights["a"], moves=1.0, drain_ms=LONG_MS) as balancer:
        next_added(balancer, 10)
        heartbeat_of(client, "b")
        trigger_heartbeats(client)
        lost = [next_notice(balancer, StreamDisowned) for _ in range(5)]
        assert {one.why for one in lost} == {"rebalanced"}
        assert is_silent(client, balancer)
        weights["a"] = 0.25
        trigger_heartbeats(client)
        lost += [next_notice(balancer, StreamDisowned) for _ in range(3)]
        balancer.release(*(one.stream for one in lost))
        assert len(heartbeat_of(client, "b").added) == 8


def test_a_consumer_whose_streams_lag_has_fewer_of_them_until_it_has_caught_up(client: Client) -> None:
    waiting = {"a": 30_000}
    announced(client, *names(25))

    def weight() -> float:  # as in docs/leases.md
        return max(0.25, 1 / (1 + waiting["a"] / 10_000))

    with started(client.url, "a", weight=weight, moves=1.0) as slow, started(client.url, "b", moves=1.0) as quick:
        for one in (slow, quick):
            threading.Thread(target=give_back_all, args=(one,), daemon=True).start()
        eventually(
            lambda: trigger_heartbeats(client) and counts(client) == {"a": 5, "b": 20}, "fewer streams where they lag"
        )
        waiting["a"] = 0
        eventually(lambda: trigger_heartbeats(client) and sorted(counts(client).values()) == [12, 13], "equal parts")


def give_back_all(balancer: Balancer) -> None:
    for notice in balancer:
        if isinstance(notice, StreamDisowned) and notice.why == "rebalanced":
            with contextlib.suppress(LeaseLost):
                balancer.release(notice.lease)


# --- Moves ---


def test_no_more_than_a_part_of_the_streams_moves_in_a_second(client: Client) -> None:
    moved = KEYS.base + ":moves"
    announced(client, *names(400))
    heartbeat_of(client, "a")
    heartbeat_of(client, "b")
    assert heartbeat_of(client, "a", moves=0.05).excess == 20
    assert client.execute("PTTL", moved) in {*range(1_001), -2}, "it is over at the latest after a second"
    assert client.execute("GET", moved) in (b"20", None)
    client.execute("SET", moved, 20)  # this second has no end
    assert heartbeat_of(client, "a", moves=0.05).excess == 0
    assert heartbeat_of(client, "a", moves=0.07).excess == 8
    assert client.execute("GET", moved) == b"28"
    client.execute("DEL", moved)
    assert heartbeat_of(client, "a", moves=0.05, releasing=7).excess == 20
    eventually(lambda: not client.execute("EXISTS", moved), "the end of that second")
    assert heartbeat_of(client, "a", moves=1.0, releasing=199).excess == 1, "what is on its way counts"
    assert heartbeat_of(client, "a", moves=1.0, releasing=200).excess == 0
    assert counts(client) == {"a": 400}, "until it is released"


def test_ten_streams_may_move_in_any_case(client: Client) -> None:
    announced(client, *names(100))
    heartbeat_of(client, "a")
    heartbeat_of(client, "b")
    assert heartbeat_of(client, "a", moves=0.05).excess == 10


def test_at_least_one_stream_moves_and_none_while_others_are_free(client: Client) -> None:
    announced(client, *names(4))
    leases = heartbeat_of(client, "a").added
    heartbeat_of(client, "b", max_new=0)
    peer(client, "a").end_leases("released", leases[:1])
    assert heartbeat_of(client, "a", max_new=0, moves=0.05).excess == 0
    heartbeat_of(client, "b")
    assert heartbeat_of(client, "a", moves=0.05).excess == 1


def test_streams_that_the_program_was_not_notified_of_move_without_its_notice(client: Client) -> None:
    announced(client, *names(6))
    with started(client.url, "a", moves=1.0, drain_ms=LONG_MS) as old:
        eventually(lambda: len(old.leases) == 6, "its streams")
        added = [next_notice(old, StreamAdded).stream for _ in range(2)]
        with started(client.url, "b") as new:
            trigger_heartbeats(client)
            moved = next_added(new, 3)
            assert set(moved).isdisjoint(added)
            assert streams_of([old, new])[0] == set(names(6)) - set(moved)
            rest = next_added(old, 1)
            assert set(rest) | set(added) | set(moved) == set(names(6))
            assert {one.lease.losses for one in moved.values()} == {0}
            assert is_silent(client, old)


def test_streams_with_a_time_limit_move_last(client: Client) -> None:
    announced(client, *names(4))
    with started(client.url, "a", moves=1.0, drain_ms=LONG_MS) as old:
        next_added(old, 4)
        for stream in names(4)[1:3]:
            old.expect(stream, LONG_MS)
        heartbeat_of(client, "b")
        trigger_heartbeats(client)
        assert {next_notice(old, StreamDisowned).stream for _ in range(2)} == {"s0000", "s0003"}


def test_a_program_that_claims_releases_nothing_for_balance(client: Client) -> None:
    announced(client, *names(4))
    with started(client.url, "a", recover="claim", moves=1.0) as old:
        next_added(old, 4)
        heartbeat_of(client, "b")
        assert is_silent(client, old)
        assert counts(client) == {"a": 4}


# --- Back-pressure ---


def has(client: Client, consumer: str, count: int) -> bool:
    return counts(client)[consumer] == count


def test_a_program_that_reads_no_notifications_gets_no_more_streams_than_may_wait(client: Client) -> None:
    announced(client, *names(5))
    with started(client.url, "a", max_waiting=2) as balancer:
        heartbeats_later(client, balancer)
        assert counts(client) == {"a": 2}
        assert sum(not name.startswith("a") for name in pending(client).values()) == 0, "the others are not even read"
        for have in (3, 4, 5):
            next_notice(balancer, StreamAdded)
            eventually(partial(has, client, "a", have), "one more")


def test_a_program_that_reads_no_notifications_leaves_streams_to_one_that_does(client: Client) -> None:
    with started(client.url, "deaf", "b", max_waiting=1, moves=1.0) as (deaf, other):
        announced(client, *names(6))
        seen = set()
        for _ in range(3):
            seen.add(next_notice(other, StreamAdded).stream)
        heartbeats_later(client, deaf)
        heartbeats_later(client, other)
        assert counts(client) == {"deaf": 1, "b": 3}
        assert len(deaf.leases) == 1


def test_no_more_free_streams_are_notified_than_may_wait(client: Client) -> None:
    recorder = Recorder()
    announced(client, *names(5))
    leases = heartbeat_of(client, "b").added
    with started(client.url, "a", recover="claim", max_waiting=2, options={"metrics": recorder}) as balancer:
        peer(client, "b").end_leases("released", leases)
        heartbeats_later(client, balancer)
        assert recorder.value(LEASE_NOTIFICATIONS, service=SERVICE, notice="StreamExpired") == 2
        announced_streams = [
            next_notice(balancer, StreamExpired).stream for _ in range(5) if trigger_heartbeats(client)
        ]  # as there is room for them
        assert sorted(announced_streams) == names(5)
        assert is_silent(client, balancer)
        assert len(owners(client)) == 0


# --- What is given up ---


def test_a_stream_that_kills_its_owners_becomes_a_dead_letter(client: Client) -> None:
    announcement, other = announced(client, "poison", "good")
    for n, name in enumerate("abc"):
        given = {lease.stream: lease.losses for lease in heartbeat_of(client, name, max_losses=3).added}
        assert given == {"poison": n, "good": 0}
        lease = next(
            lease for lease in heartbeat_of(client, name, requests_all=True).all_held if lease.stream == "good"
        )
        expire(client, name)
        peer(client, name).end_leases("released", [lease])
    found = heartbeat_of(client, "d", max_losses=3)
    assert [lease.stream for lease in found.added] == ["good"]
    letter = dead(client)[0]
    assert (letter["stream"], letter["id"]) == ("poison", announcement)
    assert "3 times" in letter["reason"]
    assert '"poison"' in letter["lbs-input"]
    assert list(pending(client)) == [other]
    assert client.execute("HEXISTS", KEYS.base + ":losses", "poison") == 0
    announced(client, "poison")
    assert heartbeat_of(client, "d", max_losses=3).added[0].losses == 0


def test_an_orderly_release_resets_the_owner_losses(client: Client) -> None:
    announced(client, "s")
    for name in "abc":
        heartbeat_of(client, name, max_losses=2)
        expire(client, name)
        lease = heartbeat_of(client, "x", max_losses=2).added[0]
        assert lease.losses == 1
        peer(client, "x").end_leases("released", [lease])
        peer(client, "x").leave()
    assert dead(client) == []


def test_a_release_after_the_time_to_drain_neither_adds_to_the_owner_losses_nor_resets_them(client: Client) -> None:
    announced(client, "s")
    heartbeat_of(client, "dies")
    expire(client, "dies")
    for _ in range(3):
        (lease,) = heartbeat_of(client, "a", max_losses=2).added
        assert lease.losses == 1
        found = heartbeat_of(client, "a", max_losses=2, overran=[lease], max_new=0)
        assert (found.held, found.owner_losses) == (0, 0)
    assert dead(client) == []


@pytest.mark.parametrize(("how", "losses"), [("released", 0), ("lapsed", 1), ("expired", 2)])
def test_a_leave_after_the_end_of_the_leases_is_no_orderly_release(
    client: Client, how: Literal["released", "lapsed", "expired"], losses: int
) -> None:
    announced(client, "s")
    heartbeat_of(client, "dies")
    expire(client, "dies")
    heartbeat_of(client, "a")
    assert peer(client, "a").leave(how) == 1
    assert heartbeat_of(client, "b").added[0].losses == losses


def test_a_close_after_the_end_of_the_lease_counts_as_a_loss(client: Client) -> None:
    clock = StoppedClock()
    announced(client, "s")
    with started(client.url, "a", options={"clock": clock}) as balancer:
        next_notice(balancer, StreamAdded)
        eventually(lambda: waits(client), "it to wait: before that it looks at the clock")
        clock.now_ms += LONG_MS
        assert balancer.close(FAIL_SAFE_S) == 1
    assert heartbeat_of(client, "b").added[0].losses == 1


def test_a_stream_that_is_stuck_too_often_becomes_a_dead_letter(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a", max_losses=2) as balancer:
        for losses in (0, 1):
            assert next_notice(balancer, StreamAdded).lease.losses == losses
            pass_deadline(client, balancer, "s")
            assert next_notice(balancer, StreamDisowned).why == "stuck"
        eventually(lambda: len(dead(client)) == 1, "the dead letter")
        assert is_silent(client, balancer)
        assert owners(client) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no JSON", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ("", "not a JSON object"),
        ('{"Info": 1}', "not a JSON object"),
        ('{"DataStreamName": 7}', "not a JSON object"),
        ('{"DataStreamName": ""}', "not a JSON object"),
        ('{"DataStreamName": null}', "not a JSON object"),
        (b'{"DataStreamName": "\xff', "not a JSON object"),
        ("[" * 5_000, "not a JSON object"),
    ],
)
def test_an_entry_that_is_no_announcement_becomes_a_dead_letter(client: Client, text: str | bytes, reason: str) -> None:
    bad = add_raw(client, text)
    announced(client, "good")
    assert [lease.stream for lease in heartbeat_of(client, "a").added] == ["good"]
    (letter,) = dead(client)
    assert (letter["id"], reason in letter["reason"]) == (bad, True)
    assert bad not in pending(client)
    assert client.execute("XLEN", KEYS.input) == 1


def test_an_announcement_without_its_field_or_with_thousands_of_others_becomes_a_dead_letter(client: Client) -> None:
    add_raw(client, '{"DataStreamName": "s"}', field="other")
    client.execute("XADD", KEYS.input, "*", *(part for n in range(10_000) for part in (f"f{n}", n)))
    announced(client, "good")
    assert [lease.stream for lease in heartbeat_of(client, "a").added] == ["good"]
    letters = dead(client)
    assert [letter["reason"] for letter in letters] == ["it has no field lbs-input"] * 2
    assert (letters[0]["other"], letters[1]["f0"]) == ('{"DataStreamName": "s"}', "0")


@pytest.mark.parametrize("text", ["no JSON", '{"DataStreamName": "s0000"}', None])
def test_any_number_of_announcements_without_a_free_stream_is_read_in_bounded_calls(
    client: Client, text: str | None
) -> None:
    """Malformed, or doubled, or of streams that are given up: Redis serves no other client while a call lasts."""
    count, name = 2_500, "good"
    announced(client, "s0000")
    heartbeat_of(client, "a")
    if text is None:
        client.pipeline(
            [("XADD", KEYS.input, "*", ANNOUNCEMENT_FIELD, f'{{"DataStreamName": "{one}"}}') for one in names(count, 1)]
        )
        while heartbeat_of(client, "dying", weight=1e6, max_new=1_000).has_more:
            pass
        expire(client, "dying")
        while peer(client, "b").heartbeat(heartbeat_request(max_new=0)).has_more:
            pass
    else:
        client.pipeline([("XADD", KEYS.input, "*", ANNOUNCEMENT_FIELD, text)] * count)
    announced(client, name)
    began, left = commands_run(client.execute).total(), [count]
    while name not in owners(client):
        found = heartbeat_of(client, "a", max_losses=1, weight=1e6)
        assert commands_run(client.execute).total() - began < 15_000, "of all that there is, a call takes a thousand"
        left.append(int(client.execute("XLEN", KEYS.input)))
        assert found.has_more or name in owners(client), "what is left is looked at at once"
        began = commands_run(client.execute).total()
    assert len(left) - 1 == count // 1_000 + 1
    assert len(dead(client)) == (0 if text and "s0000" in text else count)


@pytest.mark.parametrize(
    "key", ["dead", "events", "losses", "unassigned", "streams", "owners", "released", "errors", "consumers"]
)
def test_the_error_names_a_key_of_the_wrong_type_before_any_stream_is_leased(client: Client, key: str) -> None:
    announced(client, "fallen")
    heartbeat_of(client, "dies")
    expire(client, "dies")
    heartbeat_of(client, "a", max_new=0)
    bad = add_raw(client, "no JSON")
    announced(client, "new")
    place = f"{KEYS.base}:{key}"
    if client.execute("EXISTS", place):
        client.execute("RENAME", place, "deferred")
    client.execute("SET", place, "somebody's own")
    for _ in range(2):
        with pytest.raises(WrongType, match=place):
            heartbeat_of(client, "a", max_losses=1)
    client.execute("DEL", place)
    if client.execute("EXISTS", "deferred"):
        client.execute("RENAME", "deferred", place)
    found = heartbeat_of(client, "a", max_losses=1)
    assert [lease.stream for lease in found.added] == ["new"]
    assert [letter["stream"] or letter["id"] for letter in dead(client)] == ["fallen", bad]


@pytest.mark.parametrize("info", ["[" * 990 + "]" * 990, "1e999", "0x10", '"\\ud800"'])
def test_an_announcement_whose_information_cannot_be_read_is_added_without_it(client: Client, info: str) -> None:
    add_raw(client, f'{{"DataStreamName": "s", "Info": {info}}}')
    found = heartbeat_of(client, "a")
    assert [lease.stream for lease in found.added] == ["s"] or (info == '"\\ud800"' and len(dead(client)) == 1)


def test_a_stream_name_that_is_no_utf8_is_added_unchanged(client: Client) -> None:
    odd = b"s\xff\xfe".decode("utf-8", "surrogateescape")
    announced(client, odd, "with space and ünïcode")
    with started(client.url, "a") as balancer:
        assert set(next_added(balancer, 2)) == {odd, "with space and ünïcode"}
        balancer.done(odd)
        balancer.release("with space and ünïcode")
        assert next_notice(balancer, StreamAdded).stream == "with space and ünïcode"


def test_services_are_independent_of_each_other(client: Client) -> None:
    other = ServiceKeys("other")
    announced(client, "s")
    heartbeat_of(client, "a")
    assert client.execute("EXISTS", other.input, other.meta, other.owners) == 0
    assert peer(client, "a").heartbeat(heartbeat_request()).held == 1
    assert unassigned(client) == []
