"""A reader outlives what happens to its stream, its group and its connection under it, and says so."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.clock import SYSTEM_CLOCK, Clock, SystemClock
from millstream.errors import WrongType
from millstream.groups import (
    END,
    ClaimOptions,
    Consumer,
    Delivered,
    EntriesGone,
    Event,
    Group,
    GroupRecreated,
    ProcessedIds,
    Reader,
    ReadPolicy,
    Repeated,
    Resumed,
)
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.support.clocks import ManualClock
from tests.support.waiting import eventually

pytestmark = [pytest.mark.groups]

LOGGER = "millstream.groups.reader"
QUICK = ReadPolicy(block_ms=100)


class Running:
    """A reader in a thread of its own, and everything it has returned and reported."""

    def __init__(
        self, client: Client, *streams: str, policy: ReadPolicy, acks: bool = True, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.events: list[Event] = []
        self.seen: list[tuple[str, bytes]] = []
        self.reads = 0
        self.reader = Reader(
            client,
            group="g",
            consumer="c",
            streams=streams or ("s",),
            policy=policy,
            on_event=self.events.append,
            clock=clock,
        )
        self._client = client
        self._acks = acks
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.reader._stopped.is_set():
            for batch in self.reader.read():
                self.seen += [(batch.stream, one) for one in batch.ids]
                if self._acks:
                    self.reader.ack(batch.stream, batch.ids)
            self.reads += 1

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()
        eventually(self._has_ended, "the reader to end")
        self.reader.close()

    def _has_ended(self) -> bool:
        """It ends after its long poll, which no test has to wait for."""
        for line in self._client.execute("CLIENT", "LIST").decode().splitlines():
            if "cmd=xreadgroup" in line:
                self._client.execute("CLIENT", "UNBLOCK", line.split()[0].removeprefix("id="))
        return not self._thread.is_alive()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, *numbers: int, stream: str = "s") -> None:
        wanted = {(stream, b"%d-0" % n) for n in numbers}
        eventually(lambda: wanted <= set(self.seen), f"entries {wanted}")


def add(client: Client, *numbers: int, stream: str = "s") -> None:
    for n in numbers:
        client.execute("XADD", stream, f"{n}-0", "n", n)


def wait_blocked(client: Client) -> None:
    eventually(lambda: b"blocked_clients:1" in client.execute("INFO", "clients"), "a blocked reader")


def test_a_reader_begins_with_its_pending_entries_and_then_reads_new_ones(client: Client) -> None:
    add(client, 1, 2, 3)
    Group(client, "s", "g").create()
    Consumer(client, group="g", name="c", streams=["s"]).read_new(count=2)
    with Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK) as reader:
        steps = [reader.read() for _ in range(2)]
    assert [[(batch.recovered, batch.ids) for batch in step] for step in steps] == [
        [(True, [b"1-0", b"2-0"])],
        [(False, [b"3-0"])],
    ]


def test_a_readers_long_pending_entries_list_is_read_page_by_page_on_every_stream(client: Client) -> None:
    add(client, *range(1, 8))
    add(client, 1, 2, stream="t")
    for stream in ("s", "t"):
        Group(client, stream, "g").create()
    Consumer(client, group="g", name="c", streams=["s", "t"]).read_new()
    policy = ReadPolicy(count=3, block_ms=50)
    with Reader(client, group="g", consumer="c", streams=["s", "t"], policy=policy) as reader:
        steps = [reader.read() for _ in range(4)]
    found = [[(batch.stream, len(batch)) for batch in step] for step in steps]
    assert found == [[("s", 3), ("t", 2)], [("s", 3)], [("s", 1)], []]


def test_iteration_ends_when_the_reader_is_stopped(client: Client) -> None:
    add(client, 1)
    with Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK) as reader:
        for batch in reader:
            reader.ack(batch.stream, batch.ids)
            reader.stop()
    assert Group(client, "s", "g").pending.summary().count == 0


# What is done to the stream while the reader waits in a long poll. After each, 7-0 is added; the reader must see it.


def destroy(client: Client) -> None:
    Group(client, "s", "g").destroy()


def delete(client: Client) -> None:
    client.execute("DEL", "s")


def rename(client: Client) -> None:
    client.execute("RENAME", "s", "elsewhere")


def replace(client: Client) -> None:
    add(client, 1, stream="other")
    client.execute("RENAME", "other", "s")


def expire(client: Client) -> None:
    client.execute("PEXPIRE", "s", 1)


def flush(client: Client) -> None:
    client.execute("FLUSHALL")


@pytest.mark.parametrize("fault", [destroy, delete, rename, replace, expire, flush])
def test_a_group_lost_under_a_waiting_reader_is_created_again_and_no_later_entry_is_missed(
    client: Client, fault: Callable[[Client], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    add(client, 5)
    with Running(client, policy=ReadPolicy(block_ms=1_500)) as running:
        running.wait_for(5)
        wait_blocked(client)
        fault(client)
        eventually(lambda: bool(running.events), "word of it")
        add(client, 7)
        running.wait_for(7)
    (event,) = running.events
    assert isinstance(event, GroupRecreated)
    assert (event.stream, event.group, event.at) == ("s", "g", "0")
    assert "NOGROUP" in event.cause or "UNBLOCKED" in event.cause
    assert re.search(r"group g of s was lost: .*; recreated after 0", caplog.text)


def test_a_stream_emptied_under_a_waiting_reader_does_not_disturb_it(client: Client) -> None:
    add(client, 5)
    with Running(client, policy=ReadPolicy(block_ms=1_500)) as running:
        running.wait_for(5)
        wait_blocked(client)
        client.execute("XTRIM", "s", "MAXLEN", 0)
        add(client, 7)
        running.wait_for(7)
    assert running.events == []
    assert running.seen == [("s", b"5-0"), ("s", b"7-0")]


def test_a_reader_continues_with_the_other_streams_when_one_is_deleted(client: Client) -> None:
    add(client, 5)
    add(client, 5, stream="t")
    with Running(client, "s", "t", policy=ReadPolicy(block_ms=1_500)) as running:
        running.wait_for(5, stream="t")
        wait_blocked(client)
        client.execute("DEL", "s")
        eventually(lambda: bool(running.events), "word of it")
        add(client, 6, stream="t")
        add(client, 1)
        running.wait_for(6, stream="t")
        running.wait_for(1)
    assert running.seen.count(("t", b"5-0")) == 1
    assert [event.stream for event in running.of(GroupRecreated) if isinstance(event, GroupRecreated)] == ["s"]


def test_healing_at_the_beginning_repeats_and_healing_at_the_last_entry_does_not(client: Client) -> None:
    for heal, expected in (("beginning", [5, 6, 5, 6, 7]), ("last", [5, 6, 7])):
        client.execute("FLUSHALL")
        add(client, 5, 6)
        with Running(client, policy=ReadPolicy(block_ms=1_500, heal=heal)) as running:  # type: ignore[arg-type]
            running.wait_for(5, 6)
            wait_blocked(client)
            add(client, 4, stream="unrelated")
            destroy(client)
            add(client, 7)
            running.wait_for(7)
        assert running.seen == [("s", b"%d-0" % n) for n in expected]


def test_healing_at_the_last_entry_reads_all_of_a_stream_that_was_recreated(client: Client) -> None:
    add(client, 5, 6)
    with Running(client, policy=ReadPolicy(block_ms=1_500, heal="last")) as running:
        running.wait_for(5, 6)
        wait_blocked(client)
        client.execute("MULTI")
        client.execute("DEL", "s")
        client.execute("XADD", "s", "1-0", "n", 1)
        client.execute("EXEC")
        running.wait_for(1)
    assert [event.at for event in running.events if isinstance(event, GroupRecreated)] == ["0"]


def test_a_reader_from_the_end_that_never_read_an_entry_heals_where_it_began(client: Client) -> None:
    add(client, 5)
    with Running(client, policy=ReadPolicy(block_ms=1_500, start=END, heal="last")) as running:
        wait_blocked(client)
        destroy(client)
        add(client, 6)
        running.wait_for(6)
    assert running.seen == [("s", b"6-0")]


def test_a_heal_function_chooses_the_id_at_which_the_group_is_created_again(client: Client) -> None:
    add(client, 5, 6, 7)
    with Running(client, policy=ReadPolicy(block_ms=1_500, heal=lambda stream: f"6-{len(stream) - 1}")) as running:
        running.wait_for(5, 6, 7)
        wait_blocked(client)
        destroy(client)
        add(client, 8)
        running.wait_for(8)
    assert running.seen == [("s", b"%d-0" % n) for n in (5, 6, 7, 7, 8)]


def test_a_key_that_became_another_type_stops_the_reader_with_its_name(client: Client) -> None:
    with Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK) as reader:
        assert reader.read() == []
        client.execute("SET", "s", "text")
        with pytest.raises(WrongType, match="s is not a stream"):
            reader.read()


class CountingClock(SystemClock):
    """The machine's clock, which notes what it was asked to wait."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def sleep_ms(self, duration_ms: float) -> None:
        self.waits.append(duration_ms)
        super().sleep_ms(duration_ms / 20)


