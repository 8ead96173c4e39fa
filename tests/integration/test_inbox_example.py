"""examples/inbox_sqlite.py does what docs/exactly-once-sql.md says, and the document shows what is tested."""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from examples import inbox_sqlite
from examples.inbox_sqlite import Payment, app, book
from millstream import Message, Reject
from millstream.errors import StaleOwner
from millstream.handlers.sql_inbox import Inbox

pytestmark = [pytest.mark.worker]

ROOT = Path(__file__).parents[2]


def message(entry_id: str, account: str, fence: int = 1) -> Message:
    return Message("payments", entry_id, (), key=account.encode(), fence=fence)


def test_the_example_books_each_payment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "bank.db")
    monkeypatch.setattr(inbox_sqlite, "PLACE", place)
    for _ in range(3):
        book(Payment("ann", 500), message("1-0", "ann", fence=1))
        book(Payment("ann", -200), message("2-0", "ann", fence=1))
        book(Payment("bob", 70), message("2-1", "bob", fence=1))
    book(Payment("ann", 1), message("4-0", "ann", fence=2))
    with pytest.raises(StaleOwner):
        book(Payment("ann", 1_000), message("3-0", "ann", fence=1))
    with pytest.raises(Reject):
        book(Payment("bob", 0), message("5-0", "bob"))
    with closing(sqlite3.connect(place)) as connection:
        assert dict(connection.execute("SELECT account, balance FROM accounts")) == {"ann": 301, "bob": 70}
    assert app.handlers["book"].label == "bank.book"


def test_the_document_shows_the_handler_and_the_tables_as_they_are() -> None:
    text = (ROOT / "docs/exactly-once-sql.md").read_text()
    example = (ROOT / "examples/inbox_sqlite.py").read_text()
    assert example[example.index("@app.handler") :] in text
    assert Inbox("bank.book", paramstyle=psycopg.paramstyle).schema in text
