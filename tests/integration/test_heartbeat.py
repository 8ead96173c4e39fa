"""The detector distinguishes a frozen process from a stopped, idle or busy one; it ends even if its supervisor is dead."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.worker.process.heartbeat import ORPHAN_ALARM_S, FreezeDetector
from tests.support.processes import lives
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = pytest.mark.worker

START = """
import ctypes, re, sys, threading, time
from millstream.worker.process.heartbeat import Heartbeat
Heartbeat(int(sys.argv[1]), cpu_limit_ms=float(sys.argv[2])).start()
"""
WAIT = """
time.sleep(0.3)
print(flush=True)
sys.stdin.readline()
"""
COMPUTE = "re.match(r'(a+)+$', 'a' * 60 + 'b')"
BLOCK = "ctypes.PyDLL(None).sleep(3600)"
SHARE = "while True: pass"
IDLE = "time.sleep(3600)"
NEVER_MS = 3_600_000
LIMIT_MS = 1_000


@contextmanager
def process(detector: FreezeDetector, deed: str, *, cpu_limit_ms: int = NEVER_MS) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a heartbeat, which runs some code when the test says so."""
    with process_at_once(detector, WAIT + deed, cpu_limit_ms=cpu_limit_ms) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running


@contextmanager
def process_at_once(
    detector: FreezeDetector, deed: str, *, cpu_limit_ms: int = NEVER_MS
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs some code in the moment in which its heartbeat has started."""
    running = subprocess.Popen(
        [sys.executable, "-c", START + deed, str(detector.descriptor), str(cpu_limit_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(detector.descriptor,),
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture
def detector() -> Iterator[FreezeDetector]:
    detector = FreezeDetector(LIMIT_MS)
    yield detector
    detector.close()


def begin(running: subprocess.Popen[bytes]) -> None:
    """Make it run its code."""
    assert running.stdin is not None
    running.stdin.write(b"go\n")
    running.stdin.flush()


def test_a_process_that_computes_and_blocks_its_other_threads_is_frozen(detector: FreezeDetector) -> None:
    with process(detector, COMPUTE) as running:
        begin(running)
        eventually(lambda: detector.is_frozen(running.pid, SYSTEM_CLOCK.monotonic_ms()), "a frozen process")


def test_a_process_that_is_frozen_from_its_start_on_is_found(detector: FreezeDetector) -> None:
    with process_at_once(detector, COMPUTE) as running:
        eventually(lambda: detector.is_frozen(running.pid, SYSTEM_CLOCK.monotonic_ms()), "a frozen process")


def test_an_unwatched_process_that_is_frozen_from_its_start_on_ends(detector: FreezeDetector) -> None:
    with process_at_once(detector, COMPUTE, cpu_limit_ms=300) as running:
        assert running.wait(FAIL_SAFE_S) == -signal.SIGPROF


def test_a_process_that_sleeps_and_blocks_its_other_threads_is_frozen() -> None:
    detector, ticks = (
        FreezeDetector(100 * LIMIT_MS),
        itertools.count(),
    )  # threads that wait for the interpreter use some processor time, too

    def is_frozen() -> bool:
        return any(detector.is_frozen(running.pid, 500.0 * next(ticks)) for _ in range(50))

    with process(detector, BLOCK) as running:
        begin(running)
        eventually(is_frozen, "a frozen process")
    detector.close()


@pytest.mark.parametrize("deed", [SHARE, IDLE])
def test_a_process_that_computes_in_python_or_is_idle_is_not_frozen(detector: FreezeDetector, deed: str) -> None:
    with process(detector, deed) as running:
        begin(running)
        for _ in range(3 * LIMIT_MS // 2 // 20):
            assert not detector.is_frozen(running.pid, SYSTEM_CLOCK.monotonic_ms())
            SYSTEM_CLOCK.sleep_ms(20)


@pytest.mark.parametrize("deed", [COMPUTE, IDLE])
def test_a_stopped_process_is_not_frozen_after_any_time(detector: FreezeDetector, deed: str) -> None:
    with process(detector, deed) as running:
        begin(running)
        stopped = psutil.Process(running.pid)
        detector.is_frozen(running.pid, 0.0)
        stopped.suspend()
        eventually(lambda: stopped.status() == psutil.STATUS_STOPPED, "a stopped process")
        ticks = [100.0 * tick for tick in range(100 * LIMIT_MS // 100)]
        assert not any(detector.is_frozen(running.pid, now_ms) for now_ms in ticks)


def test_the_time_for_which_a_process_was_stopped_does_not_count_when_it_continues(detector: FreezeDetector) -> None:
    with process(detector, COMPUTE) as running:
        begin(running)
        computing = psutil.Process(running.pid)
        began_s = computing.cpu_times().user
        eventually(lambda: computing.cpu_times().user > began_s + LIMIT_MS / 2_000, "a computation")
        computing.suspend()
        eventually(lambda: computing.status() == psutil.STATUS_STOPPED, "a stopped process")
        ticks = [100.0 * tick for tick in range(100 * LIMIT_MS // 100)]
        assert not any(detector.is_frozen(running.pid, now_ms) for now_ms in ticks)
        computing.resume()
        eventually(lambda: computing.cpu_times().user > began_s + LIMIT_MS / 1_000, "more of it")
        assert not detector.is_frozen(running.pid, ticks[-1])


def test_a_detector_that_stood_still_does_not_report_a_process_as_frozen(detector: FreezeDetector) -> None:
    with process(detector, BLOCK) as running:
        begin(running)
        eventually(lambda: detector.is_frozen(running.pid, SYSTEM_CLOCK.monotonic_ms()), "a frozen process")
        assert not detector.is_frozen(running.pid, SYSTEM_CLOCK.monotonic_ms() + NEVER_MS)


def test_an_unwatched_process_ends_when_it_computes_for_too_long_without_a_heartbeat(
    detector: FreezeDetector,
) -> None:
    with process(detector, COMPUTE, cpu_limit_ms=300) as running:
        begin(running)
        assert running.wait(FAIL_SAFE_S) == -signal.SIGPROF


ORPHAN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], pass_fds=(int(sys.argv[2]),), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(3600)
"""
SLEEP_ON = """
print(flush=True)
libc = ctypes.PyDLL(None)
for _ in range(1_000):
    libc.sleep(3600)  # a signal interrupts it
"""


@pytest.mark.skipif(not ORPHAN_ALARM_S, reason="no signal at the death of the parent on this system")
@pytest.mark.waits
def test_a_process_that_blocks_its_other_threads_ends_after_the_death_of_its_supervisor(
    detector: FreezeDetector,
) -> None:
    command = [sys.executable, "-c", ORPHAN, START + SLEEP_ON, str(detector.descriptor), str(NEVER_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(detector.descriptor,)) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        try:
            eventually(lambda: not lives(orphan), "the end of the orphan")
        finally:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()


def test_a_process_may_compute_without_end_as_long_as_it_sends_heartbeats(detector: FreezeDetector) -> None:
    with process(detector, SHARE, cpu_limit_ms=500) as running:
        begin(running)
        computing = psutil.Process(running.pid)
        eventually(lambda: sum(computing.cpu_times()[:2]) > 1.5, "computing for three times its limit")
        assert running.poll() is None
