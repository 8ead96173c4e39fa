"""The one way in which tests wait: for a condition, with one fail-safe for all.

A test never judges by the clock. `FAIL_SAFE_S` only ends a test whose condition never comes to hold, so that
it says what it waited for; it is far beyond what the slowest machine needs, and grows with how slow this one
is, as measured once per run.
"""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

SLOWNESS_VARIABLE = "MILLSTREAM_TEST_SLOWNESS"
_QUICK_S = 0.15
_MOST = 10.0


def measure_slowness() -> float:
    """How many times slower than a quick machine this one starts Python and counts; between 1 and 10."""
    began = time.perf_counter()
    for _ in range(3):
        subprocess.run([sys.executable, "-I", "-c", "sum(range(1_000_000))"], check=True)
    return min(_MOST, max(1.0, (time.perf_counter() - began) / _QUICK_S))


def slowness() -> float:
    """What the run measured at its start; also for the processes that it starts."""
    if SLOWNESS_VARIABLE not in os.environ:
        os.environ[SLOWNESS_VARIABLE] = f"{measure_slowness():.2f}"
    return float(os.environ[SLOWNESS_VARIABLE])


FAIL_SAFE_S = (3_600.0 if os.environ.get("MILLSTREAM_SOAK") else 400.0) * slowness()
"""After this long a test gives up on a condition; with full counts it has much more to wait for."""

TEST_TIMEOUT_S = 3 * FAIL_SAFE_S
"""After this long a test that waits for no condition of its own is ended."""


def eventually(condition: Callable[[], T], what: str = "this condition", *, log: Callable[[], object] = str) -> T:
    """Wait until `condition()` is true and return what it gave.

    Raises AssertionError with `what` was waited for, and the end of `log`, after `FAIL_SAFE_S`.
    """
    deadline, pauses_s = time.monotonic() + FAIL_SAFE_S, _pauses_s()
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_in_vain(what, log))
        time.sleep(next(pauses_s))
    return found


async def eventually_async(
    condition: Callable[[], T], what: str = "this condition", *, log: Callable[[], object] = str
) -> T:
    """`eventually` for a test that runs on an event loop."""
    deadline, pauses_s = time.monotonic() + FAIL_SAFE_S, _pauses_s()
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_in_vain(what, log))
        await asyncio.sleep(next(pauses_s))
    return found


def _pauses_s() -> Iterator[float]:
    """Between looks at a condition: the longer it takes to hold, the rarer they are, as the tested need the processor."""
    return itertools.chain([0.01] * 10, [0.02] * 10, itertools.repeat(0.04))


def _in_vain(what: str, log: Callable[[], object]) -> str:
    return f"waited {FAIL_SAFE_S:.0f} s in vain for {what}\n{str(log())[-3000:]}"
