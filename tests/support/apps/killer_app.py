"""An app whose processes end themselves, by SIGKILL, at exactly the points that a test arms.

A point is armed by a file of its name in the folder MILLSTREAM_TEST_ARM. The process that reaches the point first takes the
file, writes down what it hit, and is gone. The hooks wrap the product's own steps from outside.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream import App, Message, Reject, Retry, State
from millstream.delivery.commit_store import CommitStore

app = App("bank")

ARM = Path(os.environ["MILLSTREAM_TEST_ARM"])


def reach(point: str) -> None:
    """End this process if `point` is armed."""
    armed = ARM / point
    if not armed.exists():
        return
    hit = ARM / f"hit.{point}.{os.getpid()}.{time.time_ns()}"
    try:
        armed.rename(hit)
    except FileNotFoundError:
        return  # another process was faster
    os.kill(os.getpid(), signal.SIGKILL)


def _after(step: Callable[..., Any], point: str) -> Callable[..., Any]:
    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        reach(point)
        return result

    return stepped


CommitStore.commit = _after(CommitStore.commit, "between-commit-and-end-of-task")  # type: ignore[method-assign]
CommitStore.advance_committed = _after(CommitStore.advance_committed, "between-last-task-and-commit-log")  # type: ignore[method-assign]


@dataclass
class Booking:
    account: str
    n: int
    amount: int
    poison: str | None = None


@app.handler("bookings", key="account", retry=Retry(attempts=3, delay_ms=1), into="{bookings}.balances")
def book(booking: Booking, message: Message, state: State) -> dict[str, object]:
    """Keep a balance; refuse some bookings; fail once or die on request."""
    reach("between-load-and-commit")
    if booking.poison == "reject":
        raise Reject("refused by the bank")
    if booking.poison == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    state["count"] = state.get("count", 0) + 1
    if booking.poison == "flaky" and message.attempt == 1:
        state["spoilt"] = True  # a failed attempt must leave no trace
        raise RuntimeError("only the second attempt works")
    state["balance"] = state.get("balance", 0) + booking.amount
    return {"account": booking.account, "n": booking.n, "id": message.id, **state}


@app.handler("bookings", key="account", retry=Retry(attempts=3, delay_ms=1), into="{bookings}.lists", batch_size=20)
def book_lists(bookings: list[Booking], messages: list[Message], state: State) -> list[dict[str, object]]:
    """As `book`, on lists of bookings of one account."""
    return [book(booking, message, state) for booking, message in zip(bookings, messages, strict=True)]
