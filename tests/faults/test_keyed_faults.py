"""Workers of a handler with a key join, leave, die, hang and lose connections; keys stay in order and go on."""

import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.pipelining import server_time_ms
from millstream.testing.proxy import Proxy
from tests.support.keyed_workers import KeyedExpectations
from tests.support.memory import more_for_pending
from tests.support.stopped_processes import stop_and_await_silence
from tests.support.waiting import eventually
from tests.support.worker_processes import (
    CLAIM_S,
    PrintFigures,
    RunningWorkers,
    kill,
    random_process,
    resume_all,
    suspend,
    watched,
)

LONG_CLAIM_S = 3 * CLAIM_S
"""Leases must outlast the deaths of their owner and its supervisor on a slow machine."""
SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.keys, pytest.mark.faults]

MESSAGES, KEYS, MOST, ROUNDS = (120_000, 1_000, 8, 32) if SOAK else (3_000, 300, 3, 8)
HOT, COLD = (150_000, 4_000) if SOAK else (10_000, 200)


def test_chaos_keeps_every_key_in_order_and_loses_and_doubles_nothing(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """1 -> many -> 1 workers; kill -9 and SIGSTOP at random; connections cut; Redis restarted."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    expectations = KeyedExpectations(fresh_client, tmp_path)
    harm = {"kill": 0, "stop": 0, "cut": 0, "restart": 0}
    with ExitStack() as stack, watched(expectations) as watch:
        proxy = stack.enter_context(Proxy(millstream_fresh_server.port))

        def one_more() -> RunningWorkers:
            return stack.enter_context(RunningWorkers(proxy.url, tmp_path, processes=1, app="keyed", claim_s=1))

        all_workers = [one_more().ready()]
        stopped: list[psutil.Process] = []
        for number in range(ROUNDS):
            expectations.publish_keys(MESSAGES // ROUNDS, KEYS, ms=chance.choice((0, 0, 1)))
            if number < ROUNDS // 2 and len(all_workers) < MOST:
                all_workers.append(one_more())
            elif number > 3 * ROUNDS // 4 and len(all_workers) > 1:
                all_workers.pop().stop()
            resume_all(stopped)
            deed = chance.choice(list(harm)) if number % 4 != 3 else "restart"
            harm[deed] += 1
            if deed == "restart":
                millstream_fresh_server.kill()
                millstream_fresh_server.start()
                fresh_client.retry_while_unavailable(lambda: fresh_client.execute("PING"), what="test")
            elif deed == "cut":
                proxy.cut_all()
            elif victim := random_process(chance, all_workers):
                if deed == "kill":
                    kill(victim)
                else:
                    suspend(victim, stopped)
            time.sleep(chance.uniform(0.2, 1.5))  # leases of a second may expire meanwhile
        resume_all(stopped)
        report = expectations.check_keys(overlap=False, log=all_workers[0].log)
    print_figures(report, watch, seed=seed, **harm)


def test_keys_of_a_killed_worker_go_on_elsewhere_once_their_leases_have_ended(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """`benchmarks recovery` measures how soon."""
    expectations = KeyedExpectations(fresh_client, tmp_path)
    # The name is not acquired again, as its supervisor dies as well: only the expiry of the lease helps.
    with RunningWorkers(
        fresh_client.url, tmp_path, "--name", "heir", processes=1, app="keyed", claim_s=LONG_CLAIM_S
    ) as heir:
        heir.ready()
        for number in range(6 if SOAK else 1):
            name = f"dying{number}"
            with RunningWorkers(
                fresh_client.url, tmp_path, "--name", name, processes=1, app="keyed", claim_s=LONG_CLAIM_S
            ) as dying:
                dying.ready()
                expectations.publish_keys(1_500, 40, ms=5)
                # It commits nothing more, until it is killed. Its leases last for seconds yet: a kill may take long.
                _, done, until_ms = asleep_with_leases(dying, expectations)
                dying.kill_all()
                killed_ms = server_time_ms(fresh_client)
                eventually(expectations.drained, "the drain", log=heir.log)
                again_ms = first_commits_ms(expectations, done)
        report = expectations.check_keys(log=heir.log)
    assert until_ms
    assert again_ms.keys() >= until_ms.keys(), "each key that it held goes on"
    early_ms = {queue: until_ms[queue] - again_ms[queue] for queue in until_ms if again_ms[queue] < until_ms[queue]}
    assert early_ms == {}, "and not before its lease has expired"
    waited_ms = max(again_ms[queue] for queue in until_ms) - killed_ms
    print_figures(report, queues=len(until_ms), waited_ms=round(waited_ms), lease_s=LONG_CLAIM_S)


def leases_of(expectations: KeyedExpectations, worker: bytes) -> dict[bytes, int]:
    """Return the keys that workers of this name have leased, and when their leases expire, by the server's clock."""
    commands = [("HGETALL", expectations.keys.owners), ("ZRANGE", expectations.keys.leases, 0, -1, "WITHSCORES")]
    owners, ends = map(raise_if_error, expectations.client.pipeline(commands))
    until_ms = dict(zip(ends[::2], map(int, ends[1::2]), strict=True))
    return {queue: until_ms[queue] for queue, token in zip(owners[::2], owners[1::2], strict=True) if worker in token}


def first_commits_ms(expectations: KeyedExpectations, done: int) -> dict[bytes, int]:
    """Return when each key had its first commit after the first `done` effects, by the server's clock."""
    times: dict[bytes, int] = {}
    for stamp, pairs in expectations.client.execute("XRANGE", "out", "-", "+")[done:]:
        times.setdefault(b"k" + pairs[pairs.index(b"key") + 1], stamp_ms(stamp))
    return times


def test_late_commits_of_a_worker_that_slept_past_its_lease_are_refused(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path)
    refused = 0
    with RunningWorkers(fresh_client.url, tmp_path, app="keyed", claim_s=CLAIM_S) as workers:
        workers.ready()
        for _ in range(10 if SOAK else 1):
            expectations.publish_keys(1_000, 50, ms=5)
            victim, *_ = asleep_with_leases(workers, expectations)
            eventually(expectations.drained, "the other's drain, after the leases", log=workers.log)
            victim.resume()
            refused = workers.eventually_refused(beyond=refused)
            report = expectations.check_keys(overlap=False, log=workers.log)
    print_figures(report, refused=refused)


def asleep_with_leases(
    workers: RunningWorkers, expectations: KeyedExpectations
) -> tuple[psutil.Process, int, dict[bytes, int]]:
    """Pause a worker that has leases, and still has them then; return it, the number of effects, and its leases."""
    victim = workers.at_work(expectations)
    port = int(expectations.client.url.rpartition(":")[2].partition("/")[0])

    def asleep() -> tuple[int, dict[bytes, int]] | None:
        if expectations.drained():
            expectations.publish_keys(1_000, 50, ms=5)
        stop_and_await_silence(victim, port)
        expectations.drained()  # a round trip: Redis has executed the worker's earlier commands by now
        done = expectations.effect_count()
        if leases := leases_of(expectations, owner_of(victim)):
            return done, leases
        victim.resume()
        return None

    found = eventually(asleep, "a worker stopped with leases", log=workers.log)
    assert found is not None
    return victim, *found


def owner_of(worker: psutil.Process) -> bytes:
    """Return the name of a worker in the group, from its command line."""
    return b" " + worker.cmdline()[-1].encode()


def test_a_message_that_kills_its_worker_dies_and_its_key_and_all_others_go_on(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path, app="brittle")
    with RunningWorkers(fresh_client.url, tmp_path, app="brittle") as workers, watched(expectations) as watch:
        workers.ready()
        expectations.publish_keys(300, 20, ms=1)
        dead = [expectations.publish_key(f"k{number}", 1, do="exit-1")[0] for number in ((1, 2) if SOAK else (1,))]
        expectations.publish_keys(300, 20, ms=1)
        report = expectations.check_keys(dead=dict.fromkeys(dead, "crashed"), log=workers.log)
    print_figures(report, watch, crashes=workers.log().count("restarting in"))


def test_a_worker_that_joins_gets_its_share_of_new_keys_while_the_first_continues(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """`benchmarks recovery` measures how soon."""
    expectations = KeyedExpectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, processes=1, app="keyed") as first, watched(expectations) as watch:
        first.ready()
        expectations.publish_keys(1_000, 100, ms=5)
        with RunningWorkers(fresh_client.url, tmp_path, processes=1, app="keyed") as second:
            second.ready()
            joined = str(*(child.pid for child in second.children()))

            def both_work() -> bool:
                if expectations.drained():
                    expectations.publish_keys(1_000, 100, ms=5)
                by = [row["pid"] for row in expectations.outputs()]
                return joined in by and by[-1] != joined

            eventually(both_work, "work of the second, and then of the first", log=second.log)
            report = expectations.check_keys(log=first.log)
    print_figures(report, watch)


def stamp_ms(entry: bytes) -> int:
    """Return when an entry was added, by the server's clock."""
    return int(entry.partition(b"-")[0])


def test_a_hot_key_that_stands_still_delays_no_other_and_costs_no_more_than_its_queue(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, app="keyed") as workers:
        workers.ready()
        alone = latencies_ms(expectations, COLD)
        expectations.publish_key("hot", 1, do="wait")
        before = used_memory(fresh_client)
        for at in range(0, HOT, 500):
            fresh_client.pipeline([("XADD", "without a group", "*", "n", at + n, "key", "hot") for n in range(500)])
        in_stream = used_memory(fresh_client) - before
        expectations.publish_key("hot", HOT)
        eventually(expectations.all_read, "the hot key in line", log=workers.log)
        bytes_each = (used_memory(fresh_client) - before - 2 * in_stream) / HOT
        beside = latencies_ms(expectations, COLD)
        still_waiting = expectations.pending()
        expectations.open_gate()
        report = expectations.check_keys(log=workers.log)
    p99 = [statistics.quantiles(times, n=100)[98] for times in (alone, beside)]
    print_figures(
        report,
        p99_alone_ms=round(p99[0], 1),
        p99_beside_ms=round(p99[1], 1),
        bytes_each=round(bytes_each),
        still_waiting=still_waiting,
    )
    assert still_waiting > HOT, "all others were processed while it was paused"
    assert bytes_each < 130 + more_for_pending(fresh_client)


def latencies_ms(expectations: KeyedExpectations, count: int) -> list[float]:
    """Return the ms from each message's entry to its effect, by the server's clock, at 200 a second over 50 keys."""
    ids: list[str] = []
    for _ in range(0, count, 20):
        ids += expectations.publish_keys(20, 50)
        time.sleep(0.1)
    wanted = set(ids)
    found: dict[str, float] = {}

    def all_done() -> bool:
        found.clear()
        for one, pairs in expectations.client.execute("XREVRANGE", "out", "+", "-", "COUNT", 200_000):
            source = pairs[1].decode()
            if source in wanted:
                found[source] = stamp_ms(one) - stamp_ms(source.encode())
        return len(found) == len(wanted)

    eventually(all_done, "the cold keys' effects")
    return list(found.values())


def used_memory(client: Client) -> int:
    """Return the memory that Redis reports as used, in bytes."""
    info = client.execute("INFO", "memory").decode()
    return int(next(queue for queue in info.splitlines() if queue.startswith("used_memory:")).partition(":")[2])
