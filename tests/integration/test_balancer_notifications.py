"""Which notifications a program gets from its balancer, and when."""

from contextlib import closing, suppress
from typing import Literal

import pytest

from millstream.balancer import (
    Balancer,
    Lease,
    StreamAdded,
    StreamDisowned,
    StreamExpired,
    Terminated,
    announce,
)
from millstream.balancer.protocol import end_leases
from millstream.errors import ConfigError, LeaseLost, Unavailable, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.support.balancers import (
    KEYS,
    LEASE_MS,
    LONG_MS,
    SERVICE,
    StoppedClock,
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
    pending,
    policy_of,
    server_us,
    started,
    trigger_heartbeats,
    unassigned,
    until_ms,
    waits,
)
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.balancer]

# --- Notifications ---


def test_an_announced_stream_is_added_with_its_information_token_and_announcement(client: Client) -> None:
    first = announce(client, SERVICE, "before", {"rows": 3})
    began_us = server_us(client)
    with started(client.url, "a") as balancer:
        assert next_notice(balancer, StreamAdded).lease == Lease(
            stream="before", token=balancer.leases[0].token, info={"rows": 3}, announced=first
        )
        second = balancer.announce("während ö", [None, "ü"])
        added = next_notice(balancer, StreamAdded)
        assert (added.stream, added.lease.info, added.lease.announced) == ("während ö", [None, "ü"], second)
        tokens = [lease.token for lease in balancer.leases]
        assert began_us <= tokens[0] < tokens[1] <= server_us(client)
        assert pending(client) == {first: "a", second: "a"}
        assert is_silent(client, balancer)


def test_a_new_announcement_is_received_at_once(client: Client) -> None:
    with started(client.url, "a") as balancer:
        eventually(lambda: waits(client), "it to wait, for some hours if nothing comes")
        announced(client, "s")
        next_notice(balancer, StreamAdded)


@pytest.mark.parametrize("asks", [False, True], ids=["once", "again and again"])
def test_streams_of_a_consumer_that_dies_are_added_elsewhere_soon_after_its_lease(client: Client, asks: bool) -> None:
    announced(client, "s1", "s2")
    began_ms = server_us(client) / 1_000
    dying = heartbeat_of(client, "b", lease_ms=LEASE_MS)
    ended_ms = until_ms(client, "b")
    assert ended_ms > began_ms + LEASE_MS - 1
    assert [lease.losses for lease in dying.added] == [0, 0]
    with started(client.url, "a") as balancer:
        if asks:
            eventually(lambda: trigger_heartbeats(client) and counts(client)["a"] == 2, "the end of the lease")
        added = next_added(
            balancer, 2
        )  # a program that does not ask knows when to look, and would do so in some hours otherwise
        for lease in dying.added:
            assert added[lease.stream].lease.token >= ended_ms * 1_000, "its lease had not ended yet"
            assert added[lease.stream].lease.token > lease.token
            assert added[lease.stream].lease.losses == 1


def test_a_program_that_claims_is_notified_of_expired_streams_until_each_has_an_owner(
    client: Client,
) -> None:
    clock = StoppedClock()
    announced(client, "s")
    heartbeat_of(client, "b")
    with started(client.url, "a", recover="claim", options={"clock": clock}) as balancer:
        expire(client, "b")
        trigger_heartbeats(client)
        assert next_notice(balancer, StreamExpired).stream == "s"
        for _ in range(3):
            assert is_silent(client, balancer), "it is said again after a lease, no sooner"
            clock.now_ms += LONG_MS / 3
        trigger_heartbeats(client)
        assert next_notice(balancer, StreamExpired).stream == "s"
        assert owners(client) == {}
        lease = balancer.claim("s")
        assert (lease.stream, lease.info, lease.losses) == ("s", {"of": "s"}, 1)
        assert balancer.lease("s") == lease
        for _ in range(4):
            assert is_silent(client, balancer), "nor is it said of a stream that somebody has"
            clock.now_ms += LONG_MS / 3
        assert balancer.lease("s") == lease


def test_a_program_that_claims_still_gets_its_share_of_new_streams(client: Client) -> None:
    with started(client.url, "a", recover="claim") as balancer:
        announced(client, "s")
        assert next_notice(balancer, StreamAdded).stream == "s"


