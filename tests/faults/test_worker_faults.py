"""Worker processes that are killed, paused, crashed, hung and stopped, under load: every message has one effect."""

import os
import random
import time
from pathlib import Path

import psutil
import pytest

from millstream.delivery.reliable_stream import NACK_IDLE_MS
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.stopped_processes import stop_and_await_silence
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.worker_processes import (
    CLAIM_S,
    Expectations,
    PrintFigures,
    RunningWorkers,
    kill_random,
    random_process,
    watched,
)

pytestmark = [pytest.mark.worker, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS = 200 if SOAK else 4
STOPS = 20 if SOAK else 1
SIGTERMS = 20 if SOAK else 1


def test_workers_that_are_killed_repeatedly_lose_and_double_no_message(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = Expectations(fresh_client, tmp_path)
    killed = supervisors = 0
    with (
        RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", claim_s=CLAIM_S) as workers,
        watched(expectations) as watch,
    ):
        while killed < KILLS:
            if killed % 4 == 3:
                supervisors += 1
                time.sleep(chance.random() / 2)
                workers.replace_supervisor()
            workers.at_work(expectations)
            expectations.publish(200, ms=chance.choice((1, 5, 20)))
            time.sleep(chance.random() / 10)  # a kill at any point of the work
            killed += kill_random(chance, [workers])
        report = expectations.check(log=workers.log)
    print_figures(report, watch, kills=killed, supervisors=supervisors, seed=seed)


def test_each_live_process_may_be_the_one_that_is_killed_whether_it_has_run_messages_or_not(
    fresh_client: Client, tmp_path: Path
) -> None:
    with RunningWorkers(fresh_client.url, tmp_path, processes=3) as workers:
        children = eventually(lambda: found if len(found := workers.children()) == 3 else [], "the processes")
        assert {random_process(random.Random(seed), [workers]) for seed in range(50)} == {*children}
        assert list(tmp_path.glob("events.*")) == [], "none has run any"


def test_late_commits_of_a_worker_that_was_stopped_past_its_claim_are_refused(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    refused = 0
    with RunningWorkers(fresh_client.url, tmp_path, claim_s=CLAIM_S) as workers, watched(expectations) as watch:
        workers.ready()
        for _ in range(STOPS):
            victim = stopped_at_work(workers, expectations, count=1_000, ms=2)
            eventually(expectations.drained, "the other's drain", log=workers.log)
            victim.resume()
            refused = workers.eventually_refused(beyond=refused)
        report = expectations.check(log=workers.log)
    print_figures(report, watch, stops=STOPS, refused=refused)


def stopped_at_work(workers: RunningWorkers, expectations: Expectations, *, count: int, ms: int) -> psutil.Process:
    """Publish until one of two workers can be paused while both have entries in flight."""
    expectations.publish(count, ms=ms)
    victim = workers.at_work(expectations)
    port = int(expectations.client.url.rpartition(":")[2].partition("/")[0])

    def is_stopped() -> bool:
        if expectations.drained():
            expectations.publish(count, ms=ms)
        if held_by(expectations) < 2:
            return False
        stop_and_await_silence(victim, port)
        expectations.drained()  # a round trip: Redis has executed the victim's earlier commands by now
        if held_by(expectations) < 2:
            victim.resume()
            return False
        return True

    eventually(is_stopped, "a worker stopped with work in hand", log=workers.log)
    return victim


@pytest.mark.parametrize("app", ["strict", "coroutine"])
def test_messages_that_crash_their_process_become_dead_letters_and_their_neighbours_live(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures, app: str
) -> None:
    expectations = Expectations(fresh_client, tmp_path, app=app)
    deeds = ("segfault", "exit-0", *(("exit-1", "exit-3") if SOAK else ())) if app == "strict" else ("exit-2",)
    with RunningWorkers(fresh_client.url, tmp_path, app=app) as workers, watched(expectations) as watch:
        dead = []
        for deed in deeds:
            expectations.publish(100, ms=1)
            dead += expectations.publish(1, do=deed)
        expectations.publish(100, ms=1)
        report = expectations.check(dead=dict.fromkeys(dead, "crashed"), log=workers.log)
        assert workers.supervisor.poll() is None
    assert {letter.attempts for letter in expectations.dead_letters()} <= {3, 4}
    print_figures(report, watch, crashes=workers.log().count("restarting in"))


def test_a_handler_that_hangs_is_ended_with_its_process_and_its_message_dies_after_its_attempts(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path, app="limited")
    with RunningWorkers(fresh_client.url, tmp_path, app="limited") as workers, watched(expectations) as watch:
        expectations.publish(100, ms=1)
        (hanging,) = expectations.publish(1, do="hang")
        expectations.publish(300, ms=1)
        report = expectations.check(dead={hanging: "failed"}, log=workers.log)
        eventually(lambda: ends_of(hanging, workers.log()) == 3, "three ends", log=workers.log)
        assert workers.supervisor.poll() is None
    (letter,) = expectations.dead_letters()
    assert letter.attempts == 3
    assert [event.id for event in expectations.runs() if event.kind == "started"].count(hanging) == 3
    print_figures(report, watch)


def ends_of(message: str, log: str) -> int:
    """Return how often a process was ended because of this message."""
    return sum(f"message {message} " in line and "; ending the process" in line for line in log.splitlines())


def test_entries_trimmed_while_pending_are_logged_and_no_worker_is_stuck(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, claim_s=CLAIM_S) as workers:
        workers.ready()
        victim = stopped_at_work(workers, expectations, count=400, ms=20)
        fresh_client.execute("XTRIM", "in", "MAXLEN", 0)
        expectations.publish(50)
        eventually(expectations.drained, "the drain", log=workers.log)
        victim.resume()
        workers.eventually_refused()
        done = {row["id"] for row in expectations.outputs()}
        gone = [one for one in expectations.enqueued if one not in done]
        report = expectations.check(gone=gone, log=workers.log)
        words = "trimmed or deleted before they were processed"
        eventually(lambda: words in workers.log(), "a word about them", log=workers.log)
    assert gone
    print_figures(report, trimmed=len(gone))


def held_by(expectations: Expectations) -> int:
    """Return how many workers hold entries."""
    return len(expectations.client.execute("XPENDING", "in", expectations.keys.group)[3] or ())


def test_a_busy_worker_releases_unstarted_work_on_sigterm_and_counts_no_attempt(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, "--threads", "1", processes=1) as heir:
        heir.at_work(expectations)
        for _ in range(SIGTERMS):
            with RunningWorkers(
                fresh_client.url, tmp_path, "--threads", "1", "--stop-timeout", "3600", processes=1
            ) as leaving:
                leave(expectations, heir, leaving)
        report = expectations.check(log=heir.log)
    assert {row["attempt"] for row in expectations.outputs()} == {"1"}
    print_figures(report, sigterms=SIGTERMS)


def leave(expectations: Expectations, heir: RunningWorkers, leaving: RunningWorkers) -> None:
    """Stop `leaving` in the middle of a message: `heir` gets the entries not started, though no claim expires."""
    idle = heir.at_work(expectations)
    idle.suspend()
    expectations.publish(2_000)  # so many that it prefetches hundreds; the first may go to the paused worker
    eventually(lambda: leaving.figures()["committed"] > 1_500, "the second fleet's start", log=leaving.log)
    (busy,) = expectations.publish(1, do="wait")
    expectations.publish(200, ms=1)
    eventually(lambda: busy in started(expectations), "the busy handler", log=leaving.log)
    left = eventually(
        lambda: held_with(expectations, busy) - started(expectations),
        "work in hand that has not begun",
        log=leaving.log,
    )
    leaving.supervisor.terminate()
    idle.resume()
    eventually(lambda: left <= started(expectations), "the heir's work", log=heir.log)
    assert leaving.supervisor.poll() is None, "it waits for the running message"
    with expectations.gate_open():
        assert leaving.supervisor.wait(FAIL_SAFE_S) == 0


def held_with(expectations: Expectations, one: str) -> set[str]:
    """Return the messages held by the worker that holds this one."""
    found = expectations.client.execute("XPENDING", "in", expectations.keys.group, "-", "+", 1_000)
    holders = {entry_id.decode(): consumer for entry_id, consumer, *_ in found}
    return {entry_id for entry_id, consumer in holders.items() if consumer == holders.get(one)}


def started(expectations: Expectations) -> set[str]:
    """Return the messages that a handler has started."""
    return {event.id for event in expectations.runs() if event.kind == "started"}


def test_a_second_sigterm_ends_a_worker_at_once_and_other_workers_repeat_its_runs(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, "--threads", "1", "--stop-timeout", "3600", processes=1) as workers:
        workers.at_work(expectations)
        eventually(expectations.drained, "the first drain", log=workers.log)
        both = {*expectations.publish(2, do="wait")}
        eventually(lambda: expectations.pending() == 2, "both in hand", log=workers.log)
        eventually(lambda: both & started(expectations), "the run of one", log=workers.log)
        workers.supervisor.terminate()
        eventually(lambda: released(expectations) == 1, "the first signal to be obeyed", log=workers.log)
        assert workers.supervisor.poll() is None, "it waits for the running message"
        assert workers.stop() == 0  # it would wait for an hour
        expectations.open_gate()
        workers.start()
        report = expectations.check(log=workers.log)
    print_figures(report)


def released(expectations: Expectations) -> int:
    """Return how many messages a worker has released: they count as idle for longer than the test has run."""
    return len(
        expectations.client.execute("XPENDING", "in", expectations.keys.group, "IDLE", NACK_IDLE_MS, "-", "+", 100)
    )


def test_a_worker_ends_on_sigterm_while_redis_is_away(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "1", claim_s=CLAIM_S) as workers:
        workers.ready()
        expectations.publish(1_000, ms=2)
        workers.at_work(expectations)
        millstream_fresh_server.kill()
        eventually(lambda: "Redis is unavailable: " in workers.log(), "a word about Redis", log=workers.log)
        assert workers.stop() == 0
        millstream_fresh_server.start()
        workers.start()
        report = expectations.check(log=workers.log)
    print_figures(report)
