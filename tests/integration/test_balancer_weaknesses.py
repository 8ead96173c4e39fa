"""Sixteen ways in which balancers of whole streams go wrong, and that this one does not."""

import json

import pytest

from millstream.balancer import StreamAdded
from millstream.balancer.protocol import ANNOUNCEMENT_FIELD, END_LEASES, HEARTBEAT
from millstream.errors import NameHeld, Unavailable
from millstream.observability.metrics import CATALOGUE, LEASE_HELD_SECONDS, LEASES_ENDED, Recorder
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import acl_server
from tests.support.balancers import (
    KEYS,
    LEASE_MS,
    LONG_MS,
    SERVICE,
    StoppedClock,
    add_raw,
    announced,
    counts,
    dead,
    expire,
    group_consumers,
    heartbeat_of,
    heartbeat_request,
    heartbeats_later,
    is_silent,
    names,
    next_added,
    next_notice,
    owners,
    peer,
    pending,
    started,
    trigger_heartbeats,
    unassigned,
    waits,
)
from tests.support.command_stats import scripts_run
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.balancer]


def test_01_a_close_releases_unfinished_streams_instead_of_deleting_them(client: Client) -> None:
    announced(client, *names(5))
    with started(client.url, "a") as leaving:
        next_added(leaving, 5)
        leaving.done("s0000")
        assert leaving.close(FAIL_SAFE_S) == 4
    assert client.execute("XLEN", KEYS.input) == 4
    with started(client.url, "b") as other:
        assert sorted(next_added(other, 4)) == names(4, first=1)


def test_02_a_lost_notification_orphans_no_stream(client: Client) -> None:
    assert client.execute("CONFIG", "GET", "notify-keyspace-events")[1] == b""
    announced(client, *names(3))
    leases = heartbeat_of(client, "b", lease_ms=3 * LEASE_MS).added
    with started(client.url, "a", max_streams=3) as balancer:
        eventually(lambda: waits(client), "it to wait")
        late = peer(client, "b").end_leases("released", leases[:1])  # on a machine that stood still, b is dead by then
        client.execute("DEL", KEYS.events)
        added = next_added(balancer, 3)  # the rest when b is dead, of which it gets no notification
        assert [added[lease.stream].lease.losses for lease in leases] == [len(late), 1, 1]


def test_03_recovery_of_any_number_of_streams_ends_and_leases_each_stream_once(client: Client) -> None:
    count = 11_000
    client.pipeline(
        [("XADD", KEYS.input, "*", ANNOUNCEMENT_FIELD, json.dumps({"DataStreamName": name})) for name in names(count)]
    )
    while heartbeat_of(client, "dying").has_more:
        pass
    assert counts(client) == {"dying": count}
    expire(client, "dying")
    recovered: list[str] = []
    rounds = 0
    more = True
    while more:
        found = heartbeat_of(client, "a")
        recovered += (lease.stream for lease in found.added)
        more = found.has_more
        rounds += 1
    assert rounds <= count / 1_000 + 1
    assert sorted(recovered) == sorted(names(count))
    assert heartbeat_of(client, "a").added == []


def test_04_a_new_consumer_leases_no_stream_of_a_healthy_owner_whatever_its_idle_time(client: Client) -> None:
    announced(client, *names(4))
    old = heartbeat_of(client, "a").added
    ids = [lease.announced for lease in old]
    client.execute("XCLAIM", KEYS.input, KEYS.group, "a", 0, *ids, "IDLE", 3_600_000, "JUSTID")
    found = heartbeat_of(client, "b")
    assert (found.added, found.owner_losses) == ([], 0)
    assert counts(client) == {"a": 4}
    assert set(pending(client).values()) == {"a"}
    assert peer(client, "a").end_leases("done", old) == set()


