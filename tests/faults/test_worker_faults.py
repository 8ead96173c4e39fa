"""Worker processes that are killed, stopped, crashed, stuck and ended, under load: every message has one effect."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millstream.client import Client
from millstream.server import EmbeddedServer
from tests.support.waiting import eventually
from tests.support.worker_processes import Books, Fleet, Tell, watched

pytestmark = [pytest.mark.worker, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS = 200 if SOAK else 15
STOPS = 20 if SOAK else 2
SIGTERMS = 20 if SOAK else 2
ALONE = ("--claim-s", "600", "--threads", "1")


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.mark.timeout(3600 if SOAK else 120)
def test_workers_that_are_killed_again_and_again_cost_nothing_but_time(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    books = Books(client, tmp_path)
    supervisors = 0
    with Fleet(client.url, tmp_path, "--stop-s", "2") as fleet, watched(books) as watch:
        for number in range(KILLS):
            books.publish(200, ms=chance.choice((0, 1, 5)))
            time.sleep(chance.random() / 2)
            if number % 6 == 5:
                supervisors += 1
                fleet.supervisor.kill()
                fleet.supervisor.wait()
                fleet.start()
            kill(fleet.victim())
        report = books.check(log=fleet.log)
    tell(report, watch, kills=KILLS, supervisors=supervisors, seed=seed)


def test_a_worker_that_was_stopped_past_its_claim_is_refused_what_it_commits_late(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = Books(client, tmp_path)
    with Fleet(client.url, tmp_path) as fleet, watched(books) as watch:
        fleet.ready()
        for _ in range(STOPS):
            victim = stopped_at_work(fleet, books, count=2_000, ms=2)
            eventually(books.drained, "the other's drain", log=fleet.log)
            victim.resume()
            time.sleep(1.5)
        refused = eventually_refused(fleet)
        report = books.check(log=fleet.log)
    assert refused >= STOPS
    tell(report, watch, stops=STOPS, refused=refused)


def stopped_at_work(fleet: Fleet, books: Books, *, count: int, ms: int) -> psutil.Process:
    """Publish, more if it was too little, until one of two workers can be stopped while both have something in hand."""
    books.publish(count, ms=ms)
    victim = fleet.victim()

    def is_stopped() -> bool:
        if books.drained():
            books.publish(count, ms=ms)
        if held_by(books) < 2:
            return False
        victim.suspend()
        if held_by(books) < 2:
            victim.resume()
            return False
        return True

    eventually(is_stopped, "a worker stopped with work in hand", log=fleet.log)
    return victim


def eventually_refused(fleet: Fleet) -> int:
    eventually(lambda: fleet.figures()["refused"] > 0, "a word about late commits", log=fleet.log)
    return fleet.figures()["refused"]


@pytest.mark.parametrize("app", ["strict", "coroutine"])
def test_messages_that_crash_their_process_end_as_dead_letters_and_their_neighbours_live(
    client: Client, tmp_path: Path, tell: Tell, app: str
) -> None:
    books = Books(client, tmp_path, app=app)
    deeds = ("exit-1", "segfault", "exit-0", "exit-3") if app == "strict" else ("exit-2",)
    with Fleet(client.url, tmp_path, app=app) as fleet, watched(books) as watch:
        dead = []
        for deed in deeds:
            books.publish(100, ms=1)
            dead += books.publish(1, do=deed)
        books.publish(100, ms=1)
        report = books.check(dead=dict.fromkeys(dead, "crashed"), log=fleet.log)
        assert fleet.supervisor.poll() is None
    assert {letter.attempts for letter in books.letters()} <= {3, 4}
    tell(report, watch, crashes=fleet.log().count("starts again"))


def test_a_handler_that_hangs_is_ended_with_its_process_and_its_message_dies_after_its_attempts(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = Books(client, tmp_path, app="strict")
    with Fleet(client.url, tmp_path, app="strict") as fleet, watched(books) as watch:
        books.publish(100, ms=1)
        (hanging,) = books.publish(1, do="hang")
        books.publish(300, ms=1)
        report = books.check(dead={hanging: "failed"}, log=fleet.log)
        eventually(lambda: fleet.log().count("; its process is ended") == 3, "three ends", log=fleet.log)
        assert fleet.supervisor.poll() is None
    (letter,) = books.letters()
    assert letter.attempts == 3
    assert [event.id for event in books.runs() if event.kind == "started"].count(hanging) == 3
    tell(report, watch)


def test_entries_that_are_trimmed_while_pending_are_named_and_nobody_is_stuck(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = Books(client, tmp_path)
    with Fleet(client.url, tmp_path) as fleet:
        fleet.ready()
        victim = stopped_at_work(fleet, books, count=400, ms=20)
        client.execute("XTRIM", "in", "MAXLEN", 0)
        books.publish(50)
        eventually(books.drained, "the drain", log=fleet.log)
        victim.resume()
        time.sleep(1.5)
        done = {row["id"] for row in books.outputs()}
        gone = [one for one in books.enqueued if one not in done]
        report = books.check(gone=gone, log=fleet.log)
        named = fleet.log()
    assert gone
    assert "trimmed or deleted before they were processed" in named
    tell(report, trimmed=len(gone))


def held_by(books: Books) -> int:
    """How many workers hold entries."""
    return len(books.client.execute("XPENDING", "in", books.keys.group)[3] or ())


@pytest.mark.alone
def test_sigterm_hands_unstarted_work_to_others_within_a_second_and_counts_no_attempt(
    client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = Books(client, tmp_path)
    with Fleet(client.url, tmp_path, *ALONE, processes=1) as heir:
        books.publish(10)
        eventually(books.drained, "the first drain", log=heir.log)
        took_s = []
        for _ in range(SIGTERMS):
            with Fleet(client.url, tmp_path, *ALONE, "--stop-s", "5", processes=1) as leaving:
                took_s.append(leave(books, heir, leaving))
        report = books.check(log=heir.log)
    assert max(took_s) < 1.5
    assert {row["attempt"] for row in books.outputs()} == {"1"}
    tell(report, sigterms=SIGTERMS, handed_on_within_s=round(max(took_s), 2))


def leave(books: Books, heir: Fleet, leaving: Fleet) -> float:
    """End `leaving` while it is busy; how long its unstarted work waited for `heir`."""
    idle = heir.victim()
    idle.suspend()
    books.publish(2_000)  # so much at once that it takes hundreds ahead; the first may go to the one that is suspended
    eventually(lambda: leaving.figures()["committed"] > 1_500, "the second fleet's start", log=leaving.log)
    (busy,) = books.publish(1, ms=2_500)
    books.publish(200, ms=1)
    eventually(lambda: busy in started(books), "the busy handler", log=leaving.log)
    eventually(lambda: len(held_with(books, busy)) >= 2, "work in hand", log=leaving.log)
    left = held_with(books, busy) - started(books)
    leaving.supervisor.terminate()
    idle.resume()
    began = time.monotonic()
    eventually(lambda: left & started(books), "the heir's start", log=heir.log)
    took_s = time.monotonic() - began
    assert left
    assert leaving.supervisor.poll() is None, "it was to be busy"
    assert leaving.supervisor.wait(10) == 0
    return took_s


def held_with(books: Books, one: str) -> set[str]:
    """The messages in the hands of the worker that holds this one."""
    found = books.client.execute("XPENDING", "in", books.keys.group, "-", "+", 1_000)
    holders = {entry_id.decode(): consumer for entry_id, consumer, *_ in found}
    return {entry_id for entry_id, consumer in holders.items() if consumer == holders.get(one)}


def started(books: Books) -> set[str]:
    """The messages that a handler has begun."""
    return {event.id for event in books.runs() if event.kind == "started"}


@pytest.mark.alone
def test_a_second_sigterm_ends_at_once_and_what_ran_others_do_again(client: Client, tmp_path: Path, tell: Tell) -> None:
    books = Books(client, tmp_path)
    with Fleet(client.url, tmp_path, processes=1) as fleet:
        books.publish(1, ms=2_000)
        fleet.victim()
        fleet.supervisor.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert fleet.supervisor.poll() is None
        began = time.monotonic()
        assert fleet.stop() == 0
        took_s = time.monotonic() - began
        assert took_s < 1.0
        fleet.start()
        report = books.check(log=fleet.log)
    tell(report, ended_within_s=round(took_s, 2))


@pytest.mark.alone
def test_sigterm_while_redis_is_away_ends_within_the_deadline(
    millstream_fresh_server: EmbeddedServer, client: Client, tmp_path: Path, tell: Tell
) -> None:
    books = Books(client, tmp_path)
    with Fleet(client.url, tmp_path, "--stop-s", "2") as fleet:
        fleet.ready()
        books.publish(2_000, ms=5)
        fleet.victim()
        millstream_fresh_server.kill()
        time.sleep(0.5)
        began = time.monotonic()
        assert fleet.stop() == 0
        took_s = time.monotonic() - began
        millstream_fresh_server.start()
        fleet.start()
        report = books.check(log=fleet.log)
    assert took_s < 4.0
    tell(report, ended_within_s=round(took_s, 2))
