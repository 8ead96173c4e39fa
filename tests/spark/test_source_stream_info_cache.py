"""What a query knows of its streams without asking again is what Redis would answer; on real Redis, without Spark."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_tracking import KeyTracker
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.options import parse
from millstream.spark.source.stream_info import fetch
from millstream.spark.source.stream_info_cache import StreamInfoCache
from millstream.testing.topologies import acl_server, cluster
from tests.support.clocks import ManualClock
from tests.support.planning import planned_end
from tests.support.slots import finish_move, move_slot
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]

NAMES = [f"{{{tag}}}:{n}" for tag in "abcd" for n in range(10)]


class Knowing:
    """Refreshes, and asks about what has changed since the last refresh; time stands still, so that nothing else is asked."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.clock = ManualClock()
        self.known = StreamInfoCache(client, clock=self.clock)
        self.refresh()

    def refresh(self) -> set[str] | None:
        changed = self.known.refresh()
        facts = self.known.get(NAMES)
        assert {name: facts[name] for name in NAMES} == fetch(self.client, NAMES)
        return changed


def happenings(client: Client, dice: random.Random) -> None:
    """Something that happens to streams."""
    one, other = dice.sample(NAMES[:10], 2)
    many = dice.sample(NAMES, dice.randrange(len(NAMES)))
    choices: list[list[Sequence[Any]]] = [
        [("XADD", name, "*", "a", 1) for name in many],
        [("XADD", one, "*", "a", 1), ("XADD", one, "*", "a", 2), ("XADD", one, "*", "a", 3)],
        [("XADD", one, "*", "a", 1), ("XTRIM", one, "MAXLEN", 1)],
        [("XTRIM", one, "MAXLEN", 0)],
        [("XDEL", one, *([entry[0] for entry in client.execute("XRANGE", one, "-", "+", "COUNT", 1)] or ["1-1"]))],
        [("DEL", one)],
        [("UNLINK", *many)] if not client.is_cluster and many else [],
        [("DEL", one), ("XADD", one, "1-1", "a", 1)],
        [("XADD", one, "*", "a", 1), ("RENAME", one, other)],
        [("XADD", one, "*", "a", 1), ("COPY", one, other, "REPLACE")],
        [("MULTI",), ("XADD", one, "*", "a", 1), ("DEL", one), ("EXEC",)] if not client.is_cluster else [],
        [("EVAL", "return redis.call('XADD', KEYS[1], '*', 'a', '1')", 1, one)],
        [("SET", one, "text"), ("DEL", one)],
        [("XGROUP", "CREATE", one, f"g{dice.random()}", "$", "MKSTREAM")],
        [("PEXPIRE", one, -1)],
    ]
    for command in dice.choice(choices):
        client.execute(*command)