def test_05_a_bad_announcement_stops_no_consumer_and_is_read_once(client: Client) -> None:
    bad = add_raw(client, "{")
    announced(client, "good")
    with started(client.url, "a") as balancer:
        assert next_notice(balancer, StreamAdded).stream == "good"
        worse = add_raw(client, "nothing", field="of ours")
        announced(client, "better")
        assert next_notice(balancer, StreamAdded).stream == "better"
        assert [letter["id"] for letter in dead(client)] == [bad, worse]
        assert pending(client).keys().isdisjoint({bad, worse})
    assert heartbeat_of(client, "b").total == 2


def test_06_a_backlog_is_shared_from_the_first_heartbeat_on(client: Client) -> None:
    client.pipeline(
        [("XADD", KEYS.input, "*", ANNOUNCEMENT_FIELD, json.dumps({"DataStreamName": name})) for name in names(3_000)]
    )
    for _ in range(4):
        moved = [heartbeat_of(client, name).excess for name in "ab"]
        assert moved == [0, 0], "nothing needs to move"
    assert counts(client) == {"a": 1_500, "b": 1_500}


def test_07_a_stream_that_was_announced_before_the_first_consumer_is_not_skipped(client: Client) -> None:
    announced(client, *names(3))
    with started(client.url, "a") as balancer:
        assert sorted(next_added(balancer, 3)) == names(3)


def test_08_a_zombie_is_recognised_by_its_token_and_its_name_is_not_shared(client: Client) -> None:
    announced(client, "s")
    zombie = heartbeat_of(client, "a").added[0]
    with pytest.raises(NameHeld):
        peer(client, "a", "i2").heartbeat(heartbeat_request())
    expire(client, "a")
    successor = peer(client, "a", "i2").heartbeat(heartbeat_request()).added[0]
    assert successor.token > zombie.token
    with pytest.raises(NameHeld):
        heartbeat_of(client, "a")
    for how in ("done", "released"):
        assert peer(client, "a").end_leases(how, [zombie]) == {"s"}
    assert owners(client) == {"s": "a"}
    assert peer(client, "a", "i2").end_leases("done", [successor]) == set()


def test_09_a_claimed_stream_is_renewed_from_the_start(client: Client) -> None:
    clock = StoppedClock()
    announced(client, "s")
    given = heartbeat_of(client, "b").added
    with started(client.url, "a", recover="claim", options={"clock": clock}) as balancer:
        peer(client, "b").end_leases("released", given)
        lease = balancer.claim("s")
        heartbeats_later(client, balancer)
        while balancer.next(0):  # that it was free
            pass
        for _ in range(4):
            clock.now_ms += LONG_MS / 3
            assert is_silent(client, balancer)
        assert balancer.lease("s") == lease
        assert heartbeat_of(client, "b").owner_losses == 0
        assert owners(client) == {"s": "a"}


def test_10_a_stream_that_is_announced_twice_has_one_owner(client: Client) -> None:
    announced(client, "s", "s", "s")
    given = [lease.stream for name in "abc" for lease in heartbeat_of(client, name).added]
    announced(client, "s")
    given += [lease.stream for name in "abc" for lease in heartbeat_of(client, name).added]
    assert given == ["s"]
    assert len(pending(client)) == 1


def test_11_a_dead_consumer_costs_the_others_no_request_for_each_stream(client: Client) -> None:
    announced(client, *names(300))
    heartbeat_of(client, "dying")
    with started(client.url, "a", "b", "c", "d", max_waiting=1_000) as balancers:
        before = scripts_run(client)
        expire(client, "dying")
        trigger_heartbeats(client)
        eventually(lambda: len(counts(client)) == 4 and unassigned(client) == [], "the recovery")
        assert sorted(stream for one in balancers for stream in next_added(one, 75)) == names(300)
        assert scripts_run(client) - before < 150


