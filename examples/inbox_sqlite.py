"""Effects in your own SQL database that take place once, here SQLite. docs/exactly-once-sql.md explains it."""

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass

from millstream import App, Message, Reject
from millstream.handlers import Inbox

app = App("bank")
inbox = Inbox("bank.book", paramstyle=sqlite3.paramstyle)

PLACE = os.environ.get("BANK_DB", "bank.db")
SCHEMA = "CREATE TABLE IF NOT EXISTS accounts (account TEXT PRIMARY KEY, balance INTEGER NOT NULL)"


def connect() -> sqlite3.Connection:
    """Open the database, and create missing tables."""
    connection = sqlite3.connect(PLACE, timeout=60)
    connection.execute(SCHEMA)
    inbox.create_tables(connection)
    return connection


@dataclass
class Payment:
    """One payment, an entry of the stream."""

    account: str
    cents: int


@app.handler("payments", key="account")
def book(payment: Payment, message: Message) -> None:
    """Add a payment to its account's balance, once, even if this process is killed at any point."""
    if payment.cents == 0:
        raise Reject("a payment of nothing")
    with closing(connect()) as connection, inbox.once(connection, message) as fresh:
        if fresh:
            connection.execute(
                "INSERT INTO accounts VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET balance = balance + excluded.balance",
                (payment.account, payment.cents),
            )
