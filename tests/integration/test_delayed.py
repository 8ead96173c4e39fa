"""Delayed messages against a real Redis: when they come, in which order, and that each comes once."""

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.clock import SYSTEM_CLOCK, SystemClock
from millstream.delivery.delayed_messages import MOVE_DUE, DelayedMessages, MovedMessages
from millstream.errors import OutOfMemory, StreamFull, WrongType
from millstream.producer.producer import Producer
from millstream.producer.session import MAX_FIELDS
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import StreamKeys
from millstream.redis_client.key_tracking import KeyTracker
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import cluster
from millstream.worker.delayed_mover import TrackedDelayedMessages
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.commandline import call

pytestmark = [pytest.mark.worker]

SIZES = (0, 1, 31, 32, 255, 256, 65_535, 65_536, 1_000_000)


@pytest.fixture
def producer(client: Client) -> Iterator[Producer]:
    with Producer(client) as opened:
        yield opened


@pytest.fixture(params=["all are asked", "told by tracking"])
def delayed(client: Client, request: pytest.FixtureRequest) -> DelayedMessages:
    return DelayedMessages(client) if request.param == "all are asked" else TrackedDelayedMessages(client, SYSTEM_CLOCK)


def numbers(client: Client, stream: str = "s") -> list[int]:
    return [int(pairs[1]) for _, pairs in client.execute("XRANGE", stream, "-", "+")]


def move_all(delayed: DelayedMessages, *streams: str) -> int:
    """Move until none waits, sleeping as the calls advise; how many were moved."""
    total = 0
    while (movement := delayed.move_due(streams)).next_ms is not None:
        total += movement.moved
        time.sleep(movement.next_ms / 1000)
    return total + movement.moved


def come_closer(client: Client, stream: str, by_ms: int) -> None:
    """All that waits is due so much earlier."""
    due = StreamKeys(stream).due
    client.pipeline([("ZINCRBY", due, -by_ms, one) for one in client.execute("ZRANGE", due, 0, -1)])


def test_a_message_is_added_when_it_is_due_and_not_before(
    client: Client, producer: Producer, delayed: DelayedMessages
) -> None:
    producer.publish("s", {"n": 1}, delay_ms=600_000)
    movement = delayed.move_due(["s"])
    assert movement.moved == 0
    assert movement.next_ms is not None
    assert 0 < movement.next_ms <= 600_001
    assert not client.execute("EXISTS", "s")
    [waiting] = delayed.find("s")
    come_closer(client, "s", waiting.due_ms - int(time.time() * 1_000) - 300)
    [waiting] = delayed.find("s")
    assert move_all(delayed, "s") == 1
    assert numbers(client) == [1]
    assert int(client.execute("XRANGE", "s", "-", "+")[0][0].partition(b"-")[0]) >= waiting.due_ms
    assert delayed.move_due(["s"]) == MovedMessages(moved=0, next_ms=None)
    names = StreamKeys("s")
    assert client.execute("EXISTS", names.due, names.delayed) == 0


def test_messages_are_moved_in_due_order_and_those_due_together_in_order_of_arrival(
    client: Client, producer: Producer, delayed: DelayedMessages
) -> None:
    producer.publish("s", {"n": 3}, delay_ms=2_400_000)
    producer.publish("s", {"n": 1}, delay_ms=800_000)
    producer.publish("s", {"n": 2}, delay_ms=1_600_000)
    producer.publish_many("s", [{"n": n} for n in range(4, 1_600)], delay_ms=3_200_000)
    assert delayed.move_due(["s"]).moved == 0
    come_closer(client, "s", 3_200_000)
    time.sleep(0.01)
    assert move_all(delayed, "s") == 1_599
    assert numbers(client) == list(range(1, 1_600))


def test_a_delayed_message_does_not_reuse_the_id_of_another_that_waits(client: Client, producer: Producer) -> None:
    names = StreamKeys("s")
    # Ids are times of arrival. Here 100 ms of them are in use, as they are after the server's clock was set back.
    begin = int(time.time() * 1_000_000) + 300_000
    use_ids = "for i = ARGV[1], ARGV[1] + 999 do redis.call('HSET', KEYS[1], string.format('%.0f', i), '') end"
    for first in range(begin, begin + 100_000, 1_000):  # one call for all could outlast the client's patience
        client.execute("EVAL", use_ids, 1, names.delayed, first)
    time.sleep(max(0.0, begin / 1_000_000 + 0.02 - time.time()))
    ids = producer.publish_many("s", [{"n": 1}, {"n": 2}], delay_ms=1)
    assert len(set(ids)) == 2
    assert client.execute("HLEN", names.delayed) == 100_002
    assert client.execute("ZCARD", names.due) == 2