def test_a_stream_is_disowned_for_balance_and_moves_when_it_is_released(client: Client) -> None:
    announced(client, "s1", "s2")
    with started(client.url, "a", moves=1.0, drain_ms=LONG_MS) as old:
        next_added(old, 2)
        with started(client.url, "b") as new:
            trigger_heartbeats(client)
            disowned = next_notice(old, StreamDisowned)
            assert (disowned.why, disowned.drain_ms) == ("rebalanced", LONG_MS)
            assert is_silent(client, new)
            assert old.lease(disowned.stream) == disowned.lease, "it may finish what it has in hand"
            old.release(disowned.stream)
            added = next_notice(new, StreamAdded)
            assert added.stream == disowned.stream
            assert added.lease.token > disowned.lease.token
            assert added.lease.losses == 0
            assert old.lease(disowned.stream) is None
            assert is_silent(client, old)


def test_a_stream_that_is_not_released_for_balance_is_revoked_after_the_time_to_drain(client: Client) -> None:
    clock = StoppedClock()
    announced(client, "s1", "s2")
    with started(client.url, "a", moves=1.0, drain_ms=300, options={"clock": clock}) as old:
        next_added(old, 2)
        with started(client.url, "b") as new:
            trigger_heartbeats(client)
            asked = next_notice(old, StreamDisowned)
            clock.now_ms += 299
            assert is_silent(client, old)
            assert old.lease(asked.stream) == asked.lease
            assert is_silent(client, new)
            clock.now_ms += 1
            gone = next_notice(old, StreamDisowned)
            assert (gone.lease, gone.why, gone.drain_ms) == (asked.lease, "stuck", 0)
            assert next_notice(new, StreamAdded).lease.losses == 0, "an owner that takes its time is not lost"
            with pytest.raises(LeaseLost):
                old.release(asked.stream)


def test_a_program_that_is_late_with_one_stream_loses_that_stream_only(client: Client) -> None:
    clock = StoppedClock()
    announced(client, "s1", "s2", "s3")
    with started(client.url, "a", moves=0.001, options={"clock": clock}) as balancer:
        added = next_added(balancer, 3)
        balancer.expect("s1", 100)
        balancer.expect("s3", 100)
        balancer.expect("s3", None)
        clock.now_ms += 99
        assert is_silent(client, balancer)
        clock.now_ms += 1
        lost = next_notice(balancer, StreamDisowned)
        assert (lost.lease, lost.why) == (added["s1"].lease, "stuck")
        again = next_notice(balancer, StreamAdded).lease  # there is no other consumer
        assert (again.stream, again.losses) == ("s1", 1)
        assert again.token > lost.lease.token
        assert balancer.leases == [added["s2"].lease, added["s3"].lease, again]


def test_a_stuck_stream_moves_to_other_consumers_that_have_room_for_it(client: Client) -> None:
    announced(client, *names(3))
    leases = heartbeat_of(client, "a").added
    heartbeat_of(client, "b", weight=2.0, moves=0)
    lost = heartbeat_of(client, "a", stuck=leases[:1])
    assert (lost.added, lost.owner_losses, lost.held, lost.share) == ([], 1, 2, 1)
    taken_over = heartbeat_of(client, "b", weight=2.0).added
    assert [(lease.stream, lease.losses) for lease in taken_over] == [(leases[0].stream, 1)]
    assert taken_over[0].token > leases[0].token
    assert heartbeat_of(client, "a", stuck=leases[:1]).owner_losses == 0, "it is not its own any more"


