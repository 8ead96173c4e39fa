"""Workers of a handler with a key join, leave, die, hang and are cut off; keys stay in order, and none is stuck."""

import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from millstream.client import Client
from millstream.server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.support.keyed_workers import KeyedBooks
from tests.support.waiting import eventually
from tests.support.worker_processes import Fleet, Tell, wake_up, watched

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.keys, pytest.mark.faults]

MESSAGES, KEYS, MOST = (120_000, 1_000, 8) if SOAK else (12_000, 300, 3)
HOT, COLD = (150_000, 4_000) if SOAK else (20_000, 300)
LEASE_S = 1.0
APP = {"app": "keyed"}


def test_chaos_keeps_every_key_in_order_and_loses_and_doubles_nothing(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path, tell: Tell
) -> None:
    """1 -> many -> 1 workers; kill -9 and SIGSTOP at random; connections cut; Redis restarted."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    books = KeyedBooks(client, tmp_path)
    harm = {"kill": 0, "stop": 0, "cut": 0, "restart": 0}
    with ExitStack() as stack, watched(books) as watch:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))
        fleets = [stack.enter_context(Fleet(proxy.url, tmp_path, processes=1, **APP))]
        fleets[0].ready()
        stopped: list[psutil.Process] = []
        rounds = MOST * 4
        for number in range(rounds):
            books.publish_keys(MESSAGES // rounds, KEYS, ms=chance.choice((0, 0, 1)))
            if number < rounds // 2 and len(fleets) < MOST:
                fleets.append(stack.enter_context(Fleet(proxy.url, tmp_path, processes=1, **APP)))
            elif number > 3 * rounds // 4 and len(fleets) > 1:
                fleets.pop().stop()
            wake_up(stopped)
            children = [child for fleet in fleets for child in fleet.children()]
            deed = chance.choice(list(harm)) if number % 4 != 3 else "restart"
            harm[deed] += 1
            if deed == "restart":
                millstream_fresh_server.kill()
                millstream_fresh_server.start()
                client.patiently(lambda: client.execute("PING"), what="test")
            elif deed == "cut":
                proxy.cut_all()
            elif children:
                victim = chance.choice(children)
                if deed == "kill":
                    victim.kill()
                else:
                    victim.suspend()
                    stopped.append(victim)
            time.sleep(chance.uniform(0.2, 1.5 * LEASE_S))
        wake_up(stopped)
        report = books.check_keys(overlap=False, log=fleets[0].log, within_s=600 if SOAK else 60)
    tell(report, watch, seed=seed, **harm)


@pytest.mark.alone
def test_after_a_kill_the_keys_of_the_dead_go_on_within_their_lease_and_a_second(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = KeyedBooks(client, tmp_path)
    waits_s = []
    # The names are not taken again, as the dead one's supervisor dies as well: only the lease helps.
    with Fleet(client.url, tmp_path, "--name", "heir", processes=1, **APP) as heir:
        heir.ready()
        for number in range(6 if SOAK else 1):
            with Fleet(client.url, tmp_path, "--name", f"dying{number}", processes=1, **APP) as dying:
                dying.ready()
                (child,) = dying.children()
                books.publish_keys(2_500, 40, ms=10)
                eventually(
                    lambda: sum(b"dying" in token for token in owners(client, books).values()) > 5, "work on both",
                    log=dying.log,
                )  # fmt: skip
                dying.supervisor.kill()
                child.kill()
                killed = time.time()
                held = {name for name, token in owners(client, books).items() if b"dying" in token}
                done = books.done()
                waits_s.append(max((first_after(books, name, done, killed) for name in held), default=0.0))
                books.check_keys(log=heir.log)
        report = books.check_keys(log=heir.log)
    tell(report, waits_s=[round(one, 2) for one in waits_s], lease_s=LEASE_S)
    assert 0 < max(waits_s) <= LEASE_S + 1.0


def owners(client: Client, books: KeyedBooks) -> dict[bytes, bytes]:
    """Lines that are leased, and their tokens."""
    found = client.execute("HGETALL", books.keys.owners)
    return dict(zip(found[::2], found[1::2], strict=True))


def first_after(books: KeyedBooks, line: bytes, done: int, since: float) -> float:
    """Seconds from `since` to the next commit of a line, by the server's clock; 0 if nothing of it was left."""
    eventually(books.drained, "the drain")
    key = line[1:].decode()
    entries = books.client.execute("XRANGE", "out", "-", "+")[done:]
    times = [stamp_ms(one) / 1000 for one, pairs in entries if pairs[pairs.index(b"key") + 1] == key.encode()]
    return max(0.0, times[0] - since) if times else 0.0