def test_a_group_that_is_destroyed_repeatedly_makes_no_hot_loop(client: Client) -> None:
    clock = CountingClock()
    with Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK, clock=clock) as reader:
        reader.read()
        for _ in range(8):
            destroy(client)
            assert reader.read() == []
        assert clock.waits == [50, 100, 200, 400, 800, 1000, 1000]  # the first heals at once
        reader.read()
        destroy(client)
        reader.read()
        assert len(clock.waits) == 7


def test_a_reader_neither_spins_nor_floods_the_log_while_redis_is_away_and_then_continues(
    millstream_fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    server, clock = millstream_fresh_server, ManualClock()  # whose waits take no time
    with Client(server.url) as client:
        add(client, 1)
        with Running(client, policy=QUICK, clock=clock) as running:
            running.wait_for(1)
            wait_blocked(client)  # its ack is done: one that Redis does not answer waits by the system's clock
            server.kill()
            since_ms, before = clock.now_ms, running.reads  # in this order: it reads and waits meanwhile
            eventually(lambda: clock.now_ms > since_ms + 60_000, "a minute of waiting")
            reads, waited_ms = running.reads - before, clock.now_ms - since_ms
            lines = len(caplog.records)
            assert 0 < reads <= 10 + waited_ms / 1_000, "it waits for a second, after the first times"
            assert 0 < lines <= 2 + clock.now_ms / 1_000, "it says so once in a second"
            server.start()
            client.retry_while_unavailable(lambda: add(client, 2), what="test")
            running.wait_for(2)
    (event,) = running.events
    assert isinstance(event, Resumed)
    assert event.away_ms > 60_000
    assert running.seen == [("s", b"1-0"), ("s", b"2-0")]


# Lost replies


@pytest.fixture
def proxy(millstream_server: EmbeddedServer, client: Client) -> Iterator[Proxy]:
    with Proxy(millstream_server.port) as found:
        yield found


def test_entries_whose_delivery_was_lost_with_the_connection_are_read_again(client: Client, proxy: Proxy) -> None:
    with Client(proxy.url) as through, Running(through, policy=QUICK) as running:
        add(client, 1)
        running.wait_for(1)
        proxy.cut_after("XREADGROUP")
        add(client, 2, 3)
        running.wait_for(2, 3)
        eventually(lambda: bool(running.events), "word of it")
    assert proxy.cuts == {("after", "XREADGROUP"): 1}
    assert isinstance(running.events[0], Resumed)
    assert sorted(running.seen) == [("s", b"1-0"), ("s", b"2-0"), ("s", b"3-0")]
    assert Group(client, "s", "g").pending.summary().count == 0


def test_an_acknowledgement_whose_reply_was_lost_is_repeated(client: Client, proxy: Proxy) -> None:
    add(client, 1)
    with (
        Client(proxy.url) as through,
        Reader(through, group="g", consumer="c", streams=["s"], policy=QUICK) as reader,
    ):
        (batch,) = reader.read()
        proxy.cut_after("XACK")
        assert reader.ack("s", batch.ids) == 0  # the first one took
    assert proxy.cuts == {("after", "XACK"): 1}
    assert Group(client, "s", "g").pending.summary().count == 0


def test_entries_in_flight_are_not_returned_again_after_a_lost_connection(client: Client, proxy: Proxy) -> None:
    add(client, 1, 2)
    in_flight: set[bytes] = set()
    with (
        Client(proxy.url) as through,
        Reader(
            through,
            group="g",
            consumer="c",
            streams=["s"],
            policy=QUICK,
            excluding=lambda stream, one: one in in_flight,
        ) as reader,
    ):
        in_flight.update(reader.read()[0].ids)
        add(client, 3)
        proxy.cut_after("XREADGROUP")
        assert reader.read() == []
        assert [batch.ids for batch in reader.read()] == [[b"3-0"]]
        in_flight.clear()
        reader.reread_pending()
        assert [batch.ids for batch in reader.read()] == [[b"1-0", b"2-0", b"3-0"]]


# Taking over, and what is lost


def test_entries_of_a_dead_consumer_are_claimed_while_new_ones_are_read(client: Client) -> None:
    add(client, *range(1, 31))
    Group(client, "s", "g").create()
    (delivered,) = Consumer(client, group="g", name="dead", streams=["s"]).read_new(count=25)
    long_ago = ClaimOptions(idle_ms=90_000)
    Group(client, "s", "g").pending.claim_ids(delivered.ids[:20], consumer="dead", min_idle_ms=0, options=long_ago)
    # The next check of the list is half a minute away: the first one must come to its end, page by page.
    with Running(client, policy=ReadPolicy(count=4, block_ms=50, claim_after_ms=60_000)) as running:
        running.wait_for(*range(1, 21), *range(26, 31))
    assert len(running.seen) == 25
    assert Group(client, "s", "g").pending.summary().by_consumer == {"dead": 5}  # not idle for so long yet


def test_a_failed_entry_that_was_left_pending_is_returned_again(client: Client) -> None:
    add(client, 1)
    with Running(client, policy=ReadPolicy(block_ms=20, claim_after_ms=100), acks=False) as running:
        eventually(lambda: len(running.seen) >= 3, "the entry to come three times")
    assert Group(client, "s", "g").pending.entries()[0].deliveries >= 3


@pytest.mark.parametrize("claim_after_ms", [None, 1])
def test_entries_trimmed_while_pending_are_reported(
    client: Client, claim_after_ms: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    add(client, 1, 2)
    Group(client, "s", "g").create()
    holder = "c" if claim_after_ms is None else "dead"
    Consumer(client, group="g", name=holder, streams=["s"]).read_new()
    client.execute("XDEL", "s", "1-0", "2-0")
    policy = ReadPolicy(block_ms=50, claim_after_ms=claim_after_ms)
    with Running(client, policy=policy) as running:
        eventually(lambda: bool(running.events), "word of it")
    assert running.events[0] == EntriesGone(stream="s", ids=[b"1-0", b"2-0"])
    assert running.seen == []
    assert "2 pending entries of s were trimmed or deleted" in caplog.text


def test_a_reader_with_noack_leaves_nothing_pending(client: Client) -> None:
    add(client, 1, 2)
    with Running(client, policy=ReadPolicy(block_ms=50, noack=True), acks=False) as running:
        running.wait_for(1, 2)
        wait_blocked(client)
        assert Group(client, "s", "g").pending.summary().count == 0


def test_processed_entries_are_acknowledged_again_and_not_returned(client: Client, tmp_path: Path) -> None:
    add(client, 1, 2, 3)
    events: list[Event] = []

    def reader() -> Reader:
        done = ProcessedIds(tmp_path / "done")
        return Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK, on_event=events.append, done=done)

    with reader() as first:
        (batch,) = first.read()
        first.ack("s", batch.ids[:2])
    group = Group(client, "s", "g")
    group.set_id("0")  # Redis goes back in time
    with reader() as second:
        assert [batch.ids for batch in second.read()] == [[b"3-0"]]
        assert [batch.ids for batch in second.read()] == [[b"3-0"]]
    assert events == [Repeated(stream="s", ids=[b"1-0", b"2-0"])]
    assert group.pending.summary().count == 1


# How often, and a way out


def test_every_entry_has_its_delivery_count(client: Client) -> None:
    def counts(reader: Reader) -> list[tuple[bytes, int]]:
        return [(one.id, one.deliveries) for batch in reader.read() for one in batch]

    add(client, 1, 2, stream="t")
    add(client, 1, 2, 3)
    group = Group(client, "s", "g")
    group.create()
    Consumer(client, group="g", name="dead", streams=["s"]).read_new(count=2)
    long_ago = ClaimOptions(idle_ms=90_000, deliveries=7)
    group.pending.claim_ids([b"2-0"], consumer="dead", min_idle_ms=0, options=long_ago)
    policy = ReadPolicy(block_ms=50, claim_after_ms=60_000)
    with Reader(client, group="g", consumer="c", streams=["s", "t"], policy=policy) as reader:
        assert eventually(lambda: counts(reader)) == [(b"2-0", 8)]  # claimed
        assert eventually(lambda: counts(reader)) == [(b"3-0", 1), (b"1-0", 1), (b"2-0", 1)]
        reader.reread_pending()
        assert counts(reader) == [(b"2-0", 9), (b"3-0", 2), (b"1-0", 2), (b"2-0", 2)]


def test_an_entry_that_keeps_failing_can_be_moved_away_by_its_delivery_count(client: Client) -> None:
    """As docs/consumer-groups.md has it."""
    add(client, *range(1, 6))
    done: list[bytes] = []
    tried = 0

    def process(message: Delivered) -> None:
        nonlocal tried
        if message.id == b"3-0":
            tried += 1
            raise ValueError(message.id)
        done.append(message.id)

    policy = ReadPolicy(block_ms=20, claim_after_ms=40)
    with Reader(client, group="g", consumer="c", streams=["s"], policy=policy) as reader:

        def step() -> bool:
            for batch in reader.read():
                settled = []
                for message in batch:
                    if message.deliveries > 3:
                        client.execute("XADD", "s:aside", "*", "id", message.id, *message.pairs)
                    else:
                        try:
                            process(message)
                        except ValueError:
                            continue
                    settled.append(message.id)
                reader.ack(batch.stream, settled)
            return len(done) == 4 and client.execute("XLEN", "s:aside") == 1

        eventually(step, "it to be put aside")
    assert (sorted(done), tried) == ([b"1-0", b"2-0", b"4-0", b"5-0"], 3)
    ((_, deferred),) = client.execute("XRANGE", "s:aside", "-", "+")
    assert deferred == [b"id", b"3-0", b"n", b"3"]
    assert Group(client, "s", "g").pending.summary().count == 0


def test_an_entry_that_ends_its_process_is_found_by_its_delivery_count_when_read_one_by_one(client: Client) -> None:
    add(client, 1, 2, 3)
    for deliveries in range(1, 4):  # each ends in the midst of the first entry
        policy = ReadPolicy(count=1, block_ms=50)
        with Reader(client, group="g", consumer="c", streams=["s"], policy=policy) as reader:
            (batch,) = eventually(reader.read)
            assert [(one.id, one.deliveries) for one in batch] == [(b"1-0", deliveries)]
    with Reader(client, group="g", consumer="c", streams=["s"], policy=ReadPolicy(block_ms=50)) as reader:
        (batch,) = reader.read()
        assert [(one.id, one.deliveries) for one in batch] == [(b"1-0", 4)]
        reader.ack("s", [b"1-0"])
        (batch,) = eventually(reader.read)
        assert [(one.id, one.deliveries) for one in batch] == [(b"2-0", 1), (b"3-0", 1)]
