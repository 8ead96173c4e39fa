"""The supervisor restarts processes that die: at once if they had committed anything, else with back-off."""

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from millstream.admin.worker_drains import find_worker, request_drain
from millstream.clock import SYSTEM_CLOCK
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import worker_drain_key, worker_name_key
from millstream.testing.proxy import Proxy
from millstream.worker.incarnations import Incarnation, ProcessEnd
from millstream.worker.process.process_reports import ProcessReports
from millstream.worker.process.supervisor import Launch, Program, Supervisor
from millstream.worker.static_membership import StaticMembership
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = pytest.mark.worker

DIES = "import os, sys; os.write(int(sys.argv[1]), b'%s\\n'); os._exit(9)"


def waits_s(client: Client, caplog: pytest.LogCaptureFixture, printed: str) -> list[float]:
    """Return the supervisor's waits after each of four incarnations of a process that reports this and dies."""

    def program(launch: Launch) -> Program:
        return Program(arguments=(sys.executable, "-I", "-S", "-c", DIES % printed, str(launch.report_to)))

    def on_line(name: str, line: Any) -> bool:
        return bool(line["committed"])

    names = StaticMembership(client, "shop", "till")
    names.acquire(1)
    stopping = threading.Event()
    supervisor = Supervisor(names, program, stop_ms=1_000, frozen_after_ms=1_000, on_line=on_line)
    running = threading.Thread(target=supervisor.run, args=(stopping,), daemon=True)
    running.start()

    def found() -> list[str]:
        return re.findall(r"worker till-0 ended with code 9; restarting in ([0-9.]+) s", caplog.text)

    eventually(lambda: len(found()) >= 4, "four deaths", log=lambda: caplog.text)
    stopping.set()
    running.join(FAIL_SAFE_S)
    return [float(one) for one in found()[:4]]


