"""`millstream demo` from the outside: every figure of its report, also when its processes are killed."""

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream.demo.flights import load_flights
from tests.support.commandline import PROGRAM
from tests.support.json_reference import faults, sections
from tests.support.processes import descendants
from tests.support.waiting import FAIL_SAFE_S, eventually

FLIGHTS = 6_000
MARK = "MILLSTREAM_TEST_OF_DEMO"
SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))

pytestmark = [pytest.mark.spark, pytest.mark.drivers]


class Demo:
    """A `millstream demo` process; whatever it starts carries a mark, so that what it leaves behind is found."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._mark = uuid.uuid4().hex
        self.chart = folder / "demo" / "departures.png"
        self.said = folder / "said.txt"
        command = [*PROGRAM, "demo", "--data-dir", str(folder / "demo")]
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=log, env=os.environ | {MARK: self._mark}
            )

    def report(self) -> dict[str, Any]:
        """Wait for its end and return its JSON, which must be the only thing on stdout."""
        stdout, _ = self.process.communicate(timeout=FAIL_SAFE_S)
        assert self.process.returncode == 0, self.said.read_text()
        report: dict[str, Any] = json.loads(stdout)
        assert faults(sections()["demo"], report) == []
        return report

    def family(self) -> list[psutil.Process]:
        """All living processes that it has started, and it itself."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def has_begun(self) -> bool:
        """Whether it has come to its pipeline; costs much less to ask than `has`."""
        return (self.chart.parent / "run.log").exists()

    def has(self, program: str) -> bool:
        """Whether one of its descendants runs `program`."""
        names = []
        for process in descendants(self.process):
            with suppress(psutil.Error):  # it may have ended this moment
                names.append(process.name())
        return program in names


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    """Demos to be ended with all that they have started, should their test fail."""
    started: list[Demo] = []
    yield started
    for demo in started:
        for process in demo.family():
            with suppress(psutil.Error):
                process.kill()
        demo.process.wait()


def assert_faultless(report: dict[str, Any]) -> None:
    flights = load_flights(FLIGHTS)
    tailnum = flights.columns.index("tailnum")
    unkeyed = sum(row[tailnum] == "NA" for row in flights.rows)
    assert unkeyed
    assert report["messages"] == FLIGHTS
    assert report["committed"] == FLIGHTS - unkeyed
    assert report["dead_letters"] == unkeyed
    assert report["dead_letters_by_reason"] == {"missing-key": unkeyed}
    faults = ("lost", "duplicated", "unexpected", "order_violations", "wrong_values", "wrong_states")
    assert {name: report[name] for name in faults} == dict.fromkeys(faults, 0)
    assert report["ok"] is True
    assert report["startup_seconds"] > 0
    # Both are rounded: the seconds to hundredths, the rate to a whole number.
    assert report["rate"] == pytest.approx(FLIGHTS / report["seconds"], rel=0.005, abs=0.6)
    assert report["batches"] >= 1


def assert_nothing_runs(demo: Demo) -> None:
    """All that it has started has ended, or does so by itself: a process that was killed may need a moment for it."""
    eventually(lambda: not demo.family(), "the end of all that it has started", log=demo.family)


def assert_only_its_chart_is_left(demo: Demo, report: dict[str, Any]) -> None:
    assert report["chart"] == str(demo.chart)
    assert demo.chart.read_bytes().startswith(b"\x89PNG")
    assert not (demo.chart.parent / "redis").exists()
    assert_nothing_runs(demo)


@pytest.mark.skipif(not SOAK, reason="the same as the next, without kills: make soak")
def test_the_demo_commits_every_flight_once_and_in_order(tmp_path: Path, demos: list[Demo]) -> None:
    demos.append(Demo(tmp_path, "--json", "--flights", str(FLIGHTS)))
    report = demos[0].report()
    assert_faultless(report)
    assert report["kills"] == []
    assert_only_its_chart_is_left(demos[0], report)


def test_the_demo_ends_with_the_same_report_even_if_a_worker_and_then_its_driver_are_killed(
    tmp_path: Path, demos: list[Demo]
) -> None:
    demos.append(Demo(tmp_path, "--json", "--kill", "--flights", str(FLIGHTS)))
    report = demos[0].report()
    assert_faultless(report)
    worker, *driver = (kill["what"] for kill in report["kills"])
    assert worker == "a Python worker of Spark"
    assert driver == ["the driver, Python and JVM"] * 2, "both of its processes"
    assert all(FLIGHTS / 3 <= kill["done"] < FLIGHTS for kill in report["kills"])
    assert_only_its_chart_is_left(demos[0], report)


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path, "--flights", str(FLIGHTS))
    demos.append(demo)

    def has_java() -> bool:
        assert demo.process.poll() is None, demo.said.read_text()
        return demo.has_begun() and demo.has("java")

    eventually(has_java, "its Java", log=demo.said.read_text)
    demo.process.send_signal(signal.SIGINT)
    stdout, _ = demo.process.communicate(timeout=FAIL_SAFE_S)
    assert demo.process.returncode not in (0, -signal.SIGKILL)
    assert b"Traceback" not in stdout
    assert "Traceback" not in demo.said.read_text()
    assert_nothing_runs(demo)