@settings(
    max_examples=400 if os.environ.get("MILLSTREAM_SOAK") else 25,
)
@given(
    message=st.dictionaries(
        st.binary(min_size=1),
        st.one_of(st.binary(), st.sampled_from(SIZES).map(lambda size: b"\xff" * size)),
        min_size=1,
        max_size=5,
    )
)
def test_messages_arrive_byte_for_byte(client: Client, message: dict[bytes, bytes]) -> None:
    client.execute("FLUSHALL")
    delayed = DelayedMessages(client)
    with Producer(client) as producer:
        producer.publish("s", message, delay_ms=0.1)
    pairs = [part for pair in message.items() for part in pair]
    assert [waiting.pairs for waiting in delayed.find("s")] == [pairs]
    assert move_all(delayed, "s") == 1
    assert [found for _, found in client.execute("XRANGE", "s", "-", "+")] == [pairs]


def test_an_entry_with_the_most_fields_is_moved(client: Client, producer: Producer, delayed: DelayedMessages) -> None:
    producer.publish("s", {f"n{i}": i for i in range(MAX_FIELDS)}, delay_ms=1)
    assert move_all(delayed, "s") == 1
    [(_, pairs)] = client.execute("XRANGE", "s", "-", "+")
    assert len(pairs) == 2 * MAX_FIELDS


def test_one_call_moves_a_limited_number_of_messages_and_reports_that_more_are_due(
    client: Client, producer: Producer, delayed: DelayedMessages
) -> None:
    producer.publish_many("s", [{"n": n} for n in range(700)], delay_ms=1)
    producer.publish_many("big", [{"n": n, "text": "x" * 400_000} for n in range(5)], delay_ms=1)
    time.sleep(0.05)
    assert delayed.move_due(["s"]) == MovedMessages(moved=500, next_ms=0)
    assert delayed.move_due(["s", "big", "none"]) == MovedMessages(moved=203, next_ms=0)
    assert delayed.move_due(["s", "big", "none"]) == MovedMessages(moved=2, next_ms=None)
    assert delayed.move_due([]) == MovedMessages(moved=0, next_ms=None)
    assert numbers(client) == list(range(700))


def test_an_operator_can_list_delayed_messages_and_cancel_them(
    client: Client, producer: Producer, delayed: DelayedMessages
) -> None:
    before_ms = time.time() * 1000
    ids = [producer.publish("s", {"n": n}, delay_ms=60_000 * (n + 1)) for n in range(4)]
    after_ms = time.time() * 1000
    found = delayed.find("s", limit=3)
    assert [waiting.id for waiting in found] == ids[:3]
    assert [waiting.pairs for waiting in found] == [[b"n", b"%d" % n] for n in range(3)]
    assert before_ms + 59_999 <= found[0].due_ms <= after_ms + 60_001
    assert delayed.count("s") == 4
    assert delayed.cancel("s", [ids[1], ids[3], "nonsense"]) == 2
    assert delayed.cancel("s", [ids[1]]) == 0
    assert delayed.cancel("s", []) == 0
    assert [waiting.id for waiting in delayed.find("s")] == [ids[0], ids[2]]
    assert client.execute("HLEN", StreamKeys("s").delayed) == 2
    assert delayed.find("none") == []


def test_a_repeat_under_the_callers_id_waits_once_and_is_recognised_after_the_move(
    client: Client, producer: Producer, delayed: DelayedMessages
) -> None:
    first = producer.publish("s", {"n": 1}, dedupe_id="a", delay_ms=20)
    assert producer.publish("s", {"n": 2}, dedupe_id="a", delay_ms=1) == first
    assert move_all(delayed, "s") == 1
    assert producer.publish("s", {"n": 3}, dedupe_id="a") == first
    assert numbers(client) == [1]


def test_delayed_messages_count_against_the_length_of_a_limited_stream(
    client: Client, delayed: DelayedMessages
) -> None:
    with Producer(client, capacity=2, patience_ms=0) as producer:
        producer.publish("s", {"n": 1})
        producer.publish("s", {"n": 2}, delay_ms=1)
        with pytest.raises(StreamFull):
            producer.publish("s", {"n": 3}, delay_ms=1)
        assert move_all(delayed, "s") == 1


def test_a_moved_message_whose_reply_is_lost_is_not_moved_twice(
    millstream_server: EmbeddedServer, client: Client, producer: Producer
) -> None:
    producer.publish_many("s", [{"n": n} for n in range(1_200)], delay_ms=1)
    time.sleep(0.05)
    client.execute("SCRIPT", "LOAD", MOVE_DUE.text)  # so that it is called by its hash
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as fragile:
        proxy.cut_after("EVALSHA", times=1)
        proxy.cut_before("EVALSHA", times=1)
        mover = DelayedMessages(fragile)
        while fragile.retry_while_unavailable(lambda: mover.move_due(["s"]), what="test").next_ms is not None:
            pass
        assert proxy.cuts.total() == 2
    assert numbers(client) == list(range(1_200))


