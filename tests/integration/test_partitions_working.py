"""Partitions at work: producers and workers as they are, while there are more and more partitions; on a cluster too."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from millstream import App, Message, Reject, State
from millstream.errors import ConfigError
from millstream.handlers.handler import Handler
from millstream.partitions.key_migration import KeyMigration
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, hash_tag
from millstream.testing.history import Event, check
from millstream.testing.topologies import cluster
from millstream.worker import ReadingLoop, WorkerPolicy
from millstream.worker.ordering.by_partition import ByPartition
from tests.support.commandline import call
from tests.support.partition_fixtures import BASE, check_all, growth_killed_after, moved_key, places_are_right
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import working

pytestmark = [pytest.mark.keys, pytest.mark.xdist_group("partitions_working")]

QUICK = WorkerPolicy(block_ms=50, claim_ms=60_000, sweep_ms=50, stop_ms=60_000)
KEYS = [f"key-{n}" for n in range(60)]
PRODUCERS, EACH = 3, 40


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    with cluster() as found:
        yield found.url


@pytest.fixture(params=["server", "cluster"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    url = request.getfixturevalue("millstream_url" if request.param == "server" else "cluster_url")
    with Client(url) as connected:
        for node in connected._route.pools():
            connected._execute_on(["FLUSHALL"], node)
        yield connected


def handler_of(function: Callable[..., Any], **options: Any) -> Handler:
    app = App("app")
    app.handler(BASE, **{"name": "handle", "key": "k", "partitions": 2, **options})(function)
    return app.handlers["handle"]


@contextmanager
def all_working(client: Client, handler: Handler, *names: str) -> Iterator[None]:
    """Loops that work meanwhile; whatever ended one is raised."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(working(client, handler, name, policy=QUICK))
        yield


class RecordingHandler:
    """A handler that records what it runs, and checks by its state that it runs in order and once."""

    def __init__(self, output: bool) -> None:
        self.events: list[Event] = []
        self.inside: Counter[bytes] = Counter()
        self.wrong: list[str] = []
        self.last: dict[str, int] = {}
        self._output = output

    def handle(self, message: Message, state: State) -> dict[str, Any] | None:
        key, number = message.text("k") or "", int(message.text("n") or 0)
        self.inside[key.encode()] += 1
        if self.inside[key.encode()] > 1:
            self.wrong.append(f"{key} ran twice at once")
        if state.get("last", 0) != number - 1:
            self.wrong.append(f"{key} {number} ran after {state.get('last', 0)}, in {message.stream}")
        state["last"] = self.last[key] = number
        state["streams"] = sorted({message.stream, *state.get("streams", ())})
        self.inside[key.encode()] -= 1
        return {"k": key, "n": number, "fence": message.fence} if self._output else None


def produce(url: str, which: int, events: list[Event], stopping: threading.Event) -> None:
    """Publish messages of keys of its own, some at once and some one by one."""
    mine, numbers = KEYS[which::PRODUCERS], Counter[str]()
    with PartitionedProducer(url, BASE, key="k", partitions=2) as producer:
        while any(numbers[key] < EACH for key in mine) and not stopping.is_set():
            rows = []
            for key in mine:
                numbers[key] += 1
                rows.append({"k": key, "n": numbers[key]})
                events.append(
                    Event(kind="enqueued", stream=BASE, id=f"{numbers[key]}-{KEYS.index(key)}", key=key.encode())
                )
            if numbers[mine[0]] % 2:
                producer.publish_many(rows)
            else:
                for row in rows:
                    producer.publish(row)
            time.sleep(0.01)


def settled(client: Client) -> bool:
    layout = Partitions(client, BASE).require()
    return not KeyMigration(client, layout, app="app", handler="handle").undrained()


def wait_for_messages(recording: RecordingHandler, count: int) -> None:
    eventually(lambda: len(recording.events) >= count, f"{count} messages")


