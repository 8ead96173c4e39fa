"""What keyed streams keep in Redis: which worker holds what, how much it takes, and that nothing of it stays."""

import sys

import pytest

from millstream.delivery.keyed_stream import LeaseRelease
from millstream.errors import OutOfMemory
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.replies import mapping_of
from millstream.testing.invariants import check_invariants
from tests.support.keyed_fixtures import (
    HOUR_MS,
    KEYS,
    MANY,
    commit,
    drain,
    expire,
    keyed,
    lease_keys,
    pending_by_consumer,
    queued_ids,
    routed,
    violations,
)
from tests.support.memory import more_for_pending

pytestmark = [pytest.mark.keys]

BEGAN_MS = 1_700_000_000_000  # ids are as long as those of today


def test_any_redis_tool_shows_the_owner_of_each_pending_entry(client: Client) -> None:
    lease_keys(routed(client, "AAB-"), queues=1, run=1)
    lease_keys(keyed(client, "w2"), queues=1)
    assert pending_by_consumer(client) == {"w1": [1], "waiting": [2, 4], "w2": [3]}
    consumers = [mapping_of(one) for one in client.execute("XINFO", "CONSUMERS", "in", KEYS.group)]
    assert {one[b"name"]: one[b"pending"] for one in consumers} == {b"w1": 1, b"w2": 1, b"waiting": 2}


def test_an_idle_handler_stores_nothing_for_the_keys_of_the_past(client: Client) -> None:
    worker = routed(client, "A")
    drain(worker)
    client.execute("DEL", "out", KEYS.notify)
    before = client.execute("MEMORY", "USAGE", KEYS.meta)
    client.pipeline([("XADD", "in", f"{n}-0", "k", n) for n in range(2, 5_002)])
    failing = keyed(client, "w2")
    failing.enqueue_new(count=10_000, max_pending=MANY)
    for n, lease in enumerate(lease_keys(failing, queues=1_500).leases):
        failing.release_leases([LeaseRelease(lease, ("backoff", "requeue", "return")[n % 3], 1, 1)])
    lease_keys(failing, queues=700)
    expire(client)
    drain(worker)
    client.execute("DEL", KEYS.notify)
    assert sorted(client.execute("KEYS", "*")) == [b"in", KEYS.meta.encode(), b"out"]
    assert client.execute("MEMORY", "USAGE", KEYS.meta) <= before + 64
    assert client.execute("XPENDING", "in", KEYS.group)[0] == 0


def test_a_waiting_message_costs_little_memory(
    millstream_fresh_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 50_000
    with Client(millstream_fresh_server.url) as client:
        worker = keyed(client)
        # Some in each millisecond: where each has one of its own, Redis needs 60 bytes more of a pending one.
        for first in range(0, count, 10_000):
            client.pipeline(
                [("XADD", "in", f"{BEGAN_MS + n // 20}-{n % 20}", "k", "hot") for n in range(first, first + 10_000)]
            )

        def used() -> int:
            found = client.execute("INFO", "memory")
            return int(found.partition(b"used_memory:")[2].partition(b"\r")[0])

        before = used()
        while worker.enqueue_new(count=5_000, max_pending=MANY):
            pass
        cost = (used() - before) / count
        in_queue = client.execute("MEMORY", "USAGE", KEYS.queue(b"khot"), "SAMPLES", 0) / count
        assert client.execute("LLEN", KEYS.queue(b"khot")) == count
        bound = 125 + more_for_pending(client)
    with capsys.disabled():
        sys.stdout.write(f"\n{cost:.0f} bytes a waiting message, {in_queue:.0f} of them in its key queue\n")
    assert (in_queue < 25, cost < bound) == (True, True)


def test_leases_are_renewed_and_released_at_maxmemory_and_effects_wait(client: Client) -> None:
    worker = routed(client, "AAB")
    a, b = lease_keys(worker).leases
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(OutOfMemory):
            commit(a)
        assert worker.renew_leases([a, b], HOUR_MS, 0) == []
        assert worker.release_leases([LeaseRelease(b, "backoff", 1, 1)]) == []
        assert worker.recover_leases([a], run=10) == (0, 0)
        assert worker.commit([worker.key_effects_of(a, list(a.queued)[:1])], allow_oom=True) == []
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert (violations(worker), queued_ids(client, "kA", "kB")) == ([], [[2], [3]])


def test_the_check_of_the_key_queues_finds_every_violation(client: Client) -> None:
    worker = routed(client, "AABB")
    lease_keys(worker, queues=1)
    breaks: list[tuple[object, ...]] = [
        ("RPUSH", KEYS.ready, "kA"),
        ("DEL", KEYS.ready),
        ("HDEL", KEYS.owners, "kA"),
        ("ZREM", KEYS.leases, "kA"),
        ("XACK", "in", KEYS.group, "1-0"),
        ("LPOP", KEYS.queue(b"kB")),
        ("LPUSH", KEYS.queue(b"kB"), "4-0"),
        ("HSET", KEYS.meta, "fence", 1),
        ("HSET", KEYS.parked, "kB", "1 x"),
        ("HSET", KEYS.crashes, "9-0", 1),
        ("XCLAIM", "in", KEYS.group, "w2", 0, "1-0"),
        ("RPUSH", KEYS.ready, "kZ"),
    ]
    assert violations(worker) == []
    dumps = {key: client.execute("DUMP", key) for key in client.execute("KEYS", "*")}
    for command in breaks:
        client.execute(*command)  # type: ignore[arg-type]
        assert check_invariants(client, KEYS, "in") != [], command
        client.execute("FLUSHDB")
        client.pipeline([("RESTORE", key, 0, dump) for key, dump in dumps.items()])
        assert violations(worker) == [], command
    assert EntryId.parse(worker.enqueued_id) == EntryId(4, 0)