def test_any_number_of_movers_move_each_message_once_in_due_order(millstream_url: str, producer: Producer) -> None:
    for n in range(300):
        producer.publish_many("s", [{"n": 10 * n + i} for i in range(10)], delay_ms=150)
    moved: list[int] = []

    def move() -> None:
        with Client(millstream_url) as own:
            moved.append(move_all(DelayedMessages(own), "s"))

    movers = [threading.Thread(target=move) for _ in range(5)]
    for mover in movers:
        mover.start()
    for mover in movers:
        mover.join()
    with Client(millstream_url) as client:
        assert numbers(client) == list(range(3_000))
    assert sum(moved) == 3_000


def test_a_key_of_another_type_loses_no_message(client: Client, producer: Producer, delayed: DelayedMessages) -> None:
    producer.publish("s", {"n": 1}, delay_ms=1)
    client.execute("SET", "s", "text")
    time.sleep(0.01)
    with pytest.raises(WrongType, match="s holds a string"):
        delayed.move_due(["s"])
    client.execute("DEL", "s")
    assert move_all(delayed, "s") == 1


def test_a_redis_without_memory_moves_nothing_until_there_is_room(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client, Producer(client) as producer:
        delayed = DelayedMessages(client)
        producer.publish_many("s", [{"n": n} for n in range(10)], delay_ms=1)
        time.sleep(0.05)
        client.execute("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(OutOfMemory):
            delayed.move_due(["s"])
        assert (delayed.count("s"), client.execute("EXISTS", "s")) == (10, 0)
        client.execute("CONFIG", "SET", "maxmemory", "0")
        assert move_all(delayed, "s") == 10


def test_a_deleted_payload_does_not_delay_the_other_messages(
    client: Client, producer: Producer, delayed: DelayedMessages
) -> None:
    gone, _ = producer.publish_many("s", [{"n": 1}, {"n": 2}], delay_ms=1)
    client.execute("HDEL", StreamKeys("s").delayed, gone)
    assert len(delayed.find("s")) == 1
    assert move_all(delayed, "s") == 1
    assert numbers(client) == [2]


def test_one_call_moves_the_messages_of_streams_on_all_nodes_of_a_cluster() -> None:
    with cluster() as deployment, Client(deployment.url) as client, Producer(client) as producer:
        streams = [f"orders-{n}" for n in range(12)]
        for stream in streams:
            producer.publish(stream, {"n": 7}, delay_ms=1)
        delayed = DelayedMessages(client)
        later = producer.publish("orders-0", {"n": 8}, delay_ms=60_000)
        assert delayed.cancel("orders-0", [later]) == 1
        assert move_all(delayed, *streams) == 12
        assert all(numbers(client, stream) == [7] for stream in streams)


# --- The command line ---


def test_key_tracking_replaces_polling_for_delayed_messages_even_over_lost_connections(
    client: Client, producer: Producer
) -> None:
    delayed = TrackedDelayedMessages(client, ManualClock())  # without time, none is checked in any case
    streams = [f"s:{number}" for number in range(50)]

    def calls() -> int:
        found = commands_run(client.execute)
        return found["evalsha"] + found["exists"]

    assert delayed.move_due(streams) == MovedMessages(moved=0, next_ms=None)
    before = calls()
    for _ in range(20):
        delayed.move_due(streams)
    assert calls() == before
    producer.publish("s:7", {"n": 1}, delay_ms=600_000)
    waits_ms = delayed.move_due(streams).next_ms
    assert waits_ms is not None
    assert 0 < waits_ms <= 600_001, "to the millisecond after it"
    client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    producer.publish("s:8", {"n": 2}, delay_ms=1)
    come_closer(client, "s:7", 600_000)
    time.sleep(0.01)
    client.retry_while_unavailable(lambda: delayed.move_due(streams), what="the test")
    assert (numbers(client, "s:7"), numbers(client, "s:8")) == ([1], [2])


def test_delayed_messages_are_found_even_if_key_tracking_reports_nothing(
    client: Client, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = [0.0]
    clock = SystemClock()
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now_ms[0])
    delayed = TrackedDelayedMessages(client, clock)
    streams = [f"s:{number}" for number in range(120)]
    delayed.move_due(streams)
    monkeypatch.setattr(KeyTracker, KeyTracker.changed.__name__, lambda watch: set())
    producer.publish("s:7", {"n": 1}, delay_ms=1)
    time.sleep(0.01)
    assert delayed.move_due(streams).moved == 0
    for _ in range(60):  # a sixtieth each second
        now_ms[0] += 1_000
        delayed.move_due(streams)
    assert numbers(client, "s:7") == [1]


def test_a_file_is_published_with_a_delay(client: Client, delayed: DelayedMessages, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("n\n" + "".join(f"{n}\n" for n in range(1_200)))
    done = call("publish", "s", str(path), "--in", "1s", url=client.url)
    assert done.code == 0
    assert "published to s, due in 1s, in " in done.out
    assert not client.execute("EXISTS", "s")
    assert delayed.count("s") == 1_200
    come_closer(client, "s", 1_000)
    assert move_all(delayed, "s") == 1_200
    assert numbers(client) == list(range(1_200))


@pytest.mark.parametrize(
    ("options", "complaint"), [(("--in", "soon"), "30s, 5m"), (("--in", "5m", "--maxlen", "9"), "leave out maxlen")]
)
def test_an_invalid_delay_is_wrong_usage(
    client: Client, tmp_path: Path, options: tuple[str, ...], complaint: str
) -> None:
    path = tmp_path / "some.csv"
    path.write_text("n\n1\n")
    done = call("publish", "s", str(path), *options, url=client.url)
    assert done.code == 2
    assert complaint in done.err
    assert not client.execute("DBSIZE")


def test_the_command_lists_delayed_messages_in_due_order_and_cancels_them(client: Client, producer: Producer) -> None:
    late = producer.publish("s", {"n": "2", "raw": b"\xff"}, delay_ms=7_200_000)
    soon = producer.publish("s", {"n": "1"}, delay_ms=3_600_000)
    listed = call("delayed", "list", "s", "--json", url=client.url).json_lines()
    assert [(one["id"], one["fields"]) for one in listed] == [
        (soon, {"n": "1"}),
        (late, {"n": "2", "raw": {"hex": "ff"}}),
    ]
    assert listed[1]["due_ms"] - listed[0]["due_ms"] == pytest.approx(3_600_000, abs=60_000)
    shown = call("delayed", "list", "s", "--limit", "1", url=client.url)
    assert re.search(r"\b(60|5\d) min\b", shown.out)
    assert "n=1" in shown.out
    assert "1 more; use --limit" in shown.err

    producer.publish("other", {"n": "3"}, delay_ms=1_800_000)
    everything = call("delayed", "list", "--json", url=client.url).json_lines()
    assert [(one["stream"], one["fields"]["n"]) for one in everything] == [("other", "3"), ("s", "1"), ("s", "2")]
    counted = call("delayed", "list", "--count", "--json", url=client.url).json_lines()
    assert [(one["stream"], one["count"]) for one in counted] == [("other", 1), ("s", 2)]
    assert "2 more; use --limit" in call("delayed", "list", "--limit", "1", url=client.url).err

    refused = call("delayed", "cancel", "s", soon, url=client.url)
    assert (refused.code, DelayedMessages(client).count("s")) == (2, 2)  # without consent
    tried = call("delayed", "cancel", "s", soon, soon, "--dry-run", url=client.url)
    assert (tried.code, tried.out) == (1, "1 delayed message would be cancelled\n")
    done = call("delayed", "cancel", "s", soon, "--yes", url=client.url)
    assert (done.code, done.out) == (0, "1 delayed message cancelled\n")
    again = call("delayed", "cancel", "s", soon, late, "--yes", "--json", url=client.url)
    assert (again.code, again.json()) == (1, {"stream": "s", "asked": 2, "cancelled": 1, "dry_run": False})
    assert "1 of 2 were not cancelled" in again.err
    assert call("delayed", "list", "s", url=client.url).err == "there are no delayed messages for s\n"
    client.execute("SET", StreamKeys("s").due, "of another program")
    assert call("delayed", "list", "s", url=client.url).code == 1


def test_messages_behind_another_are_found_also_where_thousands_are_due_at_once(client: Client) -> None:
    due_ms = 4_000_000_000_000
    keys, ids = StreamKeys("s"), [f"{n:05}" for n in range(2_500)]
    client.pipeline([("ZADD", keys.due, due_ms, one) for one in ids])
    client.pipeline([("HSET", keys.delayed, one, b"\x90") for one in ids])
    client.execute("ZADD", keys.due, due_ms + 1, "00000 later")
    client.execute("HSET", keys.delayed, "00000 later", b"\x90")
    delayed = DelayedMessages(client)
    after: tuple[int, str] | None = None
    seen: list[str] = []
    while found := delayed.find("s", limit=600, after=after):
        seen += [one.id for one in found]
        after = found[-1].due_ms, found[-1].id
        delayed.cancel("s", [found[-1].id])
    assert seen == [*ids, "00000 later"]
