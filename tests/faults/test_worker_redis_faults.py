"""Redis dies, loses data, fills up, fails over and drops connections of workers: they recover by themselves."""

import itertools
import os
import random
import time
from pathlib import Path

import psutil
import pytest

from millstream.delivery.reliable_stream import READ_ENTRIES
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.scripts import Script
from millstream.testing.proxy import Proxy, Side
from tests.support.replicas import kill_primary, steady_trio
from tests.support.waiting import eventually, slowness
from tests.support.worker_processes import (
    CLAIM_S,
    Expectations,
    PrintFigures,
    RunningWorkers,
    kill_random,
    watched,
)

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
pytestmark = [pytest.mark.worker, pytest.mark.faults]

REDIS_KILLS = 20 if SOAK else 1
CUTS = 50 if SOAK else 1
KEYS = HandlerKeys("steady", "work", "in")
AWAY_S = 3.0
COMMANDS = ("XREADGROUP", "XPENDING", "XCLAIM", "HMGET", "HSCAN", "HSET")
SCRIPT_NAMES = (
    "commit/commit",
    "commit/set_idle_time",
    "commit/checkpoint",
    "commit/join_workers",
    "producer/move_due",
)
SCRIPTS = {**dict.fromkeys(SCRIPT_NAMES, CUTS), "shared/hold_name": 2}