def test_adding_partitions_under_load_keeps_every_key_in_order_and_applies_each_message_once(client: Client) -> None:
    recording = RecordingHandler(output=not client.is_cluster)
    handler = handler_of(recording.handle, into=None if client.is_cluster else "out")
    stopping = threading.Event()
    with ExitStack() as stack:
        stack.callback(stopping.set)
        stack.enter_context(all_working(client, handler, "w1", "w2"))
        threads = [
            threading.Thread(target=produce, args=(client.url, which, recording.events, stopping))
            for which in range(PRODUCERS)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: Partitions(client, BASE).load() is not None, "the first partitions")
        for share, (steps, count) in enumerate(((99, 3), (1, 5), (4, 5), (99, 8)), 1):
            wait_for_messages(recording, share * len(KEYS) * EACH // 6)
            growth_killed_after(client, steps, count)
        stack.enter_context(all_working(client, handler, "w3"))
        for thread in threads:
            thread.join(FAIL_SAFE_S)
        eventually(lambda: recording.wrong != [] or recording.last == dict.fromkeys(KEYS, EACH), "all of each key")
        assert recording.wrong == []
        eventually(lambda: settled(client), "the end of all moves")
    layout = Partitions(client, BASE).require()
    assert (layout.counts[0], layout.count, places_are_right(client, layout)) == (2, 8, True)
    assert len({hash_tag(stream) for stream in layout.streams}) == 8
    if not client.is_cluster:
        assert check_all(client) == []
        check_history(client, recording.events)


def check_history(client: Client, events: list[Event]) -> None:
    for position, (_, pairs) in enumerate(client.execute("XRANGE", "out", "-", "+")):
        key, number, fence = pairs[1], int(pairs[3]), int(pairs[5])
        entry = f"{number}-{KEYS.index(key.decode())}"
        events.append(
            Event(kind="committed", stream=BASE, id=entry, key=key, handler="handle", token=fence, position=position)
        )
    report = check(events, handlers={BASE: ["handle"]})
    report.raise_if_bad()
    assert report.committed == len(KEYS) * EACH


def test_a_handler_that_begins_at_the_end_reads_all_entries_of_later_partitions(millstream_url: str) -> None:
    seen: list[int] = []
    handler = handler_of(lambda message: seen.append(int(message.text("n"))))
    with Client(millstream_url) as client, PartitionedProducer(client, BASE, key="k", partitions=2) as producer:
        producer.publish_many({"k": key, "n": 1} for key in KEYS)
        first = HandlerKeys("app", "handle", Partitions(client, BASE).require().stream(0))
        with working(client, handler, "w1", policy=QUICK, start="latest"):
            eventually(lambda: client.execute("HEXISTS", first.meta, "committed_id") == 1)
        Partitions(client, BASE).grow(6)
        producer.publish_many({"k": key, "n": 2} for key in KEYS)
        with working(client, handler, "w1", policy=QUICK, start="latest"):
            eventually(lambda: len(seen) >= len(KEYS))
    assert seen == [2] * len(KEYS)


def test_a_redriven_entry_goes_once_to_the_current_partition_of_its_key(millstream_url: str) -> None:
    runs: list[tuple[str, str, int]] = []
    refuses = True

    def handle(message: Message, state: State) -> None:
        if refuses and message.text("n") == "1":
            raise Reject("not now")
        state["runs"] = state.get("runs", 0) + 1
        runs.append((message.stream, message.text("n") or "", state["runs"]))

    with Client(millstream_url) as client, PartitionedProducer(client, BASE, key="k", partitions=2) as producer:
        key = moved_key(Partitions(client, BASE).create(2), 6)
        with all_working(client, handler_of(handle), "w1", "w2"):
            old = producer.publish({"k": key, "n": 1}).stream
            dead = HandlerKeys("app", "handle", old).dead_letters
            eventually(lambda: client.execute("XLEN", dead) == 1)
            Partitions(client, BASE).grow(6)
            new = producer.publish({"k": key, "n": 2}).stream
            eventually(lambda: len(runs) == 1)
            refuses = False
            outcome = call("dlq", "redrive", "--stream", old, "--yes", url=millstream_url)
            assert outcome.code == 0, outcome.err
            eventually(lambda: len(runs) == 2)
            eventually(lambda: settled(client))
        assert old != new
        ((entry_id, pairs),) = client.execute("XREVRANGE", old, "+", "-", "COUNT", 1)
        side = ReadingLoop(handler_of(handle), millstream_url, consumer="w3")._ordering
        assert isinstance(side, ByPartition)
        side.discover(client)
        assert side._forward(old, key.encode(), entry_id, pairs)  # as one does that has read it, too
        side.close()
        assert client.execute("XLEN", new) == 2
        assert runs == [(new, "2", 1), (new, "1", 2)]
        assert check_all(client) == []


# --- Commands and options ---


def shown(url: str) -> Any:
    outcome = call("partition", "show", BASE, "--json", url=url)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_the_command_shows_generations_closed_partitions_and_whether_keys_migrate(millstream_url: str) -> None:
    recording = RecordingHandler(output=False)
    assert call("partition", "show", BASE, url=millstream_url).code == 1
    assert call("partition", "create", BASE, "2", url=millstream_url).out == "orders has 2 partitions\n"
    with Client(millstream_url) as client, PartitionedProducer(client, BASE, key="k") as producer:
        producer.publish_many({"k": key, "n": 1} for key in KEYS)
        with all_working(client, handler_of(recording.handle), "w1"):
            eventually(lambda: len(recording.last) == len(KEYS))
        assert call("partition", "grow", BASE, "3", "--yes", url=millstream_url).out == "orders has 3 partitions\n"
        assert call("partition", "grow", BASE, "1", url=millstream_url).code == 2
        assert call("partition", "grow", BASE, "3", url=millstream_url).code == 0  # nothing to do, nothing to ask
        found = shown(millstream_url)
        assert (found["generation"], found["counts"], found["growing"]) == (2, [2, 3], None)
        assert [one["since"] for one in found["partitions"]] == [1, 1, 2]
        assert [one["closed_at"] is None for one in found["partitions"]] == [False, False, True]
        assert sum(one["entries"] for one in found["partitions"]) == len(KEYS)
        assert [one["since"] for one in found["undrained"]["app.handle"]] == [2, 2]
        words = call("partition", "show", BASE, url=millstream_url).out
        assert "keys that left {orders.0} with generation 2" in words
        with all_working(client, handler_of(recording.handle), "w1"):
            eventually(lambda: settled(client))
        assert shown(millstream_url)["undrained"] == {"app.handle": []}


def test_a_growth_asks_first_and_can_be_rehearsed(millstream_url: str) -> None:
    call("partition", "create", BASE, "2", url=millstream_url)
    refused = call("partition", "grow", BASE, "8", url=millstream_url)
    assert (refused.code, refused.out) == (2, "")
    assert "Grow orders to 8 partitions? About 75% of its keys move, to {orders.2} to {orders.7}" in refused.err
    assert "the number can never shrink. There is no terminal to confirm at: add --yes" in refused.err
    rehearsed = call("partition", "grow", BASE, "8", "--dry-run", url=millstream_url)
    assert rehearsed.out.startswith("orders would have 8 partitions instead of 2. About 75% of its keys move")
    assert call("partition", "grow", BASE, "1", "--dry-run", url=millstream_url).code == 2
    found = call("partition", "grow", BASE, "3", "--dry-run", "--json", url=millstream_url).json()
    assert (found["counts"], found["added"], found["moved_share"], found["dry_run"]) == (
        [2],
        ["{orders.2}"],
        0.3333,
        True,
    )
    assert shown(millstream_url)["counts"] == [2]
    grown = call("partition", "grow", BASE, "3", "--yes", "--json", url=millstream_url).json()
    assert (grown["counts"], grown["added"], grown["dry_run"]) == ([2, 3], ["{orders.2}"], False)


def test_the_share_of_keys_that_a_growth_announces_is_the_one_that_moves(millstream_url: str) -> None:
    before, after = PartitionMap(base=BASE, counts=(3,)), PartitionMap(base=BASE, counts=(3, 5))
    keys = [str(number).encode() for number in range(20_000)]
    call("partition", "create", BASE, "3", url=millstream_url)
    announced = call("partition", "grow", BASE, "5", "--dry-run", "--json", url=millstream_url).json()["moved_share"]
    moved = sum(before.partition_of(key) != after.partition_of(key) for key in keys)
    assert abs(moved / len(keys) - announced) < 0.02


def test_a_killed_growth_is_shown_and_completed_by_the_next_one(millstream_url: str) -> None:
    with Client(millstream_url) as client:
        Partitions(client, BASE).create(2)
        assert growth_killed_after(client, 1, 3)
    assert shown(millstream_url)["growing"] == 3
    assert "has not ended" in call("partition", "show", BASE, url=millstream_url).out
    assert call("partition", "grow", BASE, "3", url=millstream_url).code == 0
    assert shown(millstream_url)["growing"] is None


@pytest.mark.parametrize(
    "options",
    [{"key": None}, {"partitions": 0}, {"partitions": True}, {"partitions": 5_000}, {"partitions": "many"}],
)
def test_a_handler_that_cannot_read_partitions_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="partitions"):
        handler_of(lambda message: None, **options)


@pytest.mark.parametrize("base", ["{orders}", "a*", "a,b", " a", "a[b]"])
def test_an_invalid_base_name_is_refused(base: str) -> None:
    app = App("app")
    with pytest.raises(ConfigError):
        app.handler(base, key="k", partitions=2)(lambda message: None)