def test_a_process_that_had_committed_something_is_restarted_at_once_each_time(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert waits_s(client, caplog, '{"committed": 1}') == [0.1, 0.1, 0.1, 0.1]


def test_a_process_that_had_committed_nothing_is_restarted_after_waits_that_double(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert waits_s(client, caplog, '{"committed": 0}') == [0.1, 0.2, 0.4, 0.8]


def test_a_process_that_an_operator_killed_counts_as_no_crash(client: Client) -> None:
    launched: list[Launch] = []

    def program(launch: Launch) -> Program:
        launched.append(launch)
        return Program(arguments=(sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"))

    names = StaticMembership(client, "shop", "till")
    names.acquire(1)
    stopping = threading.Event()
    supervisor = Supervisor(names, program, stop_ms=3_600_000, frozen_after_ms=1_000, on_line=lambda name, line: True)
    running = threading.Thread(target=supervisor.run, args=(stopping,), daemon=True)
    running.start()
    eventually(lambda: launched, "a process")
    stopping.set()

    def is_over() -> bool:
        supervisor.kill()  # a second signal
        return not running.is_alive()

    eventually(is_over, "the end of the supervisor")
    found, mark = Incarnation(client, SYSTEM_CLOCK, app="shop", consumer="other-0"), f"{launched[0].incarnation} till-0"
    end = ProcessEnd(died=False, cause="was killed during a stop")
    eventually(lambda: found.end_of(mark) == end, "the record of its end", log=lambda: found.end_of(mark))


@contextmanager
def supervised(
    client: Client, codes: Sequence[str], reports: ProcessReports | None = None, *, stop_ms: float = 3_600_000
) -> Iterator[list[Launch]]:
    """Run a supervisor of one process during the block: its starts run these programs, the last one again and again."""
    launched: list[Launch] = []

    def program(launch: Launch) -> Program:
        launched.append(launch)
        code = codes[min(len(launched), len(codes)) - 1]
        words = (sys.executable, "-I", "-S", "-c", code, str(launch.report_to))
        return Program(arguments=words if code else ("/there/is/no/such/program",))

    names = StaticMembership(client, "shop", "till")
    names.acquire(1)
    stopping = threading.Event()
    supervisor = Supervisor(
        names, program, stop_ms=stop_ms, frozen_after_ms=1_000, on_line=lambda name, line: True, reports=reports
    )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            supervisor.run(stopping)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    try:
        yield launched
    finally:
        stopping.set()
        running.join(FAIL_SAFE_S)
    assert not failures


STAYS = "import sys; sys.stdin.read()"


@pytest.mark.parametrize(
    ("code", "logged"),
    [
        ("import os, sys; os.write(int(sys.argv[1]), b'{\"commi'); os._exit(9)", "ended with code 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", "was ended by signal "),
        ("", "cannot start worker till-0: "),
    ],
    ids=["half a line", "real-time signal", "no process"],
)
def test_a_process_is_restarted_after_any_end(
    client: Client, caplog: pytest.LogCaptureFixture, code: str, logged: str
) -> None:
    with supervised(client, [code, STAYS]) as launched:
        eventually(lambda: len(launched) == 2, "a restart", log=lambda: caplog.text)
    assert logged in caplog.text


def test_a_worker_that_cannot_be_started_is_not_healthy_until_it_is_started(client: Client) -> None:
    reports = ProcessReports(Recorder(), Recorder().snapshot())
    with supervised(client, [""], reports):
        eventually(reports.failures, "a failure")
        assert reports.failures()[0].startswith("worker till-0: it could not be started: ")
    reports = ProcessReports(Recorder(), Recorder().snapshot())
    with supervised(client, ["", STAYS], reports) as launched:
        eventually(lambda: len(launched) == 2, "a process")
        eventually(lambda: not reports.failures(), "the end of the failure")


def test_a_process_that_ends_itself_during_the_stop_counts_as_no_crash_of_a_message(client: Client) -> None:
    with supervised(client, [f"{STAYS}; sys.exit(75)"]) as launched:
        eventually(lambda: launched, "a process")
    found, mark = Incarnation(client, SYSTEM_CLOCK, app="shop", consumer="other-0"), f"{launched[0].incarnation} till-0"
    end = ProcessEnd(died=False, cause="ended with code 75, as a handler hung: see its log")
    eventually(lambda: found.end_of(mark) == end, "the record of its end", log=lambda: found.end_of(mark))


def test_a_stop_ends_while_redis_hangs(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    launched: list[Launch] = []

    def program(launch: Launch) -> Program:
        launched.append(launch)
        return Program(arguments=(sys.executable, "-I", "-S", "-c", STAYS))

    with (
        Proxy(int(client.url.rpartition(":")[2].partition("/")[0])) as proxy,
        Client(proxy.url, timeout_ms=3_600_000) as far,  # no call ends by itself before the test does
    ):
        names = StaticMembership(far, "shop", "till")
        names.acquire(1)
        stopping = threading.Event()
        supervisor = Supervisor(
            names, program, stop_ms=3_600_000, frozen_after_ms=1_000, on_line=lambda name, line: True
        )
        running = threading.Thread(target=supervisor.run, args=(stopping,), daemon=True)
        running.start()
        eventually(lambda: launched, "a process")
        proxy.freeze()
        stopping.set()
        eventually(lambda: not running.is_alive(), "the end of the supervisor")
        proxy.resume()
    assert "cannot release the worker names: Redis does not answer" in caplog.text


def request(client: Client) -> None:
    """An operator requests the drain of the worker."""
    request_drain(client, find_worker(client, "till-0", "shop"))


def test_a_drained_worker_is_not_started_again_and_its_name_becomes_free(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    reports = ProcessReports(Recorder(), Recorder().snapshot())
    with supervised(client, [STAYS], reports) as launched:
        eventually(lambda: launched, "a process")
        request(client)
        eventually(lambda: not client.execute("EXISTS", worker_name_key("shop", "till-0")), "the name to be free")
        assert reports.failures() == []
    assert len(launched) == 1
    assert "worker till-0 has ended: an operator drained it; its name is free" in caplog.text
    assert client.execute("KEYS", "millstream:worker:shop:*") == []


def test_a_drained_worker_that_waits_for_its_restart_is_not_restarted(client: Client) -> None:
    with supervised(client, ["import os; os._exit(9)"]) as launched:
        eventually(lambda: len(launched) >= 4, "a wait before a restart")
        request(client)
        eventually(lambda: not client.execute("EXISTS", worker_name_key("shop", "till-0")), "the name to be free")
    end = Incarnation(client, SYSTEM_CLOCK, app="shop", consumer="other-0").end_of(f"{launched[-1].incarnation} till-0")
    assert end == ProcessEnd(died=True, cause="ended with code 9")


def test_a_drained_process_that_does_not_stop_is_killed_and_counts_as_no_crash(client: Client) -> None:
    with supervised(client, ["import time; time.sleep(3600)"], stop_ms=0) as launched:
        eventually(lambda: launched, "a process")
        request(client)
        eventually(lambda: not client.execute("EXISTS", worker_name_key("shop", "till-0")), "the name to be free")
    assert len(launched) == 1
    end = Incarnation(client, SYSTEM_CLOCK, app="shop", consumer="other-0").end_of(f"{launched[0].incarnation} till-0")
    assert end == ProcessEnd(died=False, cause="was killed during a stop")


def test_a_drain_ends_with_the_supervisor_that_it_was_requested_of(client: Client) -> None:
    first, second = StaticMembership(client, "shop", "till"), StaticMembership(client, "shop", "till")
    first.acquire(1)
    assert first.renew() == frozenset()
    request(client)
    assert first.renew() == {"till-0"}
    client.execute("DEL", worker_name_key("shop", "till-0"))  # as if it had expired
    second.acquire(1)
    assert second.renew() == frozenset()
    assert find_worker(client, "till-0", "shop").drained_since_ms is None
    client.execute("DEL", worker_drain_key("shop", "till-0"))
    client.execute("LPUSH", worker_drain_key("shop", "till-0"), "of another program")
    assert second.renew() == frozenset()
    second.release()
    assert client.execute("KEYS", "millstream:worker:shop:*") == []