def test_12_a_balancer_needs_no_configuration_no_keyspace_events_and_no_certain_database() -> None:
    rules = [
        "app >p ~flights-* ~millstream:* resetchannels +@all -config -psubscribe -subscribe",
        "boss >p ~* &* +@all",
    ]
    with acl_server(rules) as deployment:
        urls = {name: url.rpartition("/")[0] + "/7" for name, url in deployment.urls.items()}
        with Client(urls["boss"]) as boss:
            boss.execute("CONFIG", "SET", "notify-keyspace-events", "Ex")  # of another program
            announced(boss, "s")
            heartbeat_of(boss, "dying", lease_ms=LEASE_MS)
            with started(urls["app"], "a") as balancer:
                assert next_notice(balancer, StreamAdded).lease.losses == 1
            assert boss.execute("CONFIG", "GET", "notify-keyspace-events")[1] == b"xE"


def test_13_a_failed_renewal_loses_no_lease_and_a_thousand_streams_are_renewed_in_one_call(
    client: Client, millstream_server: EmbeddedServer
) -> None:
    client.pipeline(
        [("XADD", KEYS.input, "*", ANNOUNCEMENT_FIELD, json.dumps({"DataStreamName": name})) for name in names(1_000)]
    )
    with Proxy(millstream_server.port) as proxy, started(proxy.url, "a", max_waiting=2_000) as balancer:
        leases = {one.lease.token for one in next_added(balancer, 1_000).values()}
        proxy.cut_before("EVALSHA", containing=HEARTBEAT.sha)
        trigger_heartbeats(client)
        eventually(lambda: sum(proxy.cuts.values()) == 1, "a failed renewal")
        before = scripts_run(client)
        assert is_silent(client, balancer)
        assert scripts_run(client) - before < 20
        assert {lease.token for lease in balancer.leases} == leases


def test_14_done_is_one_step_that_may_be_repeated_when_it_failed(
    client: Client, millstream_server: EmbeddedServer
) -> None:
    announced(client, "s1", "s2")
    with Proxy(millstream_server.port) as proxy, started(proxy.url, "a") as balancer:
        next_added(balancer, 2)
        client.execute("SCRIPT", "LOAD", END_LEASES.text)
        proxy.cut_before("EVALSHA", containing=END_LEASES.sha)
        with pytest.raises(Unavailable):
            balancer.done("s1")
        assert balancer.lease("s1") is not None
        assert (len(owners(client)), len(pending(client)), client.execute("XLEN", KEYS.input)) == (2, 2, 2)
        balancer.done("s1")
        assert (len(owners(client)), len(pending(client)), client.execute("XLEN", KEYS.input)) == (1, 1, 1)


def test_15_dead_consumers_are_removed_from_the_group(client: Client) -> None:
    announced(client, *names(3))
    for name in ("a", "b", "c"):
        heartbeat_of(client, name)
        expire(client, name)
    assert "c" in group_consumers(client)
    heartbeat_of(client, "d", limit=2)
    assert group_consumers(client) == {"d", "unassigned"}
    peer(client, "d").leave()
    assert group_consumers(client) == {"unassigned"}
    assert client.execute("HLEN", KEYS.consumers) == client.execute("ZCARD", KEYS.alive) == 0


def test_16_no_metric_is_kept_for_each_stream_and_claims_are_measured_too(client: Client) -> None:
    recorder = Recorder()
    announced(client, *names(20))
    given = heartbeat_of(client, "b").added
    with started(client.url, "a", options={"metrics": recorder}, recover="claim") as balancer:
        peer(client, "b").end_leases("released", given)
        for lease in given:
            balancer.claim(lease.stream)
        balancer.done(*names(19))
    assert recorder.value(LEASE_HELD_SECONDS, service=SERVICE) == 20
    assert recorder.value(LEASES_ENDED, service=SERVICE, how="done") == 19
    leases = [metric for metric in CATALOGUE if metric.name.startswith("millstream_lease")]
    assert len(leases) >= 10
    assert {label for metric in leases for label in metric.labels} <= {"service", "state", "how", "outcome", "notice"}
    for family in recorder.collect():
        assert len({tuple(sample.labels.items()) for sample in family.samples}) < 20 + 20 * (family.type == "histogram")
