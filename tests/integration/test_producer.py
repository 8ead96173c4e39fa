"""The producer against a real Redis: what is published, once, in order, and what is refused."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import pydantic
import pytest

from millstream.errors import (
    ConfigError,
    NotReplicated,
    OutOfMemory,
    OutputError,
    StreamFull,
    Unavailable,
    WrongType,
)
from millstream.producer.bulk import Publisher
from millstream.producer.producer import Producer
from millstream.producer.session import PUBLISH
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import StreamKeys
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import cluster
from tests.support.clocks import ManualClock
from tests.support.memory import relieved_once_refused
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

ENDLESS_MS = 1e9
WINDOW_MS = 3_600_000


@dataclass
class Plain:
    account: str
    amount: int


class Packed(msgspec.Struct):
    account: str
    amount: int


class Typed(TypedDict):
    account: str
    amount: int


class Checked(pydantic.BaseModel):
    account: str
    amount: int


@pytest.fixture
def producer(client: Client) -> Iterator[Producer]:
    with Producer(client) as opened:
        yield opened


def entries(client: Client, stream: str = "s") -> list[tuple[str, list[bytes]]]:
    return [(entry_id.decode(), pairs) for entry_id, pairs in client.execute("XRANGE", stream, "-", "+")]


def numbers(client: Client, stream: str = "s") -> list[int]:
    return [int(pairs[1]) for _, pairs in entries(client, stream)]


# --- What is published ---


@pytest.mark.parametrize("kind", [Plain, Packed, Typed, Checked, dict])
def test_a_message_of_any_model_becomes_an_entry_and_its_id_is_returned(
    client: Client, producer: Producer, kind: type
) -> None:
    entry_id = producer.publish("s", kind(account="é", amount=5))
    assert entries(client) == [(entry_id, [b"account", "é".encode(), b"amount", b"5"])]


def test_many_messages_are_published_in_order_and_their_ids_returned(client: Client, producer: Producer) -> None:
    messages = [{"n": n, **({"odd": "yes"} if n % 3 else {})} for n in range(1_234)]
    ids = producer.publish_many("s", iter(messages))
    assert [entry_id for entry_id, _ in entries(client)] == ids
    assert numbers(client) == list(range(1_234))
    assert producer.publish_many("s", []) == []


def test_a_message_that_cannot_be_written_is_refused_and_nothing_of_its_batch_published(
    client: Client, producer: Producer
) -> None:
    with pytest.raises(OutputError):
        producer.publish("s", {"a": object()})
    with pytest.raises(OutputError):
        producer.publish_many("s", [{"n": 1}, {"n": None}])
    assert not client.execute("EXISTS", "s")


def test_a_key_of_another_type_is_refused(client: Client, producer: Producer) -> None:
    client.execute("SET", "s", "text")
    with pytest.raises(WrongType, match="s holds a string"):
        producer.publish("s", {"n": 1})
    client.execute("DEL", "s")
    producer.publish("s", {"n": 2})
    assert numbers(client) == [2]


def test_keys_that_a_producer_leaves_expire(client: Client, producer: Producer) -> None:
    producer.publish("s", {"n": 1}, dedupe_id="a")
    left = [key for key in client.execute("KEYS", "*") if key != b"s"]
    assert len(left) == 2
    assert all(0 < client.execute("TTL", key) <= 86_400 for key in left)


def test_the_number_of_a_producer_is_kept_as_long_as_the_ids_of_callers(client: Client) -> None:
    with Producer(client, dedupe_window_ms=7 * 86_400_000) as producer:
        producer.publish("s", {"n": 1}, dedupe_id="a")
    left = [key for key in client.execute("KEYS", "*") if key != b"s"]
    assert [round(client.execute("TTL", key) / 86_400) for key in left] == [7, 7]


def test_a_shared_client_stays_open_and_the_producers_own_is_closed(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        with Producer(client) as producer:
            producer.publish("s", {"n": 1})
        before = connections(client)
        with Producer(millstream_fresh_server.url) as producer:
            producer.publish("s", {"n": 2})
            (own,) = connections(client) - before
        eventually(lambda: own not in connections(client), "the connection to be closed")
        assert numbers(client) == [1, 2]


def connections(client: Client) -> set[bytes]:
    """The ids of all connections of clients."""
    return {line.split()[0] for line in client.execute("CLIENT", "LIST", "TYPE", "normal").splitlines()}


# --- Once ---


@pytest.mark.parametrize("delay_ms", [0, 50])
def test_a_lost_reply_makes_no_duplicate_and_the_first_id_is_returned(
    millstream_server: EmbeddedServer, client: Client, delay_ms: float
) -> None:
    where = StreamKeys("s").delayed if delay_ms else "s"
    size = "HLEN" if delay_ms else "XLEN"
    with Proxy(millstream_server.port) as proxy, Producer(proxy.url) as producer:
        producer.publish("s", {"n": 0}, delay_ms=delay_ms)
        proxy.cut_after("EVALSHA", times=2)
        first = producer.publish("s", {"n": 1}, delay_ms=delay_ms)
        proxy.cut_before("EVALSHA")
        second = producer.publish("s", {"n": 2}, delay_ms=delay_ms)
        proxy.cut_after("EVALSHA")
        many = producer.publish_many("s", [{"n": n} for n in range(3, 1_300)], delay_ms=delay_ms)
        assert proxy.cuts == {("after", "EVALSHA"): 3, ("before", "EVALSHA"): 1}
        assert client.execute(size, where) == 1_300
        if not delay_ms:
            assert [entry_id for entry_id, _ in entries(client)][1:] == [first, second, *many]
            assert numbers(client) == list(range(1_300))


def test_a_late_copy_of_a_batch_is_skipped(client: Client) -> None:
    names = StreamKeys("s")
    keys = ("s", names.producer("p"), names.due, names.delayed)

    def send(sequence: int) -> bytes:
        reply: bytes = client.script(PUBLISH, keys, (sequence, "", "", "", 0, "", 1, 1, "n", str(sequence)))
        return reply

    first, second = send(1), send(2)
    assert send(2) == second != first
    assert send(1) == b""
    assert numbers(client) == [1, 2]


def test_a_publish_with_an_unknown_end_is_not_overtaken_by_its_own_late_copy(
    millstream_server: EmbeddedServer, client: Client
) -> None:
    with Proxy(millstream_server.port) as proxy, Producer(proxy.url, patience_ms=0) as producer:
        producer.publish("s", {"n": 0})
        proxy.cut_after("EVALSHA")
        with pytest.raises(Unavailable):
            producer.publish("s", {"n": 1})
        producer.publish("s", {"n": 2})
    assert numbers(client) == [0, 1, 2]


# --- The caller's own ids ---


def test_a_repeat_under_the_same_id_returns_the_first_id_in_another_producer_too(
    client: Client, producer: Producer, millstream_url: str
) -> None:
    first = producer.publish("s", {"n": 1}, dedupe_id="order-17")
    with Producer(millstream_url) as other:
        assert other.publish("s", {"n": 2}, dedupe_id=b"order-17") == first
        other.publish("t", {"n": 3}, dedupe_id="order-17")
        assert other.publish("s", {"n": 4}, dedupe_id="order-18") != first
    assert producer.publish("s", {"n": 5}, dedupe_id="order-17") == first
    assert numbers(client) == [1, 4]
    assert client.execute("XLEN", "t") == 1, "another stream has ids of its own"


def test_only_the_new_messages_of_a_batch_are_published(client: Client, producer: Producer) -> None:
    one = producer.publish("s", {"n": 1}, dedupe_id="a")
    ids = producer.publish_many("s", [{"n": n} for n in range(2, 7)], dedupe_ids=["b", "a", "c", "b", "d"])
    assert numbers(client) == [1, 2, 4, 6]
    b, c, d = (entry_id for entry_id, _ in entries(client)[1:])
    assert ids == [b, one, c, b, d]
    assert producer.publish_many("s", [{"n": 9}] * 5, dedupe_ids=["b", "a", "c", "b", "d"]) == ids


def test_a_dedupe_id_is_dropped_at_the_end_of_its_window(client: Client) -> None:
    with Producer(client, dedupe_window_ms=WINDOW_MS) as producer:
        first = producer.publish("s", {"n": 1}, dedupe_id="a")
        assert producer.publish("s", {"n": 2}, dedupe_id="a") == first
        remembered = StreamKeys("s").dedupe(b"a")
        left_ms = client.execute("PTTL", remembered)
        assert 0 < left_ms <= WINDOW_MS, "it ends with its window"
        client.execute("PEXPIRE", remembered, 1)  # as if the rest had gone by
        eventually(lambda: not client.execute("EXISTS", remembered), "the end of the window")
        assert producer.publish("s", {"n": 3}, dedupe_id="a") != first
    assert numbers(client) == [1, 3]


# --- Room ---


def test_a_full_stream_refuses_a_batch_that_does_not_fit_and_writes_nothing(client: Client) -> None:
    with Producer(client, capacity=3, patience_ms=0) as producer:
        producer.publish_many("s", [{"n": 1}, {"n": 2}])
        with pytest.raises(StreamFull, match="s has no room, it holds 2 of at most 3 entries"):
            producer.publish_many("s", [{"n": 3}, {"n": 4}])
        assert numbers(client) == [1, 2]
        first = producer.publish("s", {"n": 3}, dedupe_id="a")
        with pytest.raises(StreamFull):
            producer.publish("s", {"n": 4})
        assert producer.publish("s", {"n": 5}, dedupe_id="a") == first
        assert numbers(client) == [1, 2, 3]


def test_a_producer_waits_for_a_full_stream_and_keeps_the_order(client: Client) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def consume() -> None:
        with Client(client.url) as other:
            while not stop.is_set():
                for entry_id, pairs in other.execute("XRANGE", "s", "-", "+", "COUNT", 20):
                    assert other.execute("XLEN", "s") <= 50
                    seen.append(int(pairs[1]))
                    other.execute("XDEL", "s", entry_id)

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        with Producer(client, capacity=50) as producer:
            producer.publish_many("s", [{"n": n} for n in range(500)])
            for n in range(500, 600):
                producer.publish("s", {"n": n})
        eventually(lambda: len(seen) == 600, "all to be consumed")
    finally:
        stop.set()
        consumer.join(FAIL_SAFE_S)
    assert seen == list(range(600))


def test_a_producer_reports_a_redis_without_memory_or_waits_for_it(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        client.execute("CONFIG", "SET", "maxmemory", "1")
        with Producer(client, patience_ms=0) as producer, pytest.raises(OutOfMemory):
            producer.publish("s", {"n": 0})
        assert not client.execute("DBSIZE")
        with Producer(client, patience_ms=ENDLESS_MS) as producer, relieved_once_refused(client.url):
            producer.publish("s", {"n": 1})
        assert numbers(client) == [1]


def test_a_lost_reply_is_not_reported_as_a_refusal_when_redis_runs_out_of_memory(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    class FillsUp(ManualClock):
        """A clock: while a thread waits by it, the memory runs out."""

        def sleep_ms(self, duration_ms: float) -> None:
            millstream_fresh_server.call("CONFIG", "SET", "maxmemory", "1")
            super().sleep_ms(duration_ms)

    with (
        Proxy(millstream_fresh_server.port) as proxy,
        Client(proxy.url, clock=FillsUp()) as client,
        Producer(client, patience_ms=60) as producer,
    ):
        client.execute("PING")
        proxy.cut_after("EVAL")
        with pytest.raises(Unavailable, match="it may be published") as caught:
            producer.publish("s", {"n": 1})
        assert not isinstance(caught.value, OutOfMemory)
        assert numbers(client) == [1]


# --- Replicas ---

PATIENT_MS = round(FAIL_SAFE_S * 1000)


def patient(url: str) -> Client:
    """A client that may wait that long for replicas."""
    return Client(url, timeout_ms=2 * PATIENT_MS)


@pytest.fixture
def replica(millstream_fresh_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    millstream_fresh_server.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")
    with EmbeddedServer(extra={"replicaof": f"127.0.0.1 {millstream_fresh_server.port}", "appendonly": "no"}) as server:
        eventually(lambda: b"master_link_status:up" in server.call("INFO", "replication"), "replication")
        yield server
        server.resume()


def test_a_replicated_publish_is_on_the_replica_when_it_returns(
    millstream_fresh_server: EmbeddedServer, replica: EmbeddedServer
) -> None:
    with patient(millstream_fresh_server.url) as client, Producer(client) as producer:
        for n in range(20):
            producer.publish("s", {"n": n}, replicas=1, timeout_ms=PATIENT_MS)
            assert replica.call("XLEN", "s") == n + 1
        producer.publish_many("s", [{"n": n} for n in range(20, 1_100)], replicas=1, timeout_ms=PATIENT_MS)
        assert replica.call("XLEN", "s") == 1_100


def test_a_message_that_no_replica_confirms_is_reported_as_published_but_not_replicated(
    millstream_fresh_server: EmbeddedServer, replica: EmbeddedServer
) -> None:
    with patient(millstream_fresh_server.url) as client, Producer(client) as producer:
        producer.publish("s", {"n": 0})
        replica.pause()
        with pytest.raises(NotReplicated, match="only 0 of 1 replicas") as caught:
            producer.publish("s", {"n": 1}, dedupe_id="a", replicas=1, timeout_ms=200)
        assert caught.value.ids == [entries(client)[1][0]]
        with pytest.raises(NotReplicated) as caught:
            producer.publish_many("s", [{"n": n} for n in range(2, 10)], replicas=1, timeout_ms=200)
        assert caught.value.ids == [entry_id for entry_id, _ in entries(client)[2:]]
        replica.resume()
        again = producer.publish("s", {"n": 9}, dedupe_id="a", replicas=1, timeout_ms=PATIENT_MS)
        assert again == entries(client)[1][0]
        assert replica.call("XLEN", "s") == 10


def test_a_repeat_over_a_new_connection_does_not_count_as_confirmed(
    millstream_fresh_server: EmbeddedServer, replica: EmbeddedServer
) -> None:
    with Proxy(millstream_fresh_server.port) as proxy, patient(proxy.url) as client, Producer(client) as producer:
        producer.publish("s", {"n": 0}, replicas=1, timeout_ms=PATIENT_MS)
        replica.pause()
        proxy.cut_after("EVALSHA")
        with pytest.raises(NotReplicated):
            producer.publish("s", {"n": 1}, replicas=1, timeout_ms=200)
        assert proxy.cuts["after", "EVALSHA"] == 1
        assert millstream_fresh_server.call("XLEN", "s") == 2


def test_a_replica_wait_longer_than_the_connection_allows_is_refused(client: Client, producer: Producer) -> None:
    for timeout_ms in (0, 15_000):
        with pytest.raises(ConfigError, match="wait for replicas"):
            producer.publish("s", {"n": 1}, replicas=1, timeout_ms=timeout_ms)
    assert not client.execute("EXISTS", "s")


def test_a_stream_on_a_cluster_keeps_all_its_keys_in_its_own_slot() -> None:
    with cluster() as deployment, Client(deployment.url) as client, Producer(client) as producer:
        for n in range(12):
            stream = f"orders-{n}"
            first = producer.publish(stream, {"n": n}, dedupe_id="a")
            assert producer.publish(stream, {"n": 99}, dedupe_id="a") == first
            with pytest.raises(NotReplicated) as caught:
                producer.publish(stream, {"n": n + 1}, replicas=1, timeout_ms=1)
            assert [entry_id for entry_id, _ in entries(client, stream)] == [first, *caught.value.ids]
        assert all(node.call("DBSIZE") > 0 for node in deployment.nodes)


# --- Threads and coroutines ---


def test_threads_share_a_producer_and_each_keeps_its_order(client: Client, producer: Producer) -> None:
    def publish(key: int) -> None:
        for n in range(150):
            producer.publish("s", {"n": n, "key": key})

    threads = [threading.Thread(target=publish, args=(key,)) for key in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    by_key: dict[int, list[int]] = {}
    for _, pairs in entries(client):
        by_key.setdefault(int(pairs[3]), []).append(int(pairs[1]))
    assert by_key == {key: list(range(150)) for key in range(6)}


def test_coroutines_publish_in_the_order_of_their_calls(client: Client, producer: Producer) -> None:
    async def publish() -> list[str]:
        single = await asyncio.gather(*(producer.publish_async("s", {"n": n}) for n in range(200)))
        return [*single, *await producer.publish_many_async("s", [{"n": n} for n in range(200, 300)])]

    ids = asyncio.run(publish())
    assert [entry_id for entry_id, _ in entries(client)] == ids
    assert numbers(client) == list(range(300))


def test_the_event_loop_goes_on_while_a_producer_closes(client: Client) -> None:
    async def main() -> str:
        async with Producer(client.url, capacity=1, patience_ms=FAIL_SAFE_S * 1_000) as producer:
            await producer.publish_async("s", {"n": 0})
            waits = asyncio.create_task(producer.publish_async("s", {"n": 1}))
            await asyncio.sleep(0)  # it waits for room
            room = asyncio.create_task(asyncio.to_thread(client.execute, "XTRIM", "s", "MAXLEN", 0))
        await room
        return await waits

    entry_id = asyncio.run(main())
    assert [found for found, _ in entries(client)] == [entry_id]


# --- The publisher in bulk ---


def test_closing_a_publisher_sends_its_rows_unless_an_exception_is_raised(client: Client) -> None:
    with Publisher(client, "s") as publisher:
        publisher.add(("n",), ("1",))
    assert numbers(client) == [1]
    with suppress(ZeroDivisionError), Publisher(client, "s") as publisher:
        publisher.add(("n",), ("2",))
        raise ZeroDivisionError
    assert numbers(client) == [1]


def test_closing_a_publisher_raises_its_error(client: Client) -> None:
    client.execute("SET", "s", "text")
    with pytest.raises(WrongType), Publisher(client, "s") as publisher:
        publisher.add(("n",), ("1",))
