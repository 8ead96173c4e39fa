"""What a program can ask of its balancer, and what it gets for an answer."""

import asyncio
import threading

import pytest

from millstream.balancer import (
    Balancer,
    Lease,
    Notice,
    StreamAdded,
    StreamDisowned,
    Terminated,
    announce,
)
from millstream.errors import AlreadyOwned, ConfigError, LeaseLost, StreamNotFound, Unavailable
from millstream.observability.metrics import (
    LEASE_CLAIMS,
    LEASE_EXPIRATIONS,
    LEASE_HELD_SECONDS,
    LEASE_NOTIFICATIONS,
    LEASE_RECOVERY_SECONDS,
    LEASE_STREAMS,
    LEASES_ASSIGNED,
    LEASES_ENDED,
    Recorder,
)
from millstream.redis_client.client import Client
from tests.support.balancers import (
    KEYS,
    SERVICE,
    announced,
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
    policy_of,
    server_us,
    started,
    trigger_heartbeats,
    unassigned,
    waits,
)
from tests.support.command_stats import scripts_run
from tests.support.threads import threads_named
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.balancer]

# --- Methods ---


def test_a_stream_that_is_done_is_removed_and_may_be_announced_again(client: Client) -> None:
    announced(client, "s1", "s2")
    with started(client.url, "a") as balancer:
        first = next_added(balancer, 2)
        balancer.done("s1")
        assert owners(client) == {"s2": "a"}
        assert client.execute("XLEN", KEYS.input) == 1
        assert list(pending(client)) == [first["s2"].lease.announced]
        balancer.announce("s1")
        assert next_notice(balancer, StreamAdded).lease.token > first["s1"].lease.token
        balancer.done("s1", "s2", "s2")
        assert client.execute("EXISTS", KEYS.owners, KEYS.streams, KEYS.unassigned) == 0
        assert pending(client) == {}


def test_only_the_owner_can_call_done_for_a_stream(client: Client) -> None:
    announced(client, "s1")
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        heartbeat_of(client, "b")
        announced(client, "s2")
        eventually(lambda: peer(client, "b").heartbeat(heartbeat_request()).held == 1, "a share")
        with pytest.raises(LeaseLost) as raised:
            balancer.done("s1", "s2", "never heard of")
        assert raised.value.stream == "s2"
        assert "never heard of" in str(raised.value)
        assert owners(client) == {"s2": "b"}, "what was its own is done"


def test_a_late_done_under_an_old_lease_does_not_end_the_new_lease(client: Client) -> None:
    announced(client, "s1")
    with started(client.url, "a") as balancer:
        old = next_added(balancer, 1)["s1"].lease
        pass_deadline(client, balancer, "s1")
        next_notice(balancer, StreamDisowned)
        new = next_notice(balancer, StreamAdded).lease
        with pytest.raises(LeaseLost):
            balancer.done(old)
        assert owners(client) == {"s1": "a"}
        balancer.done(new)
        assert owners(client) == {}


def test_a_balancer_that_replaces_a_dead_consumer_of_its_name_starts_at_once(client: Client) -> None:
    announced(client, "s1")
    dead_one = peer(client, "a")
    (lease,) = dead_one.heartbeat(heartbeat_request()).added
    with started(client.url, "a", options={"replaces": True}) as balancer:
        assert next_added(balancer, 1)["s1"].lease.token > lease.token
    assert dead_one.end_leases("done", [lease]) == {"s1"}


