"""Messages that freeze their process or outlive its lease are dead-lettered; other messages never are."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.keyed_workers import KeyedExpectations
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.worker_processes import CLAIM_S, Expectations, PrintFigures, RunningWorkers, watched

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.faults]

OUTAGES = 4
"""One more than the attempts of a message of the app `brittle`."""


@pytest.mark.parametrize("deed", ["compute", "block"])
def test_a_message_that_freezes_its_process_becomes_a_dead_letter_and_all_others_are_processed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures, deed: str
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path, app="brittle")
    with (
        RunningWorkers(fresh_client.url, tmp_path, app="brittle", claim_s=CLAIM_S) as workers,
        watched(expectations) as watch,
    ):
        workers.ready()
        expectations.publish_keys(50, 25, ms=1)
        (poison,) = expectations.publish_key("poison", 1, do=deed)
        expectations.publish_keys(50, 25, ms=1)
        report = expectations.check_keys(dead={poison: "crashed"}, overlap=False, log=workers.log)
        assert workers.supervisor.poll() is None
    (letter,) = expectations.dead_letters()
    assert "as a handler had held Python's interpreter (the GIL)" in letter.error
    print_figures(report, watch, kills=workers.log().count("is frozen"))


@pytest.mark.parametrize("deed", ["compute", "block"])
def test_a_frozen_process_whose_supervisor_was_killed_ends_too(fresh_client: Client, tmp_path: Path, deed: str) -> None:
    expectations = Expectations(
        fresh_client, tmp_path, app="limited"
    )  # its time limit is short: a freeze may not last longer
    with RunningWorkers(fresh_client.url, tmp_path, app="limited", processes=1) as workers:
        workers.ready()
        (frozen,) = workers.children()
        os.kill(workers.supervisor.pid, signal.SIGSTOP)  # it would end the process itself
        expectations.publish(1, do=deed)
        eventually(expectations.runs, "the run", log=workers.log)
        workers.supervisor.kill()
        frozen.wait(FAIL_SAFE_S)


def test_a_message_gets_no_crash_count_for_a_lease_that_expired_while_redis_was_away(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path, app="brittle")
    redis = psutil.Process(millstream_fresh_server.pid)
    patient = ("--stop-timeout", "3600")  # an orderly stop may take that long: the end of a lease must not wait for it
    with (
        RunningWorkers(fresh_client.url, tmp_path, *patient, app="brittle", claim_s=CLAIM_S) as workers,
        watched(expectations) as watch,
    ):
        workers.ready()
        (long,) = expectations.publish_key("long", 1, do="wait")
        for outage in range(OUTAGES):
            eventually(lambda outage=outage: len(expectations.runs()) > outage, "one more run", log=workers.log)  # type: ignore[misc]
            redis.suspend()
            eventually(
                lambda outage=outage: workers.log().count("its lease is about to expire") > outage, "the end of a process"  # type: ignore[misc]
            )  # fmt: skip
            redis.resume()
        expectations.open_gate()
        report = expectations.check_keys(overlap=False, log=workers.log)
        assert [row["id"] for row in expectations.outputs()] == [long]
    print_figures(report, watch, outages=OUTAGES)
