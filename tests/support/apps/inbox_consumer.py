"""A process that consumes messages into an SQL database, acknowledges them elsewhere, and dies wherever it is told.

Called with one argument, the file of a `Plan` in JSON.
"""

import os
import random
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec

from millstream.handlers.sql_inbox import Inbox
from millstream.model import Message
from tests.support.databases import Database

_STANDS = 0.2
POINTS = ("noted", "written", "uncommitted", "committed", "acknowledged")


class Payment(msgspec.Struct):
    """One message."""

    id: str
    account: str
    amount: int


class Plan(msgspec.Struct):
    """What to consume, and how to die.

    * `acks`: the file where it notes what it has acknowledged: its consumer group, as it were
    * `deaths`: the file where it and its twins note where they were killed
    * `stands`: a file that it creates at a random point, where it then stands still until it is killed; "" for none
    * `chance`: of being killed, at each point of each message; more at a point where none of them was when it started
    """

    database: tuple[str, str]
    payments: list[Payment]
    acks: str
    deaths: str
    seed: int
    chance: float
    stands: str = ""


class Reaper:
    """Kills this process at random, and leaves a note of the point where it did."""

    def __init__(self, plan: Plan) -> None:
        self._random = random.Random(plan.seed)
        self._chance = plan.chance
        self._stands = plan.stands
        self._deaths = Path(plan.deaths)
        self._spared = set(POINTS) - set(self._deaths.read_text().split() if self._deaths.exists() else ())

    def visit(self, point: str) -> None:
        """Die here, or go on."""
        if self._stands:
            if self._random.random() < _STANDS:
                Path(self._stands).touch()
                time.sleep(1_000_000)
            return
        if self._random.random() >= (0.5 if point in self._spared else self._chance):
            return
        append(self._deaths, point)
        if self._random.random() < 0.5:
            os._exit(9)
        os.kill(os.getpid(), signal.SIGKILL)


def append(path: Path, line: str) -> None:
    """Add a line that outlives this process."""
    with path.open("a") as file:
        file.write(f"{line}\n")


def main() -> None:
    """Consume what is not acknowledged, in order."""
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    acks = Path(plan.acks)
    reaper = Reaper(plan)
    database = Database(*plan.database)
    mark = database.mark
    inbox = Inbox("bank.payments", paramstyle=database.paramstyle)
    done = set(acks.read_text().split()) if acks.exists() else set()
    with closing(database.connect()) as connection:
        for payment in plan.payments:
            if payment.id in done:
                continue
            message = Message("payments", payment.id, (), key=payment.account.encode(), fence=1)
            with inbox.once(connection, message) as fresh:
                reaper.visit("noted")
                if fresh:
                    cursor = connection.cursor()
                    cursor.execute(
                        f"UPDATE accounts SET balance = balance + {mark} WHERE account = {mark}",
                        (payment.amount, payment.account),
                    )
                    reaper.visit("written")
                    cursor.execute(
                        f"INSERT INTO entries (account, id, balance) SELECT account, {mark}, balance FROM accounts "
                        f"WHERE account = {mark}",
                        (payment.id, payment.account),
                    )
                    reaper.visit("uncommitted")
            reaper.visit("committed")
            append(acks, payment.id)
            reaper.visit("acknowledged")


if __name__ == "__main__":
    main()
