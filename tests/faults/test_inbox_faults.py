"""Effects in an SQL database, under fire: consumers are killed wherever it hurts, and each payment is booked once."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from millstream.handlers.sql_inbox import Inbox
from tests.support.apps.inbox_consumer import POINTS, Payment, Plan
from tests.support.databases import Database, postgres_server
from tests.support.quick_programs import Program

ROOT = Path(__file__).parents[2]
SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
PAYMENTS = 2_000 if SOAK else 20
ACCOUNTS = 5
SCHEMA = (
    "CREATE TABLE accounts (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)",
    "CREATE TABLE entries (number {serial}, account TEXT, id TEXT, balance INTEGER)",
)

pytestmark = [pytest.mark.worker, pytest.mark.faults]


@contextmanager
def open_database(kind: str, folder: Path) -> Iterator[Database]:
    """An empty bank."""
    if kind == "postgres":
        with postgres_server() as address:
            yield filled(Database("postgres", address), "SERIAL")
    else:
        yield filled(Database("sqlite", str(folder / "bank.db")), "INTEGER PRIMARY KEY AUTOINCREMENT")


def filled(database: Database, serial: str) -> Database:
    with closing(database.connect()) as connection:
        for statement in SCHEMA:
            connection.cursor().execute(statement.format(serial=serial))
        for account in range(ACCOUNTS):
            connection.cursor().execute(f"INSERT INTO accounts VALUES ('{account}', 0)")
        Inbox("bank.payments", paramstyle=database.paramstyle).create_tables(connection)
    return database


def payments() -> list[Payment]:
    draw = random.Random(3)
    return [
        Payment(id=f"{number + 1}-0", account=str(draw.randrange(ACCOUNTS)), amount=draw.randint(-50, 50))
        for number in range(PAYMENTS)
    ]


def expected(given: list[Payment]) -> dict[str, list[tuple[str, int]]]:
    """Each account's entries: payment, balance after it."""
    expectations: dict[str, list[tuple[str, int]]] = {str(account): [] for account in range(ACCOUNTS)}
    for payment in given:
        book = expectations[payment.account]
        book.append((payment.id, (book[-1][1] if book else 0) + payment.amount))
    return expectations


def booked(database: Database) -> dict[str, list[tuple[str, int]]]:
    """What stands in the database."""
    expectations: dict[str, list[tuple[str, int]]] = {str(account): [] for account in range(ACCOUNTS)}
    with closing(database.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT account, id, balance FROM entries ORDER BY number")
        for account, payment, balance in cursor.fetchall():
            expectations[account].append((payment, balance))
    return expectations


def start(plan: Plan) -> "subprocess.Popen[bytes]":
    file = Path(f"{plan.acks}.plan")
    file.write_bytes(msgspec.json.encode(plan))
    return Program([sys.executable, "-m", "tests.support.apps.inbox_consumer", str(file)], cwd=ROOT)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_twin_consumers_that_are_killed_at_every_point_book_each_payment_once_and_in_order(
    kind: str, tmp_path: Path
) -> None:
    given = payments()
    random_kills = random.Random(5)
    killed = 0
    deaths = tmp_path / "deaths"
    with open_database(kind, tmp_path) as database:
        plans = [
            Plan(
                (database.kind, database.place),
                given,
                str(tmp_path / f"acks-{twin}"),
                str(deaths),
                seed=twin,
                chance=0.015,
            )
            for twin in range(2)
        ]
        stands = tmp_path / "stands"
        plans[0].stands = str(stands)
        running = [start(plan) for plan in plans]
        plans[0].stands = ""
        while any(process.poll() != 0 for process in running):
            time.sleep(random_kills.uniform(0.0, 0.1))
            for twin, process in enumerate(running):
                is_standing = not twin and stands.exists()
                if process.poll() is None and (is_standing or random_kills.random() < 0.02):
                    process.kill()  # at a random point: the middle of a commit, for one
                    killed += process.wait() != 0
                    if not twin:
                        stands.unlink(missing_ok=True)
                if process.poll() not in (None, 0):
                    assert process.returncode in (9, -9)
                    plans[twin].seed += 2
                    running[twin] = start(plans[twin])
        assert booked(database) == expected(given)
    for plan in plans:
        assert set(Path(plan.acks).read_text().split()) == {payment.id for payment in given}
    assert set(deaths.read_text().split()) == set(POINTS), "each point must have been hit"
    assert killed
