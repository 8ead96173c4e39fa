"""Shared by the tests of keyed streams: workers without processes, a Spark run without Spark, and a settable clock."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import Effects
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease, LeaseResult, queue_of_key
from millstream.handlers.encoding import pack_output
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import mapping_of
from millstream.testing.invariants import check_invariants

KEYS = HandlerKeys("app", "handle", "in")
MANY = 1_000_000
HOUR_MS = 3_600_000
"""Duration of leases and back-offs that end only when the test says so, with `expire`."""


def queue_of(entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
    return queue_of_key(mapping_of(pairs).get(b"k"), entry_id)


def keyed(
    client: Client, name: str = "w1", stream: str = "in", *, join: bool = True, by_field: bool = True
) -> KeyedStream:
    """A worker's membership; `by_field`: the server finds the keys of entries."""
    found = KeyedStream(client, stream, queue_of=queue_of, app="app", handler="handle", consumer=name, into="out")
    found.key_field = b"k" if by_field else None
    if join:
        found.join()
    return found


def publish(client: Client, keys: str, *, first: int = 1, stream: str = "in") -> None:
    """Add one entry for each letter; '-' means one without a key. Ids are numbers that count up."""
    client.pipeline(
        [("XADD", stream, f"{n}-0", *(() if key == "-" else ("k", key)), "n", n) for n, key in enumerate(keys, first)]
    )


def routed(client: Client, keys: str, name: str = "w1") -> KeyedStream:
    publish(client, keys)
    worker = keyed(client, name)
    worker.enqueue_new(count=1_000, max_pending=MANY)
    return worker


def queued_ids(client: Client, *names: str) -> list[list[int]]:
    return [
        [int(one.partition(b"-")[0]) for one in client.execute("LRANGE", KEYS.queue(name.encode()), 0, -1)]
        for name in names
    ]


def pending_by_consumer(client: Client) -> dict[str, list[int]]:
    """The pending entries of each consumer, as any tool sees them."""
    found: dict[str, list[int]] = {}
    for entry_id, name, *_ in client.execute("XPENDING", "in", KEYS.group, "-", "+", 10_000):
        found.setdefault(name.decode(), []).append(int(entry_id.partition(b"-")[0]))
    return found


def violations(worker: KeyedStream) -> list[str]:
    return check_invariants(worker._client, worker._store.keys(worker.stream), worker.stream)


def lease_keys(
    worker: KeyedStream, *, queues: int = 1_000, entries: int = MANY, run: int = 100, **limits: Any
) -> LeaseResult:
    return worker.lease_keys(queues=queues, entries=entries, run=run, lease_ms=HOUR_MS, now_ms=0, **limits)


def lease_one(worker: KeyedStream, *, run: int = 100) -> KeyLease:
    (lease,) = lease_keys(worker, queues=1, run=run).leases
    return lease


def ids(lease: KeyLease) -> list[int]:
    return [int(one.id.partition(b"-")[0]) for one in lease.queued]


def unit_of(lease: KeyLease, count: int = 1) -> Effects:
    """The first entries of a lease, each with one output."""
    chosen = list(lease.queued)[:count]
    unit = lease.stream.key_effects_of(lease, chosen)
    unit.add_outputs([pack_output({"line": lease.queue, "id": one.id, "fence": lease.fence}) for one in chosen])
    return unit


def commit(lease: KeyLease, count: int = 1) -> bool:
    """Commit the first entries of a lease; False if it was refused."""
    if lease.stream.commit([unit_of(lease, count)]):
        return False
    for _ in range(count):
        lease.queued.popleft()
    lease.in_flight_count -= count
    return True


def expire(client: Client, queue: bytes | None = None) -> None:
    """Let leases expire, and back-offs be due: of one key queue, or of all."""
    for times in (KEYS.leases, KEYS.backoff):
        for name in client.execute("ZRANGE", times, 0, -1):
            if queue in (None, name):
                client.execute("ZADD", times, "XX", 1, name)


