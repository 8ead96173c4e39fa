"""An app that defers messages, and whose processes are killed, by SIGKILL, at exactly the points that a test arms.

A point is armed by a file of its name in the folder MILLSTREAM_TEST_ARM, which says what is to die: the `process` that
reaches it first, driver or task, or the `driver` with it.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from millstream import App, Message, Retry, State
from millstream.delivery.commit_store import CommitStore
from millstream.spark.engine import run_committer, run_loader, task

app = App("bank")

ARM = Path(os.environ["MILLSTREAM_TEST_ARM"])
DRIVER = int(os.environ.setdefault("MILLSTREAM_TEST_DRIVER", str(os.getpid())))  # it loads the app before its tasks do
_runs_deferred = False


def reach(point: str) -> None:
    """End this process if `point` is armed, and the driver as well if that is to die."""
    armed = ARM / point
    if not armed.exists():
        return
    me = psutil.Process()
    drivers = [process for process in (*me.parents(), me) if process.pid == DRIVER]
    if not drivers:
        return  # a task that has outlived its driver
    if armed.read_text() == "process":
        drivers = []
    try:
        armed.rename(ARM / f"hit.{point}")
    except FileNotFoundError:
        return  # another process was faster
    for process in (*drivers, me):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def _around(step: Callable[..., Any], before: str = "", after: str = "", *, deferred: bool | None = None) -> Any:
    """`step` with points; `deferred`: only where deferred messages run, or only where they do not."""

    def stepped(*args: Any, **kwargs: Any) -> Any:
        counts = deferred is None or deferred == _runs_deferred
        if before and counts:
            reach(before)
        result = step(*args, **kwargs)
        if after and counts:
            reach(after)
        return result

    return stepped


def _noting(step: Callable[..., Any], *, deferred: bool) -> Any:
    """Notes which of the two kinds of work the process is at: it does one at a time."""

    async def noting(*args: Any, **kwargs: Any) -> Any:
        global _runs_deferred  # noqa: PLW0603 - the hooks are plain functions
        _runs_deferred = deferred
        return await step(*args, **kwargs)

    return noting


_task: Any = task
_committer: Any = run_committer
_loader: Any = run_loader
_commit_store: Any = CommitStore
_task.PartitionTask.process = _noting(_task.PartitionTask.process, deferred=False)
_task.PartitionTask.process_deferred = _noting(_task.PartitionTask.process_deferred, deferred=True)
_committer.defer = _around(_committer.defer, "before-defer", "after-defer", deferred=False)
_loader.read_queue = _around(_loader.read_queue, after="queue-loaded")
_commit_store.commit = _around(_commit_store.commit, "queue-run", "queue-committed", deferred=True)
_commit_store.advance_committed = _around(_commit_store.advance_committed, "before-advance", "after-advance")


@dataclass
class Booking:
    account: str
    n: int
    poison: str | None = None


def add(booking: Booking, message: Message, state: State, mended: Path) -> dict[str, object]:
    """Count and sum up; what is poisoned fails until the file `mended` is there, or, "late", the first time."""
    fails = message.attempt == 1 if booking.poison == "late" else booking.poison and not mended.exists()
    if fails:
        state["spoilt"] = True  # a failed attempt must leave no trace
        raise RuntimeError("not yet")
    state["count"] = state.get("count", 0) + 1
    state["sum"] = state.get("sum", 0) + booking.n
    return {"account": booking.account, "id": message.id, **state}


@app.handler("bookings", key="account", retry=Retry(attempts=2, delay_ms=1_100, then="park"), into="{bookings}.park")
def park(booking: Booking, message: Message, state: State) -> dict[str, object]:
    """Keys whose messages fail twice wait for an operator."""
    return add(booking, message, state, ARM / "mended.park")


@app.handler(
    "bookings",
    key="account",
    into="{bookings}.block",
    retry=Retry(attempts=2, delay_ms=1_100, max_delay_ms=2_200, then="block"),
)
def block(booking: Booking, message: Message, state: State) -> dict[str, object]:
    """Keys whose messages fail wait until these succeed."""
    return add(booking, message, state, ARM / "mended.block")
