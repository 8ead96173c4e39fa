"""The demo's parts against a real Redis: what they publish, read back, count, clean and refuse."""

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from millstream.app import load_app
from millstream.demo.audit import KEYS, OUTPUT, audit, read_results
from millstream.demo.environment import clean, fresh_folder, require_unused
from millstream.demo.flights import Flights, load_flights
from millstream.demo.pipeline import RunProcess, descendants
from millstream.demo.progress import read_progress
from millstream.demo.publish import FlightPublisher
from millstream.demo.reference import expected_results
from millstream.demo.show import DemoSettings
from millstream.errors import ConfigError, PipelineFailed, WrongType
from millstream.handlers.attempt import DeadLettered, check_key, dead_letter_of
from millstream.handlers.encoding import encode_output
from millstream.handlers.handler import Handler
from millstream.model import Message, State
from millstream.redis_client.client import Client
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.xdist_group("airline")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "airline.py"
FLIGHTS = 3_000


@pytest.fixture(scope="module")
def flights() -> Flights:
    return load_flights(FLIGHTS)


@pytest.fixture(scope="module")
def handler() -> Handler:
    return load_app(f"{EXAMPLE}:app").handlers["departure"]


@pytest.fixture
def processed(client: Client, flights: Flights, handler: Handler) -> Client:
    """A Redis that has all that a faultless run leaves, without the run."""
    publish(client.url, flights)
    states: dict[bytes, State] = defaultdict(State)
    commands: list[tuple[bytes | str | int | float, ...]] = []
    for entry_id, pairs in client.execute("XRANGE", KEYS.stream, "-", "+"):
        message = Message(KEYS.stream, entry_id.decode(), pairs)
        message.key = handler.key_of(message)
        refusal = check_key(handler, message)
        if refusal is not None:
            commands.append(("XADD", KEYS.dead_letters, "*", *dead_letter_of(handler, message, refusal).items()))
        else:
            assert message.key is not None
            output = handler.function(**handler.bind(message, states[message.key]))
            commands.append(("XADD", OUTPUT, "*", *encode_output(output)))
    commands += [("HSET", KEYS.state, key, packed(state)) for key, state in states.items()]
    client.pipeline(commands)
    return client


def packed(state: State) -> bytes:
    return msgspec.msgpack.encode(state)


def publish(url: str, flights: Flights) -> None:
    publisher = FlightPublisher(url, flights)
    publisher.start()
    try:
        eventually(publisher.check)
    finally:
        publisher.stop()


# --- Publishing and reading back ---


def test_flights_arrive_in_redis_as_they_were_published(client: Client, flights: Flights) -> None:
    publish(client.url, flights)
    found = [fields for _, fields in client.execute("XRANGE", KEYS.stream, "-", "+")]
    wanted = [[part.encode() for pair in flight.items() for part in pair] for flight in flights]
    assert found == wanted


def test_delayed_flights_wait_until_they_are_released(client: Client, flights: Flights) -> None:
    publisher = FlightPublisher(client.url, flights, hold_at=1_234)
    publisher.start()
    try:
        eventually(lambda: client.execute("XLEN", KEYS.stream) >= 1_234)
        time.sleep(0.2)
        assert client.execute("XLEN", KEYS.stream) == 1_234
        assert not publisher.check()
        publisher.release()
        eventually(publisher.check)
        assert client.execute("XLEN", KEYS.stream) == FLIGHTS
    finally:
        publisher.stop()


def test_a_publisher_that_fails_reports_its_error_to_the_thread_that_waits_for_it(
    client: Client, flights: Flights
) -> None:
    client.execute("SET", KEYS.stream, "not a stream")
    with pytest.raises(WrongType):
        publish(client.url, flights)


def test_the_audit_passes_the_results_of_a_faultless_run(processed: Client, flights: Flights) -> None:
    verdict = audit(expected_results(flights), read_results(processed))
    assert verdict.examples == ()
    assert verdict.ok
    assert verdict.messages == FLIGHTS
    assert verdict.dead_letters_by_reason == {"missing-key": verdict.dead_letters}
    assert verdict.committed == FLIGHTS - verdict.dead_letters


def test_the_audit_finds_a_deleted_entry_and_an_added_one(processed: Client, flights: Flights) -> None:
    expected = expected_results(flights)
    row = next(career[0].row for career in expected.departures.values() if len(career) > 1)
    output = processed.execute("XRANGE", OUTPUT, "-", "+")
    first_id, first = next(entry for entry in output if entry[1][:2] == [b"row", str(row).encode()])
    processed.execute("XDEL", OUTPUT, first_id)
    assert audit(expected, read_results(processed)).lost == 1
    processed.execute("XADD", OUTPUT, "*", *first)
    late = audit(expected, read_results(processed))
    assert (late.lost, late.duplicated) == (0, 0)
    assert late.order_violations >= 1
    processed.execute("XADD", OUTPUT, "*", *first)
    assert audit(expected, read_results(processed)).duplicated == 1
    processed.execute("XADD", OUTPUT, "*", "greeting", "hello")
    assert audit(expected, read_results(processed)).wrong_values == 1