def outputs(client: Client) -> dict[str, list[int]]:
    """The committed ids of each key queue, in the order of commits."""
    found: dict[str, list[int]] = defaultdict(list)
    for _, pairs in client.execute("XRANGE", "out", "-", "+"):
        found[pairs[1].decode()].append(int(pairs[3].partition(b"-")[0]))
    return dict(found)


def expected(keys: str) -> dict[str, list[int]]:
    """The value of `outputs` when all published entries are committed, in order and once."""
    found: dict[str, list[int]] = defaultdict(list)
    for n, key in enumerate(keys, 1):
        found[f"i{n}-0" if key == "-" else f"k{key}"].append(n)
    return dict(found)


def drain(worker: KeyedStream, *, max_pending: int = MANY) -> None:
    """Process all entries that can be processed."""
    idle = 0
    while idle < 3:
        routed = worker.enqueue_new(count=100, max_pending=max_pending)
        leases = lease_keys(worker).leases
        for lease in leases:
            assert commit(lease, len(lease.queued))
        worker.release_leases([LeaseRelease(one, "requeue") for one in leases])
        idle = 0 if routed or leases else idle + 1


def spark(client: Client) -> CommitStore:
    store = CommitStore(client, app="app", handler="handle", into="out")
    return store.with_token(store.new_token(["in"]))


def run_on_spark(client: Client, most: int = MANY, *, advance: bool = True) -> CommitStore:
    """Take over from the workers and commit up to `most` entries, as a pipeline does.

    `advance`: end the batch; without it, it dies before that.
    """
    store = spark(client)
    position = store.begin_run(["in"])["in"]
    begin = position.committed_id or EntryId(0, 0)
    entries = client.execute("XRANGE", "in", f"({begin}", "+")
    takeover_offset = position.takeover_offset or EntryId(0, 0)
    still_open = store.incomplete("in", [one.decode() for one, _ in entries if EntryId.parse(one) <= takeover_offset])
    done, end = 0, begin
    for entry_id, pairs in entries:
        if done >= most:
            break
        end = EntryId.parse(entry_id)
        if end <= takeover_offset and entry_id.decode() not in still_open:
            continue
        done += _commit_on_spark(store, entry_id, queue_of(entry_id, pairs))
    if advance and end > begin:
        store.advance_committed({"in": end})
    return store


def _commit_on_spark(store: CommitStore, entry_id: bytes, mark: bytes) -> int:
    before = store.load({"in": ([mark], [])})["in"].get(mark, b"")
    if before and EntryId.parse(before) >= EntryId.parse(entry_id):
        return 0
    unit = Effects(mark, before)
    unit.add_message(entry_id.decode())
    unit.add_outputs([pack_output({"line": mark, "id": entry_id, "fence": store.token})])
    assert store.commit({"in": [unit]}) == []
    return 1


def joined_by_field(client: Client, stream: str, *, app: str, handler: str) -> KeyedStream:
    """A stream that the worker `w-0` of a handler has joined; the key is in the first field of an entry."""
    opened = KeyedStream(
        client,
        stream,
        queue_of=lambda entry_id, pairs: queue_of_key(pairs[1], entry_id),
        app=app,
        handler=handler,
        consumer="w-0",
    )
    opened.join()
    return opened


def keys_in_each_state(client: Client) -> KeyedStream:
    """Five messages of `a`, leased; three of `b`, backing off; two of `c`, parked; one of `d`, ready."""
    opened = joined_by_field(client, "orders", app="shop", handler="pay")
    for key, count in (("a", 5), ("b", 3), ("c", 2), ("d", 1)):
        for n in range(count):
            client.execute("XADD", "orders", "*", "key", key, "n", n)
    opened.enqueue_new(count=100, max_pending=1_000)
    leased = opened.lease_keys(queues=3, entries=100, run=2, lease_ms=60_000, now_ms=0)
    _, b, c = leased.leases
    opened.release_leases(
        [LeaseRelease(b, "backoff", 60_000, 1), LeaseRelease(c, "park", "failed: no such account", 4)]
    )
    return opened