def test_a_lease_that_redis_has_given_to_another_consumer_is_refused(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        expire(client, "a")
        assert [lease.stream for lease in heartbeat_of(client, "b").added] == ["s"]
        with pytest.raises(LeaseLost, match="'s'"):
            balancer.done("s")
        assert owners(client) == {"s": "b"}
        assert balancer.leases == []


def test_a_released_stream_is_free_for_every_consumer_at_once(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a", "b") as (first, second):
        old = next_notice(first, StreamAdded).lease
        first.release("s")
        eventually(lambda: owners(client), "an owner")
        heartbeats_later(client, first)
        heartbeats_later(client, second)
        takers = [notice for one in (first, second, first, second) if (notice := one.next(0))]
        assert [type(notice) for notice in takers] == [StreamAdded]
        new = takers[0]
        assert isinstance(new, StreamAdded)
        assert new.lease.token > old.token


def test_a_claim_leases_a_free_stream_and_refuses_any_other(client: Client) -> None:
    announced(client, "s1", "s2")
    given = heartbeat_of(client, "b").added
    with started(client.url, "a", moves=0.0001, max_streams=1) as balancer:
        with pytest.raises(AlreadyOwned) as raised:
            balancer.claim("s1")
        assert (raised.value.stream, raised.value.consumer) == ("s1", "b")
        with pytest.raises(StreamNotFound, match="nowhere"):
            balancer.claim("nowhere")
        peer(client, "b").end_leases("released", given)
        eventually(lambda: len(balancer.leases) == 1, "its share")
        other = unassigned(client)[0]
        lease = balancer.claim(other)
        assert balancer.claim(other) == lease
        assert owners(client) == {"s1": "a", "s2": "a"}
        assert balancer.lease(other) == lease
        assert unassigned(client) == []


def test_a_claim_leases_a_stream_of_a_dead_consumer_before_any_heartbeat_has_evicted_it(client: Client) -> None:
    announced(client, "s")
    old = heartbeat_of(client, "b").added[0]
    heartbeat_of(client, "a")
    expire(client, "b")
    lease = peer(client, "a").claim("s")
    assert (lease.losses, lease.token > old.token) == (1, True)
    assert owners(client) == {"s": "a"}


def test_one_of_many_consumers_that_claim_a_stream_leases_it(client: Client) -> None:
    announced(client, "s")
    given = heartbeat_of(client, "b", limit=1).added
    consumers = names(4)
    with started(client.url, *consumers, recover="claim") as balancers:
        peer(client, "b").end_leases("released", given)
        results: list[object] = []

        def claim(balancer: Balancer) -> None:
            try:
                results.append(balancer.claim("s"))
            except AlreadyOwned as error:
                results.append(error.consumer)

        threads = [threading.Thread(target=claim, args=(one,)) for one in balancers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FAIL_SAFE_S)
        winner = owners(client)["s"]
        assert results.count(winner) == 3
        assert sum(isinstance(one, Lease) for one in results) == 1


def test_a_closed_consumer_leaves_at_once_and_may_be_closed_again(client: Client) -> None:
    announced(client, *names(4))
    with started(client.url, "a", "b") as (first, second):
        next_added(first, 4)
        left = [first.close(FAIL_SAFE_S), first.close()]
        assert left == [4, 0]
        added = next_added(second, 4)  # which would look by itself in some hours
        assert {one.lease.losses for one in added.values()} == {0}
    assert sorted(unassigned(client)) == names(4)


def test_a_close_without_streams_waits_for_no_heartbeat_and_ends_the_reader_at_once(client: Client) -> None:
    before = threads_named("balancer-a")
    with started(client.url, "a") as balancer:
        eventually(lambda: waits(client), "it to wait")
        assert threads_named("balancer-a") - before
        assert balancer.close(FAIL_SAFE_S) == 0
        assert not threads_named("balancer-a") - before, "it was to wait for some hours"
        assert isinstance(balancer.next(0), Terminated)


def test_a_balancer_is_closed_by_its_own_reader(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as balancer:
        received: list[Notice] = []
        for notice in balancer:
            received.append(notice)
            balancer.close()
    assert [type(one) for one in received] == [StreamAdded, Terminated]


def test_every_reader_receives_the_end(client: Client) -> None:
    with started(client.url, "a") as balancer:
        ended = []
        readers = [threading.Thread(target=lambda: ended.append(list(balancer)), daemon=True) for _ in range(3)]
        for reader in readers:
            reader.start()
        balancer.close()
        for reader in readers:
            reader.join(FAIL_SAFE_S)
        assert len(ended) == 3
        assert sum(map(len, ended)) == 1


def test_a_balancer_is_read_in_an_event_loop(client: Client) -> None:
    announced(client, "s1")

    async def program(balancer: Balancer) -> list[Notice]:
        found: list[Notice] = []
        async for notice in balancer:
            found.append(notice)
            if len(found) == 1:
                await asyncio.to_thread(balancer.announce, "s2")
            if len(found) == 2:
                await asyncio.to_thread(balancer.close)
        return found

    with started(client.url, "a") as balancer:
        received = asyncio.run(asyncio.wait_for(program(balancer), FAIL_SAFE_S))
    assert [one.stream for one in received if isinstance(one, StreamAdded)] == ["s1", "s2"]
    assert isinstance(received[-1], Terminated)


def test_a_balancer_starts_once_and_closes_even_if_it_never_started(millstream_url: str) -> None:
    with started(millstream_url, "a") as balancer, pytest.raises(ConfigError, match="started already"):
        balancer.start()
    idle = Balancer(millstream_url, SERVICE, consumer="idle")
    assert idle.close() == 0
    assert [type(one) for one in idle] == [Terminated]


def test_a_balancer_does_not_start_without_redis() -> None:
    balancer = Balancer("redis://127.0.0.1:1", SERVICE, policy=policy_of(lease_ms=300))
    with pytest.raises(Unavailable):
        balancer.start()


def test_a_closed_balancer_refuses_to_start_and_to_claim(client: Client) -> None:
    announced(client, "s")
    never = Balancer(client.url, SERVICE, consumer="never")
    never.close()
    with pytest.raises(ConfigError, match="closed"):
        never.start()
    with started(client.url, "a") as balancer:
        next_notice(balancer, StreamAdded)
        balancer.close()
        with pytest.raises(LeaseLost, match="closed"):
            balancer.claim("s")
    assert owners(client) == {}


def test_a_balancer_that_is_closed_while_it_waits_for_its_name_does_not_start(client: Client) -> None:
    heartbeat_of(client, "a")
    waiting = Balancer(client.url, SERVICE, consumer="a", policy=policy_of())
    before = scripts_run(client)

    def close() -> None:
        eventually(lambda: scripts_run(client) > before + 1, "it to have asked for its name, and again")
        waiting.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(ConfigError, match="closed"):
        waiting.start()
    closer.join(FAIL_SAFE_S)


@pytest.mark.parametrize("name", ["", "a b", "x" * 101, "a/b"])
def test_a_consumer_name_is_refused_unless_a_key_can_hold_it(name: str) -> None:
    if name:
        with pytest.raises(ConfigError, match="consumer name"):
            Balancer("redis://127.0.0.1:1", SERVICE, consumer=name)
    else:
        assert Balancer("redis://127.0.0.1:1", SERVICE, consumer=name).consumer


def test_an_announcement_without_a_name_or_json_is_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="must have a name"):
        announce(client, SERVICE, "")
    with pytest.raises(ConfigError, match="is not JSON"):
        announce(client, SERVICE, "s", object())
    assert client.execute("EXISTS", KEYS.input) == 0


def test_a_stream_that_is_announced_twice_has_one_owner(client: Client) -> None:
    announced(client, "s", "s")
    with started(client.url, "a", "b") as (first, second):
        lease = next_notice(first, StreamAdded).lease
        first.announce("s", "again")
        assert is_silent(client, first)
        assert is_silent(client, second)
        assert owners(client) == {"s": "a"}
        assert list(pending(client)) == [lease.announced]
        assert client.execute("XLEN", KEYS.input) == 1


def test_claims_leases_and_recoveries_are_measured(client: Client) -> None:
    recorder = Recorder()
    announced(client, "s1", "s2")
    dying = heartbeat_of(client, "b").added
    with started(client.url, "a", options={"metrics": recorder}, max_streams=1) as balancer:
        with pytest.raises(AlreadyOwned):
            balancer.claim("s1")
        peer(client, "b").end_leases("done", dying[:1])
        expire(client, "b")
        trigger_heartbeats(client)
        next_notice(balancer, StreamAdded)
        assert recorder.value(LEASE_EXPIRATIONS, service=SERVICE) == 1
        assert recorder.value(LEASES_ASSIGNED, service=SERVICE) == 1
        assert recorder.value(LEASE_RECOVERY_SECONDS, service=SERVICE) == 1
        balancer.done(dying[1].stream)
        assert recorder.value(LEASES_ENDED, service=SERVICE, how="done") == 1
        assert recorder.value(LEASE_HELD_SECONDS, service=SERVICE) == 1
        assert recorder.value(LEASE_CLAIMS, service=SERVICE, outcome="AlreadyOwned") == 1
        assert recorder.value(LEASE_NOTIFICATIONS, service=SERVICE, notice="StreamAdded") == 1
        announced(client, "s3", "s4")
        next_notice(balancer, StreamAdded)
        heartbeats_later(client, balancer)
        streams = {
            state: recorder.value(LEASE_STREAMS, service=SERVICE, state=state) for state in ("total", "held", "share")
        }
        assert streams == {"total": 2, "held": 1, "share": 1}
    assert recorder.value(LEASES_ENDED, service=SERVICE, how="closed") == 1
    assert dead(client) == []


def test_only_a_stream_whose_lease_expired_is_measured_as_recovered(client: Client) -> None:
    recorder = Recorder()
    announced(client, "s1", "s2")
    earlier = heartbeat_of(client, "a").added
    with started(client.url, "a", options={"metrics": recorder, "replaces": True}) as balancer:
        assert [next_notice(balancer, StreamAdded).lease.losses for _ in earlier] == [1, 1]
        pass_deadline(client, balancer, "s1")
        assert next_notice(balancer, StreamDisowned).why == "stuck"
        next_notice(balancer, StreamAdded)
        assert recorder.value(LEASE_EXPIRATIONS, service=SERVICE) == 3
        assert recorder.value(LEASE_RECOVERY_SECONDS, service=SERVICE) == 0, "no lease of these had ended by itself"
        balancer.close()
    heartbeat_of(client, "dead")
    check_lateness(client, "dead", finder="b", incarnation="i1")
    peer(client, "b", "i1").leave()
    heartbeat_of(client, "b")
    check_lateness(
        client, "b", finder="b", incarnation="i2"
    )  # nor is the end of an earlier life under its name left out
    expire(client, "b")
    assert peer(client, "c").heartbeat(heartbeat_request(max_new=0)).owner_losses == 2
    heartbeat_of(client, "nothing at all", max_new=0)
    expire(client, "nothing at all")
    assert peer(client, "c").heartbeat(heartbeat_request(max_new=0)).recovery_ms is None


def check_lateness(client: Client, dead_one: str, *, finder: str, incarnation: str) -> None:
    """What is said of how late a consumer was found dead is what the server's clock says."""
    asked_ms = server_us(client) // 1_000
    expire(client, dead_one, ago_ms=2_000)
    late_ms = peer(client, finder, incarnation).heartbeat(heartbeat_request()).recovery_ms
    assert late_ms is not None
    assert 2_000 <= late_ms <= 2_000 + server_us(client) // 1_000 - asked_ms


def test_a_balancer_that_another_thread_closes_while_its_own_is_to_start_ends(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer = Balancer(client.url, SERVICE, consumer="c")
    start = threading.Thread.start

    def close_first(thread: threading.Thread) -> None:
        if thread.name == "balancer-c":
            balancer.close()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", close_first)
    balancer.start()
    assert isinstance(list(balancer)[-1], Terminated)
    assert not client.execute("HEXISTS", KEYS.consumers, "c")
