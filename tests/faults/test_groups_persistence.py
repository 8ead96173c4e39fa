"""What a group remembers survives restarts and a failover; what Redis forgets a consumer may remember itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.groups import ClaimOptions, Consumer, Group, GroupInfo, PendingEntry, ProcessedIds, Reader, ReadPolicy
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.replicas import is_primary, kill_primary, steady_trio
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.groups, pytest.mark.faults]
QUICK = ReadPolicy(block_ms=50)
DAY_MS = 86_400_000
Memory = tuple[GroupInfo | None, list[str], list[PendingEntry]]


def add(client: Client, numbers: range) -> None:
    client.pipeline([("XADD", "s", f"{n}-0", "n", n) for n in numbers])


def fill(client: Client) -> None:
    """Put a group through everything that changes what it remembers."""
    add(client, range(1, 41))
    group = Group(client, "s", "g")
    group.create()
    consumers = {name: Consumer(client, group="g", name=name, streams=["s"]) for name in ("a", "b", "c")}
    for name in ("a", "b", "c"):
        consumers[name].read_new(count=8)
    consumers["a"].read_new(count=4, noack=True)
    group.ack([b"1-0", b"9-0"])
    group.pending.claim([b"2-0"], consumer="b", min_idle_ms=0)
    group.pending.claim([b"3-0"], consumer="b", min_idle_ms=0, options=ClaimOptions(deliveries=7, idle_ms=2 * DAY_MS))
    group.pending.claim_ids([b"4-0"], consumer="b", min_idle_ms=0)
    list(group.pending.auto_claim("a", min_idle_ms=DAY_MS))  # 3-0 again
    group.create_consumer("idle")
    group.delete_consumer("c", transfer_to="b")
    group.set_id("33-0", entries_read=33)


def memory(client: Client) -> Memory:
    """All that a group remembers, idle times in days, but not the figures that Redis estimates."""
    group = Group(client, "s", "g")
    entries = [entry._replace(idle_ms=entry.idle_ms // DAY_MS) for entry in group.pending.iter_entries()]
    return group.info(), [one.name for one in group.consumers()], entries


@contextmanager
def rdb_restart() -> Iterator[tuple[Client, Callable[[], None]]]:
    with EmbeddedServer(extra={"appendonly": "no"}) as server, Client(server.url) as client:

        def restart() -> None:
            client.execute("SAVE")
            server.kill()
            server.start()

        yield client, restart


@contextmanager
def aof_restart() -> Iterator[tuple[Client, Callable[[], None]]]:
    with EmbeddedServer(extra={"appendfsync": "no"}) as server, Client(server.url) as client:

        def restart() -> None:
            server.kill()
            server.start()

        yield client, restart


@contextmanager
def rewritten_aof_restart() -> Iterator[tuple[Client, Callable[[], None]]]:
    directives = {"appendfsync": "no", "aof-use-rdb-preamble": "no"}
    with EmbeddedServer(extra=directives) as server, Client(server.url) as client:

        def restart() -> None:
            client.execute("BGREWRITEAOF")
            done = b"aof_rewrite_in_progress:0"
            eventually(lambda: done in client.execute("INFO", "persistence"), "the rewrite")
            server.kill()
            server.start()

        yield client, restart


@contextmanager
def promotion() -> Iterator[tuple[Client, Callable[[], None]]]:
    with steady_trio() as trio, Client(trio.url) as client:

        def fail_over() -> None:
            eventually(lambda: client.execute("WAIT", 1, 1_000) == 1, "the replica to have it all")
            kill_primary(trio)
            eventually(lambda: is_primary(trio.replica), "the promotion")

        yield client, fail_over


@pytest.mark.parametrize("fault", [rdb_restart, aof_restart, rewritten_aof_restart, promotion])
def test_pending_entries_owners_delivery_counts_and_set_ids_survive(fault: Callable[[], object]) -> None:
    with fault() as (client, inject):  # type: ignore[attr-defined]
        fill(client)
        before = memory(client)
        assert len(before[2]) == 22
        assert {entry.deliveries for entry in before[2]} == {1, 2, 8}
        inject()
        after = client.retry_while_unavailable(lambda: memory(client), what="test", limit_ms=1000 * FAIL_SAFE_S)
        assert after == before
        (batch,) = Consumer(client, group="g", name="new", streams=["s"]).read_new()
        assert batch.ids == [b"%d-0" % n for n in range(34, 41)]


def test_a_waiting_reader_follows_a_failover_and_gets_every_entry(tmp_path: Path) -> None:
    with promotion() as (client, fail_over):
        add(client, range(1, 11))
        with Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK) as reader:
            seen = [one for batch in reader.read() for one in batch.ids[:5] if reader.ack("s", [one])]
            fail_over()
            client.retry_while_unavailable(lambda: add(client, range(11, 21)), what="test", limit_ms=1000 * FAIL_SAFE_S)
            eventually(lambda: bool(read_and_ack(reader, seen)) and len(set(seen)) == 20, "every entry")
        assert sorted(seen, key=lambda one: int(one[:-2])) == [b"%d-0" % n for n in range(1, 21)]
        assert Group(client, "s", "g").pending.summary().count == 0


def kill_and_start(server: EmbeddedServer, client: Client) -> None:
    """Take back all that Redis did since its last snapshot."""
    server.kill()
    server.start()
    client.close()  # its connection died too


def read_and_ack(reader: Reader, seen: list[bytes]) -> list[bytes]:
    """One step of a reader that processes and acknowledges."""
    for batch in reader.read():
        seen += batch.ids
        reader.ack(batch.stream, batch.ids)
    return seen


@pytest.mark.parametrize("remembers", [True, False])
def test_a_redis_that_lost_its_last_second_makes_only_a_consumer_without_processed_ids_repeat(
    remembers: bool, tmp_path: Path
) -> None:
    processed: list[bytes] = []

    def start(client: Client) -> Reader:
        done = ProcessedIds(tmp_path / "done") if remembers else None
        return Reader(
            client, group="g", consumer="c", streams=["s"], policy=ReadPolicy(count=5, block_ms=50), done=done
        )

    # No append-only file: a kill takes back everything since the last snapshot.
    with EmbeddedServer(extra={"appendonly": "no"}) as server, Client(server.url) as client:
        add(client, range(1, 21))
        with start(client) as reader:
            read_and_ack(reader, processed)
            pending_ids = Consumer(client, group="g", name="c", streams=["s"]).read_new(count=2)[0].ids
            client.execute("SAVE")
            reader.ack("s", pending_ids)
            processed += pending_ids
            read_and_ack(reader, processed)
            read_and_ack(reader, processed)
        assert len(processed) == 17
        kill_and_start(server, client)
        assert Group(client, "s", "g").pending.summary().count == 2  # Redis has forgotten 12 acknowledgements
        with start(client) as reader:
            eventually(lambda: read_and_ack(reader, processed)[-1] == b"20-0", "the end of the stream")
            reader.read()
        assert Group(client, "s", "g").pending.summary().count == 0
    assert set(processed) == {b"%d-0" % n for n in range(1, 21)}
    assert len(processed) == (20 if remembers else 32)


def test_a_redis_that_came_back_empty_is_read_again_once_it_has_entries(tmp_path: Path) -> None:
    events: list[object] = []
    with EmbeddedServer(extra={"appendonly": "no"}) as server, Client(server.url) as client:
        add(client, range(1, 4))
        with Reader(client, group="g", consumer="c", streams=["s"], policy=QUICK, on_event=events.append) as reader:
            seen = read_and_ack(reader, [])
            kill_and_start(server, client)
            eventually(lambda: not read_and_ack(reader, []) and len(events) == 2, "the group to be made again")
            add(client, range(1, 3))
            eventually(lambda: len(read_and_ack(reader, seen)) == 5, "the new entries")
    assert [type(event).__name__ for event in events] == ["GroupRecreated", "Resumed"]
