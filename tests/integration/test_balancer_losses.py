"""Memory and names are lost: what a balancer does about it, on every kind of deployment."""

import contextlib

import pytest

from millstream.balancer import Balancer, Lease, StreamAdded, StreamDisowned, announce
from millstream.errors import LeaseLost, NameHeld
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import acl_server, cluster
from tests.support.balancers import (
    KEYS,
    LEASE_MS,
    LONG_MS,
    SERVICE,
    StoppedClock,
    announced,
    expire,
    group_consumers,
    heartbeat_of,
    heartbeat_request,
    names,
    next_added,
    next_notice,
    owners,
    peer,
    pending,
    policy_of,
    proxy,
    started,
    trigger_heartbeats,
    until_ms,
    waits,
)
from tests.support.clocks import ManualClock
from tests.support.command_stats import scripts_run
from tests.support.waiting import eventually

pytestmark = [pytest.mark.balancer]
__all__ = ["proxy"]  # a fixture


# --- Lost memory ---


def test_owners_announce_their_streams_again_when_redis_has_lost_everything(client: Client) -> None:
    announced(client, *names(4))
    with started(client.url, "a", "b", moves=1.0) as (first, second):
        old = next_added(first, 4)
        trigger_heartbeats(client)
        first.release(next_notice(first, StreamDisowned).stream, next_notice(first, StreamDisowned).stream)
        old |= next_added(second, 2)
        client.execute("FLUSHALL")
        trigger_heartbeats(client)
        gone = [next_notice(one, StreamDisowned) for one in (first, second) for _ in range(2)]
        assert {one.why for one in gone} == {"forgotten"}
        found: dict[str, Lease] = {}
        eventually(lambda: trigger_heartbeats(client) and received_all(found, first, second), "all of them")
        assert sorted(owners(client)) == names(4)
        assert {stream: lease.info for stream, lease in found.items()} == {name: {"of": name} for name in names(4)}
        assert all(found[stream].token > old[stream].lease.token for stream in names(4))


def received_all(found: dict[str, Lease], *balancers: Balancer) -> bool:
    """Read the notifications; whether each of four streams has been added to a consumer."""
    for one in balancers:
        while notice := one.next(0):
            if isinstance(notice, StreamAdded):
                found[notice.stream] = notice.lease
    return sorted(found) == names(4)


def test_owners_repeat_an_announcement_during_which_the_connection_broke(client: Client, proxy: Proxy) -> None:
    announced(client, "s1", "s2")
    with started(proxy.url, "a") as balancer:
        next_added(balancer, 2)
        proxy.cut_before("XADD")
        client.execute("FLUSHALL")
        trigger_heartbeats(client)
        assert {next_notice(balancer, StreamDisowned).why for _ in range(2)} == {"forgotten"}
        assert next_added(balancer, 2).keys() == {"s1", "s2"}
        assert sum(proxy.cuts.values()) == 1


