"""Worker processes that are killed, paused, crashed, hung and stopped, under load: every message has one effect."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millstream.delivery.reliable_stream import NACK_IDLE_MS
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.worker_processes import CLAIM_S, Expectations, PrintFigures, RunningWorkers, watched

pytestmark = [pytest.mark.worker, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS = 200 if SOAK else 8
STOPS = 20 if SOAK else 1
SIGTERMS = 20 if SOAK else 1


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def test_workers_that_are_killed_again_and_again_cost_nothing_but_time(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    books = Expectations(fresh_client, tmp_path)
    supervisors = 0
    with (
        RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", claim_s=CLAIM_S) as workers,
        watched(books) as watch,
    ):
        for number in range(KILLS):
            books.publish(200, ms=chance.choice((0, 1, 5)))
            time.sleep(chance.random() / 2)  # a kill at any point
            if number % 4 == 3:
                supervisors += 1
                workers.supervisor.kill()
                workers.supervisor.wait()
                workers.start()
            kill(workers.victim(books))
        report = books.check(log=workers.log)
    tell(report, watch, kills=KILLS, supervisors=supervisors, seed=seed)


def test_a_worker_that_was_stopped_past_its_claim_is_refused_what_it_commits_late(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    books = Expectations(fresh_client, tmp_path)
    refused = 0
    with RunningWorkers(fresh_client.url, tmp_path, claim_s=CLAIM_S) as workers, watched(books) as watch:
        workers.ready()
        for _ in range(STOPS):
            victim = stopped_at_work(workers, books, count=2_000, ms=2)
            eventually(books.drained, "the other's drain", log=workers.log)
            victim.resume()
            refused = workers.eventually_refused(beyond=refused)
        report = books.check(log=workers.log)
    tell(report, watch, stops=STOPS, refused=refused)


def stopped_at_work(workers: RunningWorkers, books: Expectations, *, count: int, ms: int) -> psutil.Process:
    """Publish until one of two workers can be paused while both have entries in flight."""
    books.publish(count, ms=ms)
    victim = workers.victim(books)

    def is_stopped() -> bool:
        if books.drained():
            books.publish(count, ms=ms)
        if held_by(books) < 2:
            return False
        victim.suspend()
        books.drained()  # a round trip: Redis has executed the victim's earlier commands by now
        if held_by(books) < 2:
            victim.resume()
            return False
        return True

    eventually(is_stopped, "a worker stopped with work in hand", log=workers.log)
    return victim


@pytest.mark.parametrize("app", ["strict", "coroutine"])
def test_messages_that_crash_their_process_end_as_dead_letters_and_their_neighbours_live(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures, app: str
) -> None:
    books = Expectations(fresh_client, tmp_path, app=app)
    deeds = ("exit-1", "segfault", "exit-0", *(("exit-3",) if SOAK else ())) if app == "strict" else ("exit-2",)
    with RunningWorkers(fresh_client.url, tmp_path, app=app) as workers, watched(books) as watch:
        dead = []
        for deed in deeds:
            books.publish(100, ms=1)
            dead += books.publish(1, do=deed)
        books.publish(100, ms=1)
        report = books.check(dead=dict.fromkeys(dead, "crashed"), log=workers.log)
        assert workers.supervisor.poll() is None
    assert {letter.attempts for letter in books.dead_letters()} <= {3, 4}
    tell(report, watch, crashes=workers.log().count("restarting in"))


def test_a_handler_that_hangs_is_ended_with_its_process_and_its_message_dies_after_its_attempts(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    books = Expectations(fresh_client, tmp_path, app="limited")
    with RunningWorkers(fresh_client.url, tmp_path, app="limited") as workers, watched(books) as watch:
        books.publish(100, ms=1)
        (hanging,) = books.publish(1, do="hang")
        books.publish(300, ms=1)
        report = books.check(dead={hanging: "failed"}, log=workers.log)
        eventually(lambda: ends_of(hanging, workers.log()) == 3, "three ends", log=workers.log)
        assert workers.supervisor.poll() is None
    (letter,) = books.dead_letters()
    assert letter.attempts == 3
    assert [event.id for event in books.runs() if event.kind == "started"].count(hanging) == 3
    tell(report, watch)


def ends_of(message: str, log: str) -> int:
    """Return how often a process was ended because of this message."""
    return sum(f"message {message} " in line and "; ending the process" in line for line in log.splitlines())


def test_entries_that_are_trimmed_while_pending_are_named_and_nobody_is_stuck(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    books = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, claim_s=CLAIM_S) as workers:
        workers.ready()
        victim = stopped_at_work(workers, books, count=400, ms=20)
        fresh_client.execute("XTRIM", "in", "MAXLEN", 0)
        books.publish(50)
        eventually(books.drained, "the drain", log=workers.log)
        victim.resume()
        workers.eventually_refused()
        done = {row["id"] for row in books.outputs()}
        gone = [one for one in books.enqueued if one not in done]
        report = books.check(gone=gone, log=workers.log)
        named = workers.log()
    assert gone
    assert "trimmed or deleted before they were processed" in named
    tell(report, trimmed=len(gone))


def held_by(books: Expectations) -> int:
    """Return how many workers hold entries."""
    return len(books.client.execute("XPENDING", "in", books.keys.group)[3] or ())


def test_sigterm_hands_unstarted_work_to_others_while_it_is_busy_and_counts_no_attempt(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    books = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, "--threads", "1", processes=1) as heir:
        heir.victim(books)
        for _ in range(SIGTERMS):
            with RunningWorkers(
                fresh_client.url, tmp_path, "--threads", "1", "--stop-timeout", "3600", processes=1
            ) as leaving:
                leave(books, heir, leaving)
        report = books.check(log=heir.log)
    assert {row["attempt"] for row in books.outputs()} == {"1"}
    tell(report, sigterms=SIGTERMS)


def leave(books: Expectations, heir: RunningWorkers, leaving: RunningWorkers) -> None:
    """Stop `leaving` in the middle of a message: `heir` gets the entries not started, though no claim expires."""
    idle = heir.victim(books)
    idle.suspend()
    books.publish(2_000)  # so many that it prefetches hundreds; the first may go to the paused worker
    eventually(lambda: leaving.figures()["committed"] > 1_500, "the second fleet's start", log=leaving.log)
    (busy,) = books.publish(1, do="wait")
    books.publish(200, ms=1)
    eventually(lambda: busy in started(books), "the busy handler", log=leaving.log)
    eventually(lambda: len(held_with(books, busy)) >= 2, "work in hand", log=leaving.log)
    left = held_with(books, busy) - started(books)
    assert left
    leaving.supervisor.terminate()
    idle.resume()
    eventually(lambda: left <= started(books), "the heir's work", log=heir.log)
    assert leaving.supervisor.poll() is None, "it waits for the running message"
    with books.gate_open():
        assert leaving.supervisor.wait(FAIL_SAFE_S) == 0


def held_with(books: Expectations, one: str) -> set[str]:
    """Return the messages held by the worker that holds this one."""
    found = books.client.execute("XPENDING", "in", books.keys.group, "-", "+", 1_000)
    holders = {entry_id.decode(): consumer for entry_id, consumer, *_ in found}
    return {entry_id for entry_id, consumer in holders.items() if consumer == holders.get(one)}


def started(books: Expectations) -> set[str]:
    """Return the messages that a handler has started."""
    return {event.id for event in books.runs() if event.kind == "started"}


def test_a_second_sigterm_ends_at_once_and_what_ran_others_do_again(
    fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    books = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, "--threads", "1", "--stop-timeout", "3600", processes=1) as workers:
        workers.victim(books)
        eventually(books.drained, "the first drain", log=workers.log)
        books.publish(2, do="wait")
        eventually(lambda: books.pending() == 2, "both in hand", log=workers.log)
        workers.supervisor.terminate()
        eventually(lambda: released(books) == 1, "the first signal to be obeyed", log=workers.log)
        assert workers.supervisor.poll() is None, "it waits for the running message"
        assert workers.stop() == 0  # it would wait for an hour
        books.open_gate()
        workers.start()
        report = books.check(log=workers.log)
    tell(report)


def released(books: Expectations) -> int:
    """Return how many messages a worker has released: they count as idle for longer than the test has run."""
    return len(books.client.execute("XPENDING", "in", books.keys.group, "IDLE", NACK_IDLE_MS, "-", "+", 100))


def test_sigterm_while_redis_is_away_ends_without_it(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, tell: PrintFigures
) -> None:
    books = Expectations(fresh_client, tmp_path)
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "1", claim_s=CLAIM_S) as workers:
        workers.ready()
        books.publish(2_000, ms=2)
        workers.victim(books)
        millstream_fresh_server.kill()
        eventually(lambda: "is waiting for Redis" in workers.log(), "a word about Redis", log=workers.log)
        assert workers.stop() == 0
        millstream_fresh_server.start()
        workers.start()
        report = books.check(log=workers.log)
    tell(report)
