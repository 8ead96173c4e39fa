"""Requests, replies and time are lost: what a balancer does about it."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from millstream.balancer import Balancer, StreamAdded, StreamDisowned, StreamExpired, Terminated
from millstream.balancer.protocol import CLAIM_STREAM, END_LEASES, HEARTBEAT, LEAVE_SERVICE
from millstream.errors import LeaseLost, MillstreamError, Unavailable
from millstream.redis_client.client import Client
from millstream.testing.proxy import Proxy
from tests.support.balancers import (
    KEYS,
    LEASE_MS,
    LONG_MS,
    SERVICE,
    announced,
    counts,
    expire,
    heartbeat_of,
    is_silent,
    names,
    next_added,
    next_notice,
    owners,
    pass_deadline,
    peer,
    policy_of,
    proxy,
    started,
    trigger_heartbeats,
    unassigned,
    until_ms,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.balancer]
__all__ = ["proxy"]  # a fixture


# --- Lost requests and replies ---


@pytest.mark.parametrize("side", ["before", "after"])
def test_streams_that_were_leased_in_a_lost_reply_are_added(client: Client, proxy: Proxy, side: str) -> None:
    with started(proxy.url, "a") as balancer:
        (proxy.cut_before if side == "before" else proxy.cut_after)("EVALSHA", containing=HEARTBEAT.sha, times=2)
        announced(client, "s1", "s2")
        added = next_added(balancer, 2)
        assert {one.lease.info["of"] for one in added.values()} == {"s1", "s2"}
        assert sum(proxy.cuts.values()) == 2
        assert is_silent(client, balancer)
        assert owners(client) == {"s1": "a", "s2": "a"}


def test_a_start_whose_reply_was_lost_may_be_repeated_and_misses_no_stream(client: Client, proxy: Proxy) -> None:
    announced(client, "s")
    proxy.cut_after("EVALSHA", containing=HEARTBEAT.sha)
    balancer = Balancer(proxy.url, SERVICE, consumer="a", policy=policy_of())
    with pytest.raises(Unavailable):
        balancer.start()
    assert owners(client) == {"s": "a"}
    with balancer:
        assert next_notice(balancer, StreamAdded).stream == "s"


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_claim_whose_reply_was_lost_is_repeated_or_notified(client: Client, proxy: Proxy, side: str) -> None:
    announced(client, "s1", "s2")
    given = heartbeat_of(client, "b").added
    with started(proxy.url, "a", recover="claim") as balancer:
        peer(client, "b").end_leases("released", given)
        assert {next_notice(balancer, StreamExpired).stream for _ in range(2)} == {"s1", "s2"}
        (proxy.cut_before if side == "before" else proxy.cut_after)("EVALSHA", containing=CLAIM_STREAM.sha, times=2)
        for stream in ("s1", "s2"):
            with pytest.raises(Unavailable):
                balancer.claim(stream)
        assert balancer.claim("s1").stream == "s1"
        trigger_heartbeats(client)
        if side == "after":
            assert next_notice(balancer, StreamAdded).stream == "s2", "it is ours, and nobody has asked again"
            assert owners(client) == {"s1": "a", "s2": "a"}
        else:
            assert owners(client) == {"s1": "a"}
        assert {lease.stream for lease in balancer.leases} == owners(client).keys()


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_done_whose_reply_was_lost_may_be_repeated(client: Client, proxy: Proxy, side: str) -> None:
    announced(client, "s")
    with started(proxy.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        (proxy.cut_before if side == "before" else proxy.cut_after)("EVALSHA", containing=END_LEASES.sha)
        with pytest.raises(Unavailable):
            balancer.done("s")
        balancer.done("s")
        assert balancer.leases == []
        assert client.execute("XLEN", KEYS.input) == 0
        assert is_silent(client, balancer)


def test_a_release_whose_reply_was_lost_is_found_at_the_next_heartbeat(client: Client, proxy: Proxy) -> None:
    announced(client, "s")
    with started(proxy.url, "a", max_streams=1) as balancer:
        old = next_notice(balancer, StreamAdded).lease
        heartbeat_of(client, "0", weight=1_000.0)  # so that what is free is its, whichever consumer asks first
        proxy.cut_after("EVALSHA", containing=END_LEASES.sha)
        with pytest.raises(Unavailable):
            balancer.release("s")
        heartbeat_of(client, "0", weight=1_000.0)
        gone = next_notice(balancer, StreamDisowned)
        assert (gone.lease, gone.why) == (old, "forgotten")
        assert balancer.leases == []
        assert owners(client) == {"s": "0"}


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_release_whose_reply_was_lost_may_be_repeated(client: Client, proxy: Proxy, side: str) -> None:
    announced(client, "s1", "s2")
    leases = heartbeat_of(client, "a").added
    with Client(proxy.url) as cut:
        (proxy.cut_before if side == "before" else proxy.cut_after)("EVALSHA", containing=END_LEASES.sha)
        with pytest.raises(Unavailable):
            peer(cut, "a").end_leases("released", leases)
        heartbeat_of(client, "b", max_new=0)
        claimed = [peer(client, "b").claim(stream) for stream in unassigned(client)]  # others may have it meanwhile
        assert {lease.stream for lease in claimed} == (set() if side == "before" else {"s1", "s2"})
        assert peer(cut, "a").end_leases("released", leases) == set()
    assert owners(client) == {lease.stream: "b" for lease in claimed}
    assert peer(client, "b").end_leases("released", claimed) == set()
    expected = set() if side == "before" else {"s1", "s2"}
    assert peer(client, "a").end_leases("released", leases) == expected, "but not for ever"


def test_streams_whose_release_for_balance_failed_are_released_later(client: Client, proxy: Proxy) -> None:
    announced(client, *names(6))
    with started(proxy.url, "a", moves=1.0, drain_ms=LONG_MS) as balancer:
        eventually(lambda: len(balancer.leases) == 6, "its streams")
        proxy.cut_before("EVALSHA", containing=END_LEASES.sha)
        with started(client.url, "b") as other:
            eventually(lambda: trigger_heartbeats(client) and counts(client) == {"a": 3, "b": 3}, "balance")
            assert sum(proxy.cuts.values()) == 1
            added = next_added(balancer, 3)
            assert added.keys() == {lease.stream for lease in balancer.leases}
            assert added.keys() | next_added(other, 3).keys() == set(names(6))


def test_a_close_whose_reply_was_lost_has_released_the_streams(client: Client, proxy: Proxy) -> None:
    announced(client, "s")
    with started(proxy.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        proxy.cut_after("EVALSHA", containing=LEAVE_SERVICE.sha)
        assert balancer.close() == 0
        assert unassigned(client) == ["s"]


@pytest.mark.parametrize("busy", [False, True])
def test_a_close_keeps_to_its_timeout_and_warns_of_the_streams_that_it_did_not_release(
    client: Client, proxy: Proxy, caplog: pytest.LogCaptureFixture, busy: bool
) -> None:
    announced(client, "s1", "s2")
    with started(proxy.url, "a") as balancer:
        next_added(balancer, 2)
        proxy.freeze()
        if busy:  # another call is on the connection already
            threading.Thread(target=lambda: suppressed(balancer.claim, "s3"), daemon=True).start()
            eventually(lambda: is_talking(balancer), "the claim to be on its way")
        began_s = time.monotonic()
        assert balancer.close(timeout_s=0.5) == 0  # without an answer, which comes below
        assert time.monotonic() - began_s >= 0.5
        assert (
            "consumer a left without releasing 2 streams: no answer within 0.5 s; they are reassigned when its leases "
            "expire" in caplog.text
        )
        assert balancer.leases == []
        assert isinstance(balancer.next(0), Terminated)
        assert balancer.next(0) is None
        proxy.resume()
        eventually(lambda: sorted(unassigned(client)) == ["s1", "s2"], "what it says late is heard all the same")
        assert balancer.next(0) is None, "Terminated was the last word"


def is_talking(balancer: Balancer) -> bool:
    """Whether some thread of this process is in the middle of a conversation with Redis."""
    if not balancer._lock.acquire(blocking=False):
        return True
    balancer._lock.release()
    return False


def suppressed(call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(MillstreamError):
        call(*args)


def test_a_late_stream_whose_end_was_lost_in_a_reply_is_added_under_its_new_token(client: Client, proxy: Proxy) -> None:
    announced(client, "s")
    with started(proxy.url, "a") as balancer:
        old = next_notice(balancer, StreamAdded).lease
        proxy.cut_after("EVALSHA", containing=HEARTBEAT.sha, times=2)
        pass_deadline(client, balancer, "s")
        gone = next_notice(balancer, StreamDisowned)
        assert (gone.lease, gone.why) == (old, "stuck")
        new = next_notice(balancer, StreamAdded).lease
        assert new.token > old.token
        assert balancer.leases == [new]
        assert new.losses == 1, "what was named late once more was not taken away again"
        assert client.execute("HGET", KEYS.owners, "s") == b"%d a" % new.token


def test_a_consumer_is_notified_once_of_a_stream_that_is_late_and_lost(client: Client) -> None:
    announced(client, "s1", "s2")
    with started(client.url, "a") as balancer:
        next_added(balancer, 2)
        client.execute("HDEL", KEYS.consumers, "a")  # first, as no heartbeat may find the stream late alone
        balancer.expect("s1", 0)
        trigger_heartbeats(client)
        gone = [next_notice(balancer, StreamDisowned) for _ in range(2)]
        assert {one.stream for one in gone} == {"s1", "s2"}
        assert {one.why for one in gone} == {"expired"}
        assert next_added(balancer, 2).keys() == {"s1", "s2"}


def test_a_redis_that_is_away_for_all_consumers_costs_none_a_stream(client: Client) -> None:
    announced(client, *names(4))
    held = heartbeat_of(client, "a").added
    heartbeat_of(client, "b")
    expire(client, "a", "b", ago_ms=LONG_MS)
    client.execute("HINCRBY", KEYS.meta, "heartbeat", -LONG_MS)
    found = heartbeat_of(client, "b")
    assert (found.is_new, found.owner_losses) == (False, 0)
    assert found.next_expiry_ms == LONG_MS + 1, "a has a lease more"
    found = heartbeat_of(client, "a", requests_all=True)
    assert found.is_new is False
    assert {lease.token for lease in found.all_held} == {lease.token for lease in held}
    expire(client, "a")
    assert heartbeat_of(client, "b").owner_losses == len(held), "but if b was heard of meanwhile, a is dead"


def test_a_consumer_that_was_away_cannot_claim_from_consumers_that_were_away_with_it(client: Client) -> None:
    announced(client, "s")
    heartbeat_of(client, "a")
    heartbeat_of(client, "b")
    expire(client, "a", "b")
    with pytest.raises(LeaseLost, match="is rejoining"):
        peer(client, "b").claim("s")
    assert owners(client) == {"s": "a"}
    heartbeat_of(client, "b", max_new=0)
    assert unassigned(client) == ["s"]
    assert peer(client, "b").claim("s").losses == 1


def test_a_server_clock_that_went_back_keeps_no_dead_consumer_alive(client: Client) -> None:
    announced(client, "s")
    heartbeat_of(client, "a", lease_ms=300)
    expire(client, "a", ago_ms=-86_400_000)
    found = heartbeat_of(client, "b", lease_ms=300)
    assert found.next_expiry_ms == 301, "a has a lease of b's from now on"


def test_tokens_grow_even_if_the_server_clock_went_back(client: Client) -> None:
    announced(client, "s")
    first = heartbeat_of(client, "a").added[0]
    ahead = first.token + 3_600_000_000
    assert int(client.execute("HGET", KEYS.meta, "fence")) == first.token
    client.execute("HSET", KEYS.meta, "fence", ahead)
    peer(client, "a").end_leases("released", [first])
    assert heartbeat_of(client, "a").added[0].token == ahead + 1


def test_one_survivor_is_enough_to_find_the_dead_consumer_with_the_shortest_lease(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        balancer.release("s")
        next_notice(balancer, StreamAdded)
        heartbeat_of(client, "b", weight=100.0)
        announced(client, "s2")
        (held,) = heartbeat_of(client, "b", weight=100.0, lease_ms=LEASE_MS).added
        ended_ms = until_ms(client, "b")
        trigger_heartbeats(client)
        new = next_notice(balancer, StreamAdded).lease
        assert (new.stream, new.losses) == ("s2", 1)
        assert new.token >= ended_ms * 1_000, "b's lease had not ended yet"
        assert new.token > held.token
