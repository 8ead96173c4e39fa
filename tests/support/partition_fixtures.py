"""Shared by the tests of partitions: workers without threads, whose every step the test chooses."""

import string
from collections import defaultdict

from millstream.delivery.keyed_stream import KeyLease, LeaseRelease, queue_of_key
from millstream.handlers.encoding import pack_output
from millstream.model import EntryId
from millstream.partitions.key_migration import KeyMigration, PartitionStream
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.invariants import check_invariants
from tests.support.waiting import FAIL_SAFE_S

BASE = "orders"
MANY = 1_000_000


class BrokenOff(Exception):
    """A growth was killed."""


def keys_of(layout: PartitionMap, place: int) -> HandlerKeys:
    return HandlerKeys("app", "handle", layout.stream(place))


def growth_killed_after(client: Client, steps: int, count: int) -> bool:
    """Grow to `count`, but die after so many steps; False if the growth finished before."""
    left = iter(range(steps))

    def after_step() -> None:
        if next(left, None) is None:
            raise BrokenOff

    try:
        Partitions(client, BASE, after_step=after_step).grow(count)
    except BrokenOff:
        return True
    return False


class Publisher:
    """A producer that numbers the messages of each key, and keeps the partition map that it saw last."""

    def __init__(self, client: Client, partitions: int = 2) -> None:
        self.producer = PartitionedProducer(
            client, BASE, key="k", partitions=partitions, patience_ms=FAIL_SAFE_S * 1_000
        )

    def publish(self, sent: dict[str, list[int]], keys: str) -> None:
        rows = []
        for key in keys:
            sent[key].append(len(sent[key]) + 1)
            rows.append({"k": key, "n": sent[key][-1]})
        self.producer.publish_many(rows)


class Worker:
    """Takes one step at a time, by the partition map that it saw last."""

    state_ttl_ms: int | None = None

    def __init__(self, client: Client, name: str = "w1", *, app: str = "app", handler: str = "handle") -> None:
        self.client = client
        self.name = name
        self.app, self.handler = app, handler
        self.streams: dict[int, PartitionStream] = {}
        self.moves = self.rounds = self._new_moves(Partitions(client, BASE).create(2))
        self.refresh()

    def _new_moves(self, layout: PartitionMap) -> KeyMigration:
        expires = self.state_ttl_ms is not None
        moves = KeyMigration(self.client, layout, app=self.app, handler=self.handler, state_expires=expires)
        moves._refreshed_ms = float("-inf")
        return moves

    def refresh(self) -> None:
        """Refresh the partition map, and join new partitions."""
        layout = Partitions(self.client, BASE).require()
        self.moves.partition_map = layout
        for place, name in reversed(list(enumerate(layout.streams))):
            if place not in self.streams:
                stream = PartitionStream(
                    self.client,
                    name,
                    queue_of=lambda entry_id, pairs: queue_of_key(pairs[1], entry_id),
                    consumer=self.name,
                    into="out",
                    app=self.app,
                    handler=self.handler,
                )
                stream.let_states_expire(self.state_ttl_ms)
                stream.join()
                stream.partition, stream.migration = place, self.moves
                stream.forward = lambda *_: False
                self.streams[place] = stream

    def route(self, place: int, count: int = 100) -> int:
        return self.streams[place].enqueue_new(count=count, max_pending=MANY) if place in self.streams else 0

    def move(self) -> int:
        """Run one maintenance round over all partitions."""
        self.moves._refreshed_ms = float("-inf")  # as if some time had gone by
        return self.moves.import_keys(list(self.streams)) + self.moves.drain(list(self.streams))

    def lease_keys(self, place: int, queues: int = 1, run: int = 100) -> list[KeyLease]:
        if place not in self.streams:
            return []
        return self.streams[place].lease_keys(queues=queues, entries=MANY, run=run, lease_ms=3_600_000, now_ms=0).leases

    def finish(self, lease: KeyLease) -> None:
        """Commit all of a lease, and check that each message is run on the state that the one before has left."""
        unit = lease.stream.key_effects_of(lease, list(lease.queued))
        before = int(lease.state or 0)
        for one in lease.queued:
            number = int(one.pairs[3])
            unit.add_outputs(
                [pack_output({"k": one.pairs[1], "n": one.pairs[3], "before": before, "fence": lease.fence})]
            )
            before = number
        # Every third time the state ends, as a state may.
        unit.state = b"" if before % 3 == 0 else str(before).encode()
        assert lease.stream.commit([unit]) == []
        lease.in_flight_count = 0
        lease.stream.release_leases([LeaseRelease(lease, "requeue")])

    def work(self, *, until_idle: int = 6) -> None:
        """Work until nothing is left to do."""
        idle = rounds = 0
        while idle < until_idle:
            rounds += 1
            assert rounds < 500, "there is no end to it"
            done = 0
            for place in list(self.streams):
                done += self.route(place)
                for lease in self.lease_keys(place, queues=100):
                    self.finish(lease)
                    done += 1
            done += self.move()
            idle = 0 if done else idle + 1


def outcome(client: Client) -> dict[str, list[int]]:
    """The committed numbers of each key, in order; checks states and fences on the way."""
    found: dict[str, list[int]] = defaultdict(list)
    fences: dict[str, int] = defaultdict(int)
    for _, pairs in client.execute("XRANGE", "out", "-", "+"):
        key, number, before, fence = pairs[1].decode(), *map(int, pairs[3::2])
        last = found[key][-1] if found[key] else 0
        assert before in (last, 0 if last % 3 == 0 else last), f"{key} {number} ran on state {before} after {last}"
        assert fence >= fences[key]
        found[key].append(number)
        fences[key] = fence
    return dict(found)


def check_all(client: Client) -> list[str]:
    """Return what is wrong once all is done: in the key queues of any partition, or in the remains of migrations."""
    layout = Partitions(client, BASE).require()
    wrong = []
    for place in range(layout.count):
        k = keys_of(layout, place)
        wrong += check_invariants(client, k, layout.stream(place))
        if client.execute("EXISTS", k.awaiting, k.imported, k.parked):
            wrong.append(f"{k.stream} has moves that do not end")
        for key in client.execute("HKEYS", k.state):
            if layout.partition_of(key) != place:
                wrong.append(f"the state of {key!r} has stayed in {k.stream}")
    return wrong


def places_are_right(client: Client, layout: PartitionMap) -> bool:
    """Whether each entry is in the partition that owned its key when it was published."""
    for place in range(layout.count):
        for entry_id, pairs in client.execute("XRANGE", layout.stream(place), "-", "+"):
            homes = layout.owners(pairs[1])
            if place not in homes:
                return False
            at = homes.index(place)
            if at + 1 < len(homes):
                close_id = layout.close_ids[layout.created_in(homes[at + 1]) - 2][place]
                if EntryId.parse(entry_id) > EntryId.parse(close_id):
                    return False
    return True


def waiting_in(client: Client, layout: PartitionMap, place: int) -> dict[bytes, bytes]:
    """The key queues of a partition that wait, and why."""
    items = client.execute("HGETALL", keys_of(layout, place).parked)
    return {queue: reason.split(b" ", 1)[1] for queue, reason in zip(items[::2], items[1::2], strict=True)}


def moved_key(layout: PartitionMap, count: int) -> str:
    """A key of one letter that a growth to `count` moves."""
    grown = PartitionMap(base=BASE, counts=(*layout.counts, count), close_ids=layout.close_ids)
    return next(
        one for one in string.ascii_letters if grown.partition_of(one.encode()) != layout.partition_of(one.encode())
    )
