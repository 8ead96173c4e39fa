"""Messages that a process may have died of: which are blamed, and what their dead letters say."""

import logging
import threading

import pytest

from millstream import Message, Retry
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import worker_name_key
from millstream.worker.incarnations import ProcessEnd, record_end
from millstream.worker.running import poison_isolation
from tests.support.clocks import LeapClock
from tests.support.command_stats import commands_run
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    QUICK,
    dead,
    deliver_to,
    double,
    entries,
    fill,
    make,
    outputs,
    pending,
    working,
)

pytestmark = [pytest.mark.worker]


DAY_MS = 86_400_000


def nothing(message: Message) -> None:
    """A handler without effects."""


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_a_suspect_whose_run_ends_without_ending_the_process_gets_no_crash_count(client: Client, how: str) -> None:
    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 1)
    deliver_to(client, "dead", times=3)
    running, release = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        running.set()
        if how == "stopped":
            release.wait(FAIL_SAFE_S)
        raise ValueError

    with working(client, make(handle, retry=Retry(attempts=5, delay_ms=60_000, max_delay_ms=60_000))) as loop:
        eventually(running.is_set)
        if how == "failed":
            eventually(lambda: loop.loop_metrics.retried == 1)
        else:
            assert client.execute("HGETALL", KEYS.crashes)[0].endswith(b"a")
            loop.stop(deadline_ms=0)
    release.set()
    (entry,) = entries(client)
    assert client.execute("HGETALL", KEYS.crashes) == ([entry[0] + b"f", b"1"] if how == "failed" else [])


def test_the_suspects_of_one_process_that_ended_are_one_line_of_the_log(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison_isolation, "_LINE_MS", DAY_MS)
    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 20)
    deliver_to(client, "dead", times=3)
    with caplog.at_level(logging.DEBUG), working(client, make(double)):
        eventually(lambda: len(outputs(client)) == 20)
    lines = [one for one in caplog.records if "it runs in isolation" in one.message]
    assert [one.levelname for one in lines] == ["WARNING", *["DEBUG"] * 19]
    assert " more messages may run so next" in lines[0].message
    assert lines[-1].message.endswith("; 18 more messages ran so since the last such line")


ALIVE, TERMINATED, DIED, VANISHED = "alive", "terminated", "died", "vanished"


def suspect_run_before(client: Client, what_became: str, *, deaths: int) -> bytes:
    """Publish a message that the process w9 ran in isolation, and on which so many have crashed; return its id."""
    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 1)
    deliver_to(client, "w9", times=3)
    (entry,) = entries(client)
    client.execute("HSET", KEYS.crashes, entry[0], deaths, entry[0] + b"a", "token-7 w9")
    if what_became == ALIVE:
        client.execute("SET", worker_name_key("app", "w9"), "token")
    elif what_became != VANISHED:
        record_end(client, "app", "token-7", ProcessEnd(died=what_became == DIED, cause="was ended by SIGSEGV"))
    return bytes(entry[0])


@pytest.mark.parametrize("what_became", [ALIVE, TERMINATED])
def test_a_process_that_lives_or_was_asked_to_end_adds_no_crash_count_to_its_isolated_message(
    client: Client, what_became: str
) -> None:
    suspect_run_before(client, what_became, deaths=1)  # with the second crash it is one too many
    with working(client, make(double)):
        eventually(lambda: outputs(client) == [0])
        eventually(lambda: pending(client) == 0)
    assert (dead(client), client.execute("EXISTS", KEYS.crashes)) == ([], 0)


@pytest.mark.parametrize("what_became", [DIED, VANISHED])
def test_a_dead_letter_has_the_crash_count_and_the_cause_of_the_last_death(client: Client, what_became: str) -> None:
    suspect_run_before(client, what_became, deaths=1)
    clock = LeapClock()
    with working(client, make(double), clock=clock):

        def is_given_up() -> bool:
            clock.leap(400)  # a supervisor renews its name sooner than it expires
            return pending(client) == 0

        eventually(is_given_up)
    (letter,) = dead(client)
    cause = "was ended by SIGSEGV" if what_became == DIED else "vanished together with its supervisor"
    assert (letter.reason, letter.attempts) == ("crashed", 3)
    assert letter.error == f"2 processes crashed while they ran this message and nothing else; the last {cause}"
    assert (outputs(client), client.execute("EXISTS", KEYS.crashes)) == ([], 0)