def test_streams_survive_a_redis_that_loses_its_data_and_is_away_for_longer_than_the_lease(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    server, clock = millstream_fresh_server, StoppedClock()
    with Client(server.url) as client:
        announced(client, "s")
        with started(client.url, "a", options={"clock": clock}) as balancer:
            old = next_notice(balancer, StreamAdded).lease
            eventually(lambda: waits(client), "it to wait, so that it finds Redis away before it looks at the clock")
            client.execute("FLUSHALL")
            server.kill()
            clock.now_ms += LONG_MS
            assert next_notice(balancer, StreamDisowned).why == "lost contact"
            server.start()
            new = next_notice(balancer, StreamAdded).lease
            assert (new.stream, new.info) == ("s", old.info)
            assert new.token > old.token


def test_announcements_are_pending_for_their_owners_again_after_the_group_was_lost(client: Client) -> None:
    announced(client, *names(3))
    leases = heartbeat_of(client, "a", limit=2).added
    peer(client, "a").end_leases("released", leases[:1])
    client.execute("XGROUP", "DESTROY", KEYS.input, KEYS.group)
    assert [lease.stream for lease in heartbeat_of(client, "b", recovers=False).added] == ["s0002"]
    assert sorted(pending(client).values()) == ["a", "b", "unassigned"]
    assert client.execute("XLEN", KEYS.input) == 3


def all_read(client: Client) -> bool:
    (group,) = client.execute("XINFO", "GROUPS", KEYS.input)
    stream = client.execute("XINFO", "STREAM", KEYS.input)
    return bool(group[group.index(b"last-delivered-id") + 1] == stream[stream.index(b"last-generated-id") + 1])


@pytest.mark.parametrize(
    "lost", ["the group", "the input stream", "an announcement", "all but the input stream", "the meta hash"]
)
def test_no_stream_is_lost_when_a_part_of_the_service_is_lost(client: Client, lost: str) -> None:
    announced(client, *names(3))
    with started(client.url, "a", max_streams=2) as balancer:
        next_added(balancer, 2)
        match lost:
            case "the group":
                client.execute("XGROUP", "DESTROY", KEYS.input, KEYS.group)
            case "the input stream":
                announced(client, "s9")
                with started(client.url, "reader"):
                    eventually(lambda: len(owners(client)) == 4, "all of them")
                client.execute("DEL", KEYS.input)
            case "an announcement":
                client.execute("XDEL", KEYS.input, balancer.leases[0].announced)
            case "all but the input stream":
                client.execute("DEL", *client.execute("KEYS", f"{KEYS.base}:*"))
            case _:
                client.execute("DEL", KEYS.meta)
        with started(client.url, "b") as other:
            wanted = 4 if lost == "the input stream" else 3
            eventually(lambda: trigger_heartbeats(client) and len(owners(client)) == wanted, "all of them")
            eventually(
                lambda: trigger_heartbeats(client) and len(balancer.leases) + len(other.leases) == wanted, "all of them"
            )
            announced(client, "new")
            eventually(lambda: "new" in owners(client), "what is announced later")
            eventually(lambda: all_read(client), "the end of what was announced again")
            eventually(lambda: all_done(client, balancer, other), "the end of all")


def all_done(client: Client, *balancers: Balancer) -> bool:
    """Be done with all that they have; some may be on their way from one to another."""
    for one in balancers:
        with contextlib.suppress(LeaseLost):
            one.done(*one.leases)
    return owners(client) == {} and pending(client) == {}


# --- Names ---


def test_the_second_of_two_processes_with_one_name_does_not_start(client: Client) -> None:
    announced(client, "s")
    with started(client.url, "a") as first:
        lease = next_notice(first, StreamAdded).lease
        clock = ManualClock()  # which need not wait
        second = Balancer(client.url, SERVICE, consumer="a", policy=policy_of(lease_ms=30_000), clock=clock)
        with pytest.raises(NameHeld, match="another name") as raised:
            second.start()
        assert raised.value.consumer == "a"
        assert clock.now_ms >= 2 * 30_000, "the other might have been dead"
        assert second.close() == 0
        assert first.lease("s") == lease
        assert client.execute("HGET", KEYS.owners, "s") == b"%d a" % lease.token


def test_a_process_that_restarts_under_its_name_joins_when_the_lease_of_the_dead_process_ends(
    client: Client,
) -> None:
    announced(client, "s")
    old = heartbeat_of(client, "a", lease_ms=LEASE_MS).added[0]
    ended_ms = until_ms(client, "a")
    with started(client.url, "a") as balancer:
        new = next_notice(balancer, StreamAdded).lease
        assert new.token > old.token
        assert new.token >= ended_ms * 1_000, "the server gave it away before its lease had ended"
        assert new.losses == 1
    assert peer(client, "a").end_leases("done", [old]) == {"s"}


def test_a_process_whose_name_was_taken_over_reports_its_streams_as_disowned_and_waits(client: Client) -> None:
    clock = StoppedClock()
    announced(client, "s")
    with started(client.url, "a", options={"clock": clock}) as slept:
        lease = next_notice(slept, StreamAdded).lease
        expire(client, "a")
        asked = scripts_run(client)
        peer(client, "a", "i2").heartbeat(heartbeat_request())
        eventually(lambda: scripts_run(client) >= asked + 2, "it to have asked for its name as well")
        clock.now_ms += LONG_MS
        gone = next_notice(slept, StreamDisowned)
        assert (gone.lease, gone.why) == (lease, "lost contact")
        asked = scripts_run(client)
        eventually(lambda: scripts_run(client) >= asked + 2, "it to have asked for its name, and again")
        assert slept.next(0) is None
        with pytest.raises(LeaseLost):
            slept.done("s")
        with pytest.raises(LeaseLost):
            slept.claim("s")
        assert owners(client) == {"s": "a"}
        peer(client, "a", "i2").leave()
        assert next_notice(slept, StreamAdded).stream == "s"


def test_a_consumer_that_leaves_late_does_not_remove_its_successor(client: Client) -> None:
    announced(client, "s")
    heartbeat_of(client, "a")
    expire(client, "a")
    peer(client, "a", "i2").heartbeat(heartbeat_request())
    assert peer(client, "a", "i1").leave() == 0
    assert owners(client) == {"s": "a"}
    assert peer(client, "a", "i2").leave() == 1


# --- Deployments ---


def test_a_balancer_works_in_another_database(millstream_fresh_server: EmbeddedServer) -> None:
    url = millstream_fresh_server.url.rpartition("/")[0] + "/5"
    with Client(url) as client:
        announced(client, "s")
        leases = heartbeat_of(client, "b", lease_ms=LEASE_MS).added
        with started(url, "a") as balancer:
            assert next_notice(balancer, StreamAdded).lease.token > leases[0].token
    with Client(millstream_fresh_server.url) as client:
        assert client.execute("DBSIZE") == 0


def test_a_balancer_works_on_redis_cluster() -> None:
    with cluster() as deployment, Client(deployment.url) as client:
        for service in names(6):
            announce(client, service, "s", service)
        for service in names(6):
            with Balancer(deployment.url, service, consumer="a", policy=policy_of()) as balancer:
                lease = next_notice(balancer, StreamAdded).lease
                assert lease.info == service
                announce(client, service, "t")
                assert next_notice(balancer, StreamAdded).stream == "t"
                balancer.release("s")
                assert next_notice(balancer, StreamAdded).lease.token > lease.token
                balancer.done("s", "t")
        assert sum(node.call("DBSIZE") > 0 for node in deployment.nodes) > 1


def test_a_balancer_needs_no_right_to_configure_subscribe_or_read_other_keys() -> None:
    rules = ["app >p ~flights-* ~millstream:* resetchannels +@all -@admin -@pubsub -config", "boss >p ~* &* +@all"]
    with acl_server(rules) as deployment, Client(deployment.urls["boss"]) as boss:
        boss.execute("CONFIG", "SET", "notify-keyspace-events", "")
        announced(boss, "s1", "s2")
        dying = heartbeat_of(boss, "b", lease_ms=LEASE_MS).added
        assert len(dying) == 2
        with started(deployment.urls["app"], "a") as balancer:
            added = next_added(balancer, 2)
            assert all(added[lease.stream].lease.token > lease.token for lease in dying)
            balancer.announce("s3")
            next_notice(balancer, StreamAdded)
            balancer.release("s1")
            next_notice(balancer, StreamAdded)
            balancer.done("s1", "s2", "s3")
        assert boss.execute("ACL", "LOG") == []
        assert group_consumers(boss) <= {"unassigned"}
