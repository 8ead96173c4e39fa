"""Processes that tests start: whether they live, and how they end, with all that they have started."""

import signal
import subprocess
from contextlib import suppress
from typing import Any

import psutil

from tests.support.waiting import FAIL_SAFE_S, eventually


def lives(process: psutil.Process | int) -> bool:
    """Whether a process exists and is not a zombie; of a number, whether any process with it does."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and bool(found.status() != psutil.STATUS_ZOMBIE)
    return False


def descendants(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """What a process has started, and what that has; nothing if the process has ended."""
    if process.poll() is None:  # else its number may be another's
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(process.pid).children(recursive=True)
    return []


def end(process: subprocess.Popen[Any], number: int = signal.SIGTERM) -> int:
    """Send a signal and wait; return the exit code."""
    process.send_signal(number)
    return process.wait(FAIL_SAFE_S)


def kill_with_descendants(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it has started, and wait until all of it has ended."""
    family = descendants(process)
    process.kill()
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    await_end(family)


def await_end(processes: list[psutil.Process]) -> None:
    """Wait until none of them lives."""
    eventually(
        lambda: not any(map(lives, processes)), "the end of processes", log=lambda: list(filter(lives, processes))
    )