def test_a_stuck_stream_comes_back_under_a_new_token_if_no_other_consumer_leases_it(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        old = next_notice(balancer, StreamAdded).lease
        pass_deadline(client, balancer, "s")
        assert next_notice(balancer, StreamDisowned).lease == old
        new = next_notice(balancer, StreamAdded).lease
        assert new.token > old.token
        assert new.losses == 1
        assert balancer.lease("s") == new
        assert owners(client) == {"s": "a"}


def test_a_process_that_slept_past_its_lease_reports_its_streams_as_disowned_before_it_adds_any(
    client: Client,
) -> None:
    clock = StoppedClock()
    announced(client, "s1", "s2")
    with started(client.url, "a", options={"clock": clock}) as balancer:
        added = next_added(balancer, 2)
        eventually(lambda: waits(client), "it to wait: before that it looks at the clock")
        clock.now_ms += LONG_MS - 1
        assert balancer.lease("s1") == added["s1"].lease
        assert len(balancer.leases) == 2
        clock.now_ms += 1
        assert balancer.lease("s1") is None
        assert balancer.leases == []
        assert until_ms(client, "a") > server_us(client) / 1_000 + LONG_MS / 2, "it need not wait for that"
        announced(client, "s3")
        gone = [next_notice(balancer, StreamDisowned) for _ in range(2)]
        assert {one.stream for one in gone} == {"s1", "s2"}
        assert {one.why for one in gone} == {"expired"}
        again = next_added(balancer, 3)
        assert all(again[stream].lease.token > added[stream].lease.token for stream in added)
        assert {name: one.lease.losses for name, one in again.items()} == {"s1": 1, "s2": 1, "s3": 0}


def test_a_consumer_that_was_evicted_reports_its_streams_as_expired(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        expire(client, "a")
        heartbeat_of(client, "b")
        assert next_notice(balancer, StreamDisowned).why == "expired"


@pytest.mark.parametrize("how", ["released", "done"])
def test_a_stream_that_an_operator_releases_is_reported_as_disowned(
    client: Client, how: Literal["released", "done"]
) -> None:
    announced(client, "s1", "s2")
    with started(client.url, "a") as balancer:
        added = next_added(balancer, 2)
        end_leases(client, SERVICE, how, ["s1"])
        gone = next_notice(balancer, StreamDisowned)
        assert (gone.lease, gone.why) == (added["s1"].lease, "taken away")
        if how == "released":
            assert next_notice(balancer, StreamAdded).lease.token > gone.lease.token
        assert is_silent(client, balancer)


def test_streams_are_disowned_when_the_lease_ends_without_redis_and_added_again_later(
    client: Client, millstream_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StoppedClock()
    announced(client, "s")
    heartbeat_of(client, "died")
    expire(client, "died")
    policy = policy_of(lease_ms=LEASE_MS)
    with (
        Proxy(millstream_server.port) as proxy,
        closing(Balancer(proxy.url, SERVICE, consumer="a", policy=policy, clock=clock)) as balancer,
    ):
        # It gives up on Redis after a third of a lease, so that a slow machine may need more than one try.
        eventually(lambda: starts(balancer), "the start")
        old = next_notice(balancer, StreamAdded).lease
        assert old.losses == 1
        proxy.freeze()
        eventually(lambda: "consumer a lost contact with Redis" in caplog.text, "it to notice")
        clock.now_ms += LEASE_MS - 1
        reads = clock.reads
        eventually(lambda: clock.reads >= reads + 10, "it to have tried again, and checked whether the lease holds")
        assert balancer.leases == [old]
        assert balancer.next(0) is None
        clock.now_ms += 1
        assert balancer.leases == []
        gone = next_notice(balancer, StreamDisowned)
        assert (gone.lease, gone.why) == (old, "lost contact")
        proxy.cut_all()  # no heartbeat of before arrives after the balancer has left and joined anew
        proxy.resume()
        again = next_notice(balancer, StreamAdded).lease
        assert (again.stream, again.losses) == ("s", 1), "its owner was not lost once more, nor did it give it back"
        assert balancer.leases == [again]


def starts(balancer: Balancer) -> bool:
    with suppress(Unavailable):
        balancer.start()
        return True
    return False


def test_terminated_is_the_last_notification(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        assert balancer.close(FAIL_SAFE_S) == 1
        assert next_notice(balancer, Terminated).error is None
        assert balancer.next() is None
        assert list(balancer) == []
        assert unassigned(client) == ["s"]


def test_an_error_that_no_retry_can_mend_ends_the_balancer_with_its_cause(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        client.execute("DEL", KEYS.alive)
        client.execute("SET", KEYS.alive, "somebody's own")
        trigger_heartbeats(client)
        assert next_notice(balancer, StreamDisowned).why == "lost contact"
        assert isinstance(next_notice(balancer, Terminated).error, WrongType)
        client.execute("DEL", KEYS.alive)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_weight_function_that_fails_ends_the_balancer_with_its_error(
    client: Client, kind: type[BaseException]
) -> None:
    weights = [1.0]

    def weight() -> float:
        if not weights:
            raise kind("no weight")
        return weights.pop()

    announced(client, "s")
    with started(client.url, "a", weight=weight) as balancer:
        next_notice(balancer, StreamAdded)
        trigger_heartbeats(client)
        assert next_notice(balancer, StreamDisowned).why == "lost contact"
        error = next_notice(balancer, Terminated).error
        assert isinstance(error, ConfigError)
        assert "weight() failed: no weight" in str(error)
        assert balancer.leases == []