def test_any_change_of_a_stream_is_known_at_the_next_refresh(client: Client) -> None:
    dice = random.Random(7)
    knowing = Knowing(client)
    for _ in range(300):
        for _ in range(dice.randrange(3)):
            happenings(client, dice)
        if dice.randrange(20) == 0:
            client.execute(*dice.choice([("FLUSHALL",), ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")]))
        knowing.refresh()
    client.execute("XADD", NAMES[3], "*", "a", 1)
    assert knowing.refresh() == {NAMES[3]}
    assert knowing.refresh() == set()


def test_a_stream_that_expires_is_detected(client: Client) -> None:
    client.execute("XADD", NAMES[0], "*", "a", 1)
    knowing = Knowing(client)
    client.execute("PEXPIRE", NAMES[0], 200)
    assert knowing.known.refresh() == {NAMES[0]}

    def is_missed() -> bool:
        knowing.known.refresh()
        return knowing.known.get(NAMES)[NAMES[0]] is None

    eventually(is_missed, "its end")


def test_the_cache_survives_a_full_tracking_table_and_a_restart_of_the_server(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    with Client(millstream_fresh_server.url) as client:
        client.execute("CONFIG", "SET", "tracking-table-max-keys", 10)
        dice = random.Random(3)
        knowing = Knowing(client)
        for _ in range(50):
            happenings(client, dice)
            eventually(lambda: knowing.refresh() is not None, "it to be told")
        client.execute("CONFIG", "SET", "tracking-table-max-keys", 0)
        millstream_fresh_server.restart()
        client.close()
        assert knowing.refresh() is None
        knowing.refresh()
        assert knowing.refresh() == set()
        client.execute("SWAPDB", 0, 1)  # is not reported
        facts = knowing.known.get(NAMES)
        for _ in range(400):
            knowing.clock.now_ms += 1_000
            knowing.known.refresh()
            facts = knowing.known.get(NAMES)
        assert not any(facts.values())


def test_every_stream_is_polled_each_time_without_the_right_to_key_tracking(caplog: pytest.LogCaptureFixture) -> None:
    with acl_server(["plain >secret ~* +@all -client|tracking"]) as server, Client(server.urls["plain"]) as client:
        knowing = Knowing(client)
        for _ in range(2):
            client.execute("XADD", NAMES[0], "*", "a", 1)
            assert knowing.refresh() is None
        assert caplog.text.count("polling every stream instead") == 1


def test_the_cache_follows_slots_that_move() -> None:
    dice = random.Random(5)
    with cluster() as made, Client(made.url) as client:
        knowing = Knowing(client)
        eventually(lambda: knowing.refresh() is not None, "the nodes to say the same")
        slot = int(client.execute("CLUSTER", "KEYSLOT", NAMES[0]))
        client.execute("XADD", NAMES[0], "*", "a", 1)
        source = next(node for node in made.nodes if node.call("CLUSTER", "COUNTKEYSINSLOT", slot))
        target = next(node for node in made.nodes if node is not source)

        def happens(refresh: Callable[[], object]) -> None:
            for _ in range(30):
                with suppress(Unavailable):  # of two keys, one has moved
                    happenings(client, dice)
                refresh()

        happens(knowing.refresh)
        client.execute("XADD", NAMES[0], "*", "a", 1)
        move_slot(source, target, slot, finish=False)
        # A stream that is created while its slot is on its way, and was not there before, is not reported before it has arrived.
        happens(lambda: (knowing.known.refresh(), knowing.known.get(NAMES)))
        finish_move(source, target, slot)
        happens(knowing.refresh)
        eventually(lambda: knowing.refresh() is not None, "the nodes to say the same")
        assert knowing.refresh() == set()


def test_replies_of_a_connection_that_breaks_within_a_read_are_not_cached(client: Client) -> None:
    watch = KeyTracker(client)
    assert watch.changed() is None
    replies = watch.read_each(("XLEN",), NAMES)
    assert next(replies) == (NAMES[0], 0)
    client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(Unavailable):
        list(watch.read_each(("XLEN",), NAMES))
    assert watch.changed() is None
    assert dict(watch.read_each(("XLEN",), NAMES)) == dict.fromkeys(NAMES, 0)
    watch.close()
    assert watch.changed() is None


def test_a_stream_whose_name_is_not_text_is_left_out_of_a_pattern_and_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    client.execute("XADD", "p:1", "*", "a", "1")
    client.execute("XADD", b"p:\xff\xfe", "*", "a", "1")
    options = parse({"url": client.url, "subscribePattern": "p:*", "startingOffsets": "earliest"}, {})
    pattern = BatchPlanner(client, options, cores=1, clock=clock)
    start = pattern.starting_offsets("latest")
    assert list(start) == ["p:1"]
    for _ in range(3):
        clock.now_ms += 2_000
        assert list(planned_end(pattern, start)) == ["p:1"]
    (log_text,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert log_text == "1 streams are left out, as their names are not UTF-8 text: 'p:\\udcff\\udcfe'"
