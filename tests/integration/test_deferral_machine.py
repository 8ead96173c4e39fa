"""Random steps of runs on Spark, of workers and of people on one handler: nothing is lost, doubled or out of order."""

import random
from collections import defaultdict

import pytest

from millstream import App, Message, Retry
from millstream.admin.key_queues import list_queues, park, skip, unpark
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease
from millstream.handlers.encoding import pack_output
from millstream.handlers.handler import Handler
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from millstream.testing.invariants import check_invariants
from tests.support.keyed_fixtures import HOUR_MS, KEYS, MANY, queue_of
from tests.support.task_fixtures import Row, TaskFixture

pytestmark = [pytest.mark.keys, pytest.mark.spark]

LETTERS = "ABC"


def handle(message: Message) -> dict[str, object]:
    """Fails on every message that asks for it, each time."""
    if message.fields["fail"] == b"1":
        raise RuntimeError("bad")
    return {"k": message.key or b"", "n": message.text("n")}


class Machine(TaskFixture):
    """A stream that Spark and workers take from each other. `sent`: what was published of each key, and whether it fails."""

    def __init__(self, client: Client, chance: random.Random) -> None:
        super().__init__(client)
        app = App("app")
        retry = Retry(attempts=2, delay_ms=chance.choice((0, 2_000)), then="park")
        app.handler("in", key="k", into="out", retry=retry)(handle)
        self.runs: Handler = app.handlers["handle"]
        self.chance = chance
        self.sent: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        self.count = 0
        self.on_spark = False

    def publish(self) -> None:
        for _ in range(self.chance.randrange(1, 8)):
            self.count += 1
            key, fails = self.chance.choice(LETTERS), self.chance.random() < 0.15
            self.sent[key].append((self.count, fails))
            self.client.execute("XADD", "in", f"{self.count}-0", "k", key, "n", self.count, "fail", int(fails))

    # Spark

    def begin(self) -> None:
        self.on_spark = True
        self.token = CommitStore(self.client, app="app", handler="handle").new_token(["in"])
        self.store.begin_run(["in"])

    @property
    def store(self) -> CommitStore:
        return CommitStore(self.client, app="app", handler="handle", token=self.token, keyed=True)

    def batch(self, most: int, *, dies: bool = False, again: bool = False) -> None:
        """A batch; it may die before its end, or be run by a twin as well."""
        if not self.on_spark:
            self.begin()
        after = self.store.committed_ids(["in"]).get("in", EntryId(0, 0))
        rows: list[Row] = []
        for entry_id, pairs in self.client.execute("XRANGE", "in", f"({after}", "+", "COUNT", most):
            fields = mapping_of(pairs)
            rows.append((EntryId.parse(entry_id).ms, fields[b"k"], fields))
        if rows:
            cut = self.chance.randrange(len(rows) + 1) if dies else len(rows)
            for _ in range(1 + again):
                self.process(self.runs, self.rows(*rows[:cut]))
            if not dies:
                self.store.advance_committed({"in": EntryId(max(n for n, _, _ in rows), 0)})

    def run_deferred(self) -> None:
        if not self.on_spark:
            self.begin()
        for name in self.client.execute("ZRANGE", KEYS.backoff, 0, -1):
            self.client.execute("ZADD", KEYS.backoff, 1, name)  # time flies
        self.process_deferred(self.runs)

    # Workers

    def work(self) -> None:
        self.on_spark = False
        worker = KeyedStream(
            self.client,
            "in",
            queue_of=queue_of,
            app="app",
            handler="handle",
            consumer="w1",
            into="out",
        )
        worker.join()
        worker.recover_leases([], 100)
        worker.enqueue_new(count=self.chance.randrange(20), max_pending=MANY)
        for lease in worker.lease_keys(queues=9, entries=MANY, run=5, lease_ms=HOUR_MS, now_ms=0).leases:
            if self.chance.random() < 0.7:
                self._run(worker, lease)

    def _run(self, worker: KeyedStream, lease: KeyLease) -> None:
        for one in list(lease.queued):
            fields = mapping_of(one.pairs)
            if fields[b"fail"] == b"1":
                worker.release_leases([LeaseRelease(lease, "park", "bad", 2)])
                return
            unit = worker.key_effects_of(lease, [one])
            unit.add_outputs([pack_output({"k": fields[b"k"], "n": fields[b"n"]})])
            assert worker.commit([unit]) == []
            lease.queued.popleft()
            lease.in_flight_count -= 1
        worker.release_leases([LeaseRelease(lease, "requeue")])

    # People

    def decide(self, *, settle: bool = False) -> None:
        """Park a key, have one go on, or skip what fails."""
        if not self.on_spark and not self.client.execute("HGET", KEYS.meta, "owner"):
            return
        for queue in list_queues(self.client, KEYS):
            number = int((queue.first_id or "0").partition("-")[0])
            if queue.state == "parked" and (settle or self.chance.random() < 0.5):
                if dict(self.sent[(queue.key or b"").decode()]).get(number):
                    assert skip(self.client, KEYS, queue.name, error="x")
                else:
                    unpark(self.client, KEYS, queue.name)
        if not settle:
            park(self.client, KEYS, b"k" + self.chance.choice(LETTERS).encode(), "by hand")

    def settle(self) -> None:
        self.begin()
        for letter in LETTERS:
            unpark(self.client, KEYS, b"k" + letter.encode())
        for _ in range(3 * self.count + 5):
            self.batch(1_000)
            self.decide(settle=True)
            self.run_deferred()
            if not list_queues(self.client, KEYS):
                break

    def check(self) -> None:
        found: dict[str, list[int]] = defaultdict(list)
        for _, (_, key, _, n) in self.client.execute("XRANGE", "out", "-", "+"):
            found[key.decode()].append(int(n))
        wanted = {key: [n for n, fails in sent if not fails] for key, sent in self.sent.items()}
        assert found == {key: ns for key, ns in wanted.items() if ns}
        dead = sorted(int(letter.id.partition("-")[0]) for letter in self.dead())
        assert dead == sorted(n for sent in self.sent.values() for n, fails in sent if fails)
        assert check_invariants(self.client, KEYS, "in") == []
        assert self.client.execute("XPENDING", "in", KEYS.group)[0] == 0


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_spark_workers_and_operators_applies_each_message_once_and_in_order(
    client: Client, seed: int
) -> None:
    chance = random.Random(seed)
    machine = Machine(client, chance)
    for _ in range(40):
        match chance.randrange(8):
            case 0 | 1:
                machine.publish()
            case 2 | 3:
                machine.batch(chance.choice((3, 9, 50)), dies=chance.random() < 0.4, again=chance.random() < 0.2)
            case 4:
                machine.run_deferred()
            case 5 | 6:
                machine.work()
            case 7:
                machine.decide()
    machine.settle()
    machine.check()