def test_a_killed_redis_costs_no_message_and_its_absence_costs_neither_processor_nor_log(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    used, line_rates = [], []
    with RunningWorkers(fresh_client.url, tmp_path) as workers:
        workers.ready()
        for _ in range(REDIS_KILLS):
            expectations.publish(1_000, ms=5)
            eventually(expectations.in_flight, "work in hand", log=workers.log)
            millstream_fresh_server.kill()
            began = time.monotonic()  # before the lines are counted: they are those of no longer a time
            before = workers.log().count("\n")
            used.append(share_of_a_core(workers))
            line_rates.append((workers.log().count("\n") - before) / (time.monotonic() - began))
            millstream_fresh_server.start()
            expectations.check(log=workers.log)
        report = expectations.check(log=workers.log)
        assert workers.supervisor.poll() is None
    print_figures(report, kills=REDIS_KILLS, cores=round(max(used), 3), log_lines_per_s=max(line_rates), away_s=AWAY_S)
    assert max(used) < 0.25 * slowness()  # a slower processor is busy longer with the same work
    assert max(line_rates) <= 12 / AWAY_S


def share_of_a_core(workers: RunningWorkers) -> float:
    """Return the fleet's share of the processor over some seconds: other programs can only lower it."""
    began, used = time.monotonic(), busy_s(workers)
    time.sleep(AWAY_S)
    return (busy_s(workers) - used) / (time.monotonic() - began)


def busy_s(workers: RunningWorkers) -> float:
    """Return the processor time that the fleet has used so far."""
    processes = [psutil.Process(workers.supervisor.pid), *workers.children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.mark.parametrize("side", ["before", "after"])
def test_connections_cut_on_either_side_of_every_kind_of_command_lose_and_double_nothing(
    millstream_fresh_server: EmbeddedServer,
    fresh_client: Client,
    tmp_path: Path,
    print_figures: PrintFigures,
    side: Side,
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = Expectations(fresh_client, tmp_path)
    with (
        Proxy(millstream_fresh_server.port) as proxy,
        RunningWorkers(proxy.url, tmp_path, claim_s=1) as workers,
        watched(expectations) as watch,
    ):
        workers.ready()
        cut = proxy.cut_before if side == "before" else proxy.cut_after
        for script in (*map(Script, SCRIPTS), READ_ENTRIES):
            fresh_client.execute("SCRIPT", "LOAD", script.text)  # so that it is called by its hash
        for name in COMMANDS:
            cut(name, times=CUTS)
        for name, times in SCRIPTS.items():
            cut("EVALSHA", containing=Script(name).sha, times=times)
        cut("EVALSHA", containing=READ_ENTRIES.sha, times=CUTS)
        goals = {**dict.fromkeys(COMMANDS, CUTS), "EVALSHA": sum(SCRIPTS.values()) + CUTS}
        rounds = itertools.count(1)

        def all_are_cut() -> bool:
            lacking = {name for name, goal in goals.items() if proxy.cuts[side, name] < goal}
            if lacking == {"XREADGROUP"}:  # only workers that have nothing to do send it
                if expectations.drained():
                    expectations.publish(1)
            elif lacking:
                expectations.publish(200, ms=1)
                expectations.publish(5, do="stumble")
                expectations.publish(4, ms=800)  # there is always a claim to renew
                if next(rounds) % 3 == 0:
                    kill_random(chance, [workers])  # there is something to recover and to claim
            time.sleep(0.3)  # the workers run into the cuts one by one
            return not lacking

        eventually(all_are_cut, f"all cuts of {goals}", log=lambda: str(proxy.cuts))
        expectations.publish(200)
        report = expectations.check(log=workers.log)
        assert workers.supervisor.poll() is None
    assert max(int(row["attempt"]) for row in expectations.outputs()) <= 1 + next(rounds)
    print_figures(report, watch, seed=seed, cuts=proxy.cuts.total())


def test_entries_of_a_lost_reply_are_processed_long_before_a_claim_expires(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    with (
        Proxy(millstream_fresh_server.port) as proxy,
        RunningWorkers(proxy.url, tmp_path, claim_s=3_600, processes=1) as workers,
        watched(expectations) as watch,
    ):
        workers.ready()
        worker = workers.at_work(expectations)
        # Enough entries wait that every read returns some: a blocked read that is cut delivers none.
        worker.suspend()
        expectations.publish(600 * CUTS, ms=1)
        proxy.cut_after("EVALSHA", containing=READ_ENTRIES.sha, times=CUTS)
        worker.resume()
        report = expectations.check(log=workers.log)
        assert proxy.cuts["after", "EVALSHA"] == CUTS
        eventually(lambda: workers.figures()["claimed"] > 0, "a word about claimed entries", log=workers.log)
    print_figures(report, watch, cuts=CUTS)


def test_maxmemory_delays_effects_and_counts_no_attempt(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    # One process: another could claim entries of a process without processor time, and rightly run them again.
    with RunningWorkers(fresh_client.url, tmp_path, processes=1, claim_s=CLAIM_S) as workers:
        workers.ready()
        expectations.publish(100, ms=2)
        expectations.publish(900, do="wait")
        eventually(lambda: expectations.effect_count() == 100, "work", log=workers.log)
        fresh_client.execute("CONFIG", "SET", "maxmemory", "1")
        expectations.open_gate()
        eventually(lambda: is_held_up(fresh_client), "a commit that is refused", log=workers.log)
        used = share_of_a_core(workers)  # measured for longer than a claim lasts
        eventually(lambda: "maxmemory" in workers.log(), "a word about it", log=workers.log)
        assert expectations.effect_count() == 100
        fresh_client.execute("CONFIG", "SET", "maxmemory", "0")
        report = expectations.check(log=workers.log)
        refused = workers.figures()["refused"]
    print_figures(report, cores=round(used, 3), away_s=AWAY_S, refused=refused)
    assert {row["attempt"] for row in expectations.outputs()} == {"1"}
    assert report.retries == 0


def is_held_up(client: Client) -> bool:
    """Return whether Redis has refused a command for lack of memory."""
    return b"errorstat_OOM" in client.execute("INFO", "errorstats")


@pytest.mark.parametrize(
    ("start", "harms"),
    [
        (
            "earliest",
            (("SCRIPT", "FLUSH"), ("XGROUP", "DESTROY", "in", KEYS.group), ("DEL", "in"), ("FLUSHALL",)),
        ),
        ("latest", (("FLUSHALL",),)),
    ],
    ids=["one-after-another", "flushall-latest"],
)
def test_entries_that_redis_lost_under_load_are_reported_and_later_ones_are_processed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures, harms: tuple[tuple[str, ...], ...], start: str
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    gone: list[str] = []
    with RunningWorkers(fresh_client.url, tmp_path, "--start", start) as workers, watched(expectations) as watch:
        workers.ready()
        for harm in harms:
            logged, done = len(workers.log()), expectations.effect_count()
            before = expectations.publish(1_000, ms=1)
            eventually(lambda done=done: expectations.effect_count() > done + 200, "work", log=workers.log)  # type: ignore[misc]
            if harm[0] == "FLUSHALL":  # with all effects so far
                before = list(expectations.enqueued)
            fresh_client.execute(*harm)
            expectations.publish(300, ms=1)
            if harm[0] in ("FLUSHALL", "DEL"):
                gone += before
            report = expectations.check(gone=gone, log=workers.log)
            assert workers.supervisor.poll() is None
            eventually(lambda: is_reported(harm, workers.log()[logged:]), f"a word about {harm}", log=workers.log)  # noqa: B023 - at once
            print_figures(report, watch, harm=" ".join(harm), start=start)


def is_reported(harm: tuple[str, ...], log: str) -> bool:
    """Return whether what was logged since says what Redis lost."""
    if harm[0] == "FLUSHALL":
        return "lost the progress" in log
    return harm[0] == "SCRIPT" or "was lost; recreated at" in log


def test_a_failover_by_sentinel_costs_seconds(tmp_path: Path, print_figures: PrintFigures) -> None:
    with steady_trio() as trio, Client(trio.url) as client:
        expectations = Expectations(client, tmp_path)
        with RunningWorkers(trio.url, tmp_path, claim_s=CLAIM_S) as workers, watched(expectations) as watch:
            workers.ready()
            expectations.publish(1_500, ms=5)
            eventually(lambda: client.execute("WAIT", 1, 1_000) == 1, "the replica to have it all")
            eventually(lambda: expectations.effect_count() > 200, "work", log=workers.log)
            kill_primary(trio)
            report = expectations.check(log=workers.log)
            assert workers.supervisor.poll() is None
    print_figures(report, watch)