def test_a_process_without_a_supervisor_may_have_been_paused_so_one_death_more_is_needed(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    suspect = suspect_run_before(client, VANISHED, deaths=1)
    client.execute("HSET", KEYS.crashes, suspect + b"a", "0123456789abcdef w9")
    clock = LeapClock()

    def is_run_again() -> bool:
        clock.leap(400)
        return outputs(client) == [0]

    with working(client, make(double), clock=clock):
        eventually(is_run_again)
        eventually(lambda: pending(client) == 0)
    assert "may have crashed its process, which had no supervisor: it died, or was paused for long" in caplog.text
    assert (dead(client), client.execute("EXISTS", KEYS.crashes)) == ([], 0)


def test_the_dead_letter_of_a_message_that_processes_without_supervisors_left_says_what_is_not_known(
    client: Client,
) -> None:
    suspect = suspect_run_before(client, VANISHED, deaths=2)
    client.execute("HSET", KEYS.crashes, suspect + b"a", "0123456789abcdef w9")
    clock = LeapClock()

    def is_given_up() -> bool:
        clock.leap(400)
        return pending(client) == 0

    with working(client, make(double), clock=clock):
        eventually(is_given_up)
    (letter,) = dead(client)
    assert letter.reason == "crashed"
    assert letter.error == (
        "3 processes crashed, or were paused, while they ran this message and nothing else; "
        "the last had no supervisor: it died, or was paused for long"
    )


def gets(client: Client) -> int:
    """Return how many GETs the server has run since the test began."""
    return commands_run(client.execute)["get"]


def test_a_message_that_a_process_has_died_of_backs_off_while_others_run(client: Client) -> None:
    suspect = suspect_run_before(client, DIED, deaths=0)
    clock = LeapClock()
    retry = Retry(attempts=4, delay_ms=DAY_MS, max_delay_ms=DAY_MS, jitter=0.0)
    with working(client, make(double, retry=retry), clock=clock):
        eventually(lambda: client.execute("HGETALL", KEYS.crashes) == [suspect, b"1", suspect + b"a", b""])
        fill(client, 3, first=1)
        eventually(lambda: sorted(outputs(client)) == [1, 2, 3])
        assert pending(client) == 1
        clock.leap(DAY_MS)
        eventually(lambda: pending(client) == 0)
    assert sorted(outputs(client)) == [0, 1, 2, 3]


def test_a_suspect_of_a_batch_handler_that_is_claimed_while_it_waits_for_isolation_is_not_run(client: Client) -> None:
    with working(client, make(nothing)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 1)
    deliver_to(client, "dead", times=3)
    ran: list[str | None] = []
    running, release = threading.Event(), threading.Event()

    def handle(messages: list[Message]) -> None:
        ran.extend(message.text("n") for message in messages)
        running.set()
        release.wait(FAIL_SAFE_S)

    fill(client, 1, first=1)
    clock = LeapClock()
    with working(client, make(handle, batch_wait_ms=0), clock=clock) as loop:
        eventually(running.is_set)
        eventually(lambda: loop.loop_metrics.claimed == 1)
        eventually(lambda: not loop._in_flight.gate.is_set(), "its turn")
        client.execute("XCLAIM", "in", KEYS.group, "thief", 0, entries(client)[0][0])
        clock.leap(QUICK.claim_ms / 2)  # it renews its claims
        eventually(lambda: loop.loop_metrics.refused == 1)  # it has noticed
        release.set()
        eventually(lambda: loop.loop_metrics.committed == 1)
        fill(client, 1, first=2)
        eventually(lambda: loop.loop_metrics.committed == 2)
    assert ran == ["1", "2"]


# Stopping


def test_a_supervisor_may_return_within_the_lease_of_its_name_after_redis_was_away(client: Client) -> None:
    suspect_run_before(client, VANISHED, deaths=1)
    client.execute("CONFIG", "RESETSTAT")
    clock = LeapClock()
    with working(client, make(double), clock=clock):
        eventually(lambda: gets(client) >= 2, "a look at the name and at the end")
        clock.leap(2_000)
        before = gets(client)
        eventually(lambda: gets(client) >= before + 6, "more looks")
        assert (pending(client), outputs(client)) == (1, [])
        client.execute("SET", worker_name_key("app", "w9"), "token")
        clock.leap(600)
        eventually(lambda: pending(client) == 0)
    assert (dead(client), outputs(client)) == ([], [0])
