"""Messages that freeze their process or outlive its lease are dead-lettered; other messages never are."""

import json
import os
import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import running
from tests.support.keyed_workers import KeyedExpectations
from tests.support.processes import lives
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.worker_processes import CLAIM_S, Expectations, PrintFigures, RunningWorkers, watched

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
DEEDS = ("compute", "block") if SOAK else ("block",)
"""Elsewhere here, a process that computes is killed; it costs a processor all the while."""
OUTAGES = 4
"""One more than the attempts of a message of the app `brittle`."""


@pytest.mark.parametrize("deed", DEEDS)
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
    assert_frozen_letter(expectations)
    print_figures(report, watch, kills=workers.log().count("is frozen"))


def assert_frozen_letter(expectations: KeyedExpectations) -> None:
    """Check that the one dead letter says what its handler had done."""
    (letter,) = expectations.dead_letters()
    assert "as a handler had held Python's interpreter (the GIL)" in letter.error


def test_a_frozen_process_is_killed_after_its_own_time_though_claims_last_for_long(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path, app="brittle")
    with RunningWorkers(fresh_client.url, tmp_path, "--frozen-after", "1s", app="brittle", claim_s=600) as workers:
        workers.ready()
        expectations.publish_keys(50, 25, ms=1)
        (poison,) = expectations.publish_key("poison", 1, do="freeze")
        expectations.publish_keys(50, 25, ms=1)
        report = expectations.check_keys(dead={poison: "crashed"}, overlap=False, log=workers.log)
        assert workers.supervisor.poll() is None
    assert_frozen_letter(expectations)
    print_figures(report, kills=workers.log().count("is frozen"))


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


HANGING_APP = """
import os, time
from millstream import App, Message, Reject, Retry

app = App("shop")

@app.handler("orders", time_limit_ms=500, retry=Retry(attempts=1))
def order(message: Message):
    time.sleep(1_000_000)

@app.handler("bookings", key="n", time_limit_ms=600_000_000)
def book(message: Message):
    begun, gate = os.environ["MARKER"] + f"-{message.fields['n'].decode()}", os.environ["MARKER"] + "-gate"
    open(begun, "w").close()
    while message.fields["n"] != b"0" or not os.path.exists(gate):
        time.sleep(0.01)
    raise Reject("no more")
"""


def test_a_process_that_ends_as_a_handler_outlives_its_lease_has_reported_its_dead_letters(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv("MARKER", str(marker))
    (tmp_path / "shop_app.py").write_text(HANGING_APP)
    keys, redis = HandlerKeys("shop", "book", "bookings"), psutil.Process(millstream_fresh_server.pid)
    options = (
        "--threads",
        "2",
        "--name",
        "till",
        "--claim",
        "10s",
        "--stop-timeout",
        "1000000",
        "--metrics-address",
        "0",
    )
    for n in range(20):
        fresh_client.execute("XADD", "bookings", "*", "n", n)
    with (
        (tmp_path / "log").open("wb") as log,
        running(
            "worker", f"{tmp_path}/shop_app.py:app", *options, "--json", url=fresh_client.url, stderr=log
        ) as worker,
    ):
        assert worker.stdout is not None
        where = json.loads(worker.stdout.readline())["metrics"]

        def counted() -> float:
            found = re.search(
                r'^millstream_messages_dead_lettered_total\{handler="shop.book",reason="rejected",worker="till-0"\} (.+)$',
                httpx.get(where, timeout=FAIL_SAFE_S, trust_env=False).text,
                re.MULTILINE,
            )
            return float(found[1]) if found else 0.0

        eventually(lambda: all(Path(f"{marker}-{n}").exists() for n in (0, 1)), "two runs")
        eventually(lambda: fresh_client.execute("HLEN", keys.owners) > 2, "a key that waits in the process")
        (child,) = psutil.Process(worker.pid).children()
        fresh_client.execute("XADD", "orders", "*", "n", 0)
        eventually(lambda: fresh_client.execute("HLEN", keys.owners) == 2, "the stop, as the order hangs")
        Path(f"{marker}-gate").touch()
        eventually(lambda: fresh_client.execute("XLEN", keys.dead_letters) == 1, "a dead letter during the stop")
        redis.suspend()
        try:
            eventually(lambda: not lives(child), "the end of the process with the lease of the other")
        finally:
            redis.resume()
        eventually(lambda: counted() == 1, "the dead letter on the supervisor's page")
    assert "though its lease is about to expire" in (tmp_path / "log").read_text()


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
                lambda outage=outage: workers.log().count("its lease is about to expire") > outage,  # type: ignore[misc]
                "the end of a process",
            )
            redis.resume()
        expectations.open_gate()
        report = expectations.check_keys(overlap=False, log=workers.log)
        assert [row["id"] for row in expectations.outputs()] == [long]
    print_figures(report, watch, outages=OUTAGES)