def test_the_audit_finds_an_unexpected_dead_letter_and_a_wrong_state(
    processed: Client, flights: Flights, handler: Handler
) -> None:
    entry_id, pairs = processed.execute("XRANGE", KEYS.stream, "-", "+", "COUNT", 1)[0]
    message = Message(KEYS.stream, entry_id.decode(), pairs, b"N14228")
    dead = dead_letter_of(handler, message, DeadLettered("failed", "ValueError: planted"))
    processed.execute("XADD", KEYS.dead_letters, "*", *dead.items())
    processed.execute("HSET", KEYS.state, "N14228", packed(State(number=1)))
    verdict = audit(expected_results(flights), read_results(processed))
    assert verdict.dead_letters_by_reason["failed"] == 1
    assert (verdict.duplicated, verdict.unexpected, verdict.wrong_states) == (1, 1, 1)


def test_progress_is_read_from_redis(client: Client) -> None:
    assert not read_progress(client).caught_up
    client.execute("XADD", KEYS.stream, "7-0", "row", "0")
    client.execute("XADD", KEYS.stream, "8-0", "row", "1")
    client.execute("HSET", KEYS.meta, "committed", 1, "dead", 1, "committed_id", "7-0")
    progress = read_progress(client)
    assert (progress.published, progress.done, progress.dead, progress.caught_up) == (2, 1, 1, False)
    client.execute("HSET", KEYS.meta, "committed_id", "8-0")
    assert read_progress(client).caught_up


# --- What it must not touch ---


def test_a_redis_that_has_streams_of_the_demo_already_is_refused(client: Client) -> None:
    require_unused(client)
    client.execute("XADD", "departures", "*", "somebody", "else's")
    with pytest.raises(ConfigError, match="departures"):
        require_unused(client)


def test_the_demo_removes_its_keys_from_the_users_redis(processed: Client) -> None:
    processed.execute("SET", "somebody", "else's")
    clean(processed)
    require_unused(processed)
    assert processed.execute("GET", "somebody") == b"else's"
    left = set(processed.execute("KEYS", "*")) - {b"somebody"}
    # What the publisher remembers of itself goes away by itself.
    assert left
    assert all(processed.execute("TTL", key) > 0 for key in left)


def test_a_folder_of_another_owner_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="--data-dir"), fresh_folder(tmp_path):
        pass
    assert precious.read_text() == "years of work"


def test_the_demos_own_folder_is_emptied(tmp_path: Path) -> None:
    with fresh_folder(tmp_path / "new" / "demo") as folder:
        (folder / "redis").mkdir()
        (folder / "redis" / "data.aof").write_text("old")
        (folder / "run.log").write_text("old")
    with fresh_folder(folder) as again:
        assert again == folder
        assert not (folder / "redis").exists()
        assert not (folder / "run.log").exists()


def test_a_folder_in_which_a_demo_runs_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    with fresh_folder(tmp_path / "demo") as folder:
        (folder / "run.log").write_text("still written")
        with pytest.raises(ConfigError, match="another demo"), fresh_folder(folder):
            pass
        assert (folder / "run.log").read_text() == "still written"


def test_an_invalid_number_of_flights_is_refused() -> None:
    with pytest.raises(ConfigError, match="--flights"):
        DemoSettings(flights=0)


# --- The pipeline's processes ---

CHILD = """
import subprocess, time
subprocess.Popen(["sleep", "60"], start_new_session=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


def test_all_descendants_of_a_process_are_found_in_any_process_group() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD])
    family: list[int] = []
    try:
        # Between its start and its program a process is still in the group of the one that starts it.
        eventually(lambda: len({os.getpgid(one.pid) for one in descendants(parent.pid)}) == 2, "two process groups")
        family = [process.pid for process in descendants(parent.pid)]
        assert len(family) == 2
    finally:
        for pid in (parent.pid, *family):
            os.kill(pid, signal.SIGKILL)
        parent.wait()


def test_a_pipeline_that_ends_by_itself_is_an_error_with_the_end_of_its_log(tmp_path: Path, client: Client) -> None:
    log = tmp_path / "run.log"
    pipeline = RunProcess(
        str(tmp_path / "none.py:app"), url=client.url, checkpoint=tmp_path / "checkpoint", log_path=log
    )
    pipeline.start()

    def ended() -> bool:
        try:
            pipeline.check()
        except PipelineFailed:
            return True
        return False

    eventually(ended)
    with pytest.raises(PipelineFailed, match=r"none\.py"):
        pipeline.check()
    pipeline.stop()