def test_a_worker_that_slept_past_its_lease_is_refused_what_it_commits_late(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = KeyedBooks(client, tmp_path)
    with Fleet(client.url, tmp_path, processes=2, **APP) as fleet:
        fleet.ready()
        for _ in range(10 if SOAK else 1):
            books.publish_keys(2_000, 50, ms=10)
            eventually(lambda: books.pending() > 100, "work in hand", log=fleet.log)
            victim = fleet.victim()
            victim.suspend()
            time.sleep(2.5 * LEASE_S)
            victim.resume()
            report = books.check_keys(overlap=False, log=fleet.log)
        refused = fleet.figures()["refused"]
    tell(report, refused=refused)


def test_a_message_that_kills_its_worker_dies_and_its_key_and_all_others_go_on(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = KeyedBooks(client, tmp_path)
    with Fleet(client.url, tmp_path, processes=2, **APP) as fleet, watched(books) as watch:
        fleet.ready()
        books.publish_keys(300, 20, ms=1)
        dead = [books.publish_key(f"k{number}", 1, do="exit-1")[0] for number in ((1, 2) if SOAK else (1,))]
        books.publish_keys(300, 20, ms=1)
        report = books.check_keys(dead=dict.fromkeys(dead, "crashed"), log=fleet.log)
    tell(report, watch, crashes=fleet.log().count("starts again"))


@pytest.mark.alone
def test_a_worker_that_joins_gets_work_at_once_and_stalls_nobody(client: Client, tmp_path: Path, tell: Tell) -> None:
    books = KeyedBooks(client, tmp_path)
    with Fleet(client.url, tmp_path, processes=1, **APP) as first, watched(books) as watch:
        first.ready()
        books.publish_keys(4_000, 100, ms=5)
        with Fleet(client.url, tmp_path, processes=1, **APP) as second:
            second.ready()
            joined = str(*(child.pid for child in second.children()))
            given = books.publish_keys(4_000, 100, ms=5)
            report = books.check_keys(log=first.log, within_s=90)
    effects = client.execute("XRANGE", "out", given[0], "+")
    by = [pairs[pairs.index(b"pid") + 1].decode() for _, pairs in effects]
    waited_ms = stamp_ms(effects[by.index(joined)][0]) - stamp_ms(given[0].encode())
    share = by.count(joined) / len(by)
    tell(report, watch, share_of_the_second=round(share, 2), waited_ms=waited_ms)
    assert watch.longest_s < 1.0
    assert waited_ms < 1_000
    assert share > 0.3


def stamp_ms(entry: bytes) -> int:
    """When an entry was added, by the server's clock."""
    return int(entry.partition(b"-")[0])


@pytest.mark.alone
def test_a_hot_key_neither_slows_the_others_nor_costs_more_than_its_place_in_line(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = KeyedBooks(client, tmp_path)
    with Fleet(client.url, tmp_path, processes=2, **APP) as fleet:
        fleet.ready()
        alone = latencies_ms(books, COLD)
        client.execute("HSET", books.keys.meta, "paused", 1)
        time.sleep(1.5)  # until all have noticed
        books.publish_key("hot", HOT // 4, ms=1)
        books.publish_key("hot", HOT - HOT // 4)
        before = used_memory(client)
        client.execute("HDEL", books.keys.meta, "paused")
        eventually(books.all_given, "the hot key in line", log=fleet.log)
        bytes_each = (used_memory(client) - before) / books.pending()
        beside = latencies_ms(books, COLD)
        still_waiting = books.pending()
        report = books.check_keys(log=fleet.log, within_s=300)
    p99 = [statistics.quantiles(times, n=100)[98] for times in (alone, beside)]
    tell(report, p99_alone_ms=round(p99[0], 1), p99_beside_ms=round(p99[1], 1), bytes_each=round(bytes_each),
         still_waiting=still_waiting)  # fmt: skip
    assert still_waiting > 0
    assert bytes_each < 130


def latencies_ms(books: KeyedBooks, count: int) -> list[float]:
    """Milliseconds from each message's entry to its effect's, by the server's clock, at 200 a second over 50 keys."""
    ids: list[str] = []
    for _ in range(0, count, 20):
        ids += books.publish_keys(20, 50)
        time.sleep(0.1)
    wanted = set(ids)
    found: dict[str, float] = {}

    def all_done() -> bool:
        found.clear()
        for one, pairs in books.client.execute("XREVRANGE", "out", "+", "-", "COUNT", 200_000):
            source = pairs[1].decode()
            if source in wanted:
                found[source] = stamp_ms(one) - stamp_ms(source.encode())
        return len(found) == len(wanted)

    eventually(all_done, "the cold keys' effects")
    return list(found.values())


def used_memory(client: Client) -> int:
    """What Redis says it uses, in bytes."""
    info = client.execute("INFO", "memory").decode()
    return int(next(line for line in info.splitlines() if line.startswith("used_memory:")).partition(":")[2])
