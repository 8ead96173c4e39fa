"""The inbox's SQL, as text: one form for SQLite and PostgreSQL, with each driver's own way to write parameters."""

import sqlite3

import pytest

from millstream.errors import ConfigError
from millstream.handlers.sql_inbox import Inbox
from millstream.model import Message

pytestmark = [pytest.mark.worker]


class Spy:
    """A connection that records its calls, and reports that so many rows were changed."""

    def __init__(self, rowcount: int = 1) -> None:
        self.rowcount = rowcount
        self.statements: list[tuple[str, object]] = []

    def cursor(self) -> "Spy":
        return self

    def execute(self, statement: str, parameters: object, /) -> None:
        self.statements.append((" ".join(statement.split()), parameters))

    def close(self) -> None:
        self.statements.append(("close", None))

    def commit(self) -> None:
        self.statements.append(("commit", None))

    def rollback(self) -> None:
        self.statements.append(("rollback", None))


STYLES = {
    "qmark": "?, ?, ?, ?",
    "numeric": ":1, :2, :3, :4",
    "named": ":p1, :p2, :p3, :p4",
    "format": "%s, %s, %s, %s",
    "pyformat": "%(p1)s, %(p2)s, %(p3)s, %(p4)s",
}


@pytest.mark.parametrize("style", STYLES)
def test_parameters_are_written_in_the_style_of_the_driver(style: str) -> None:
    spy = Spy()
    with Inbox("shop.total", paramstyle=style).once(spy, Message("orders", "5-1", ())):
        pass
    statement, parameters = spy.statements[0]
    assert statement == (
        f"INSERT INTO millstream_inbox (consumer, stream, id, seen_ms) VALUES ({STYLES[style]}) "
        "ON CONFLICT (consumer, stream, id) DO NOTHING"
    )
    if style in ("named", "pyformat"):
        assert isinstance(parameters, dict)
        assert list(parameters) == ["p1", "p2", "p3", "p4"]
        parameters = tuple(parameters.values())
    assert isinstance(parameters, tuple)
    assert parameters[:3] == ("shop.total", "orders", "5-1")


def test_the_fencing_token_is_written_before_the_message_in_one_transaction() -> None:
    spy = Spy()
    with Inbox("shop.total", paramstyle="qmark").once(spy, Message("orders", "5-1", (), key=b"k", fence=7)):
        spy.statements.append(("effects", None))
    assert [statement.partition(" (")[0] for statement, _ in spy.statements] == [
        "INSERT INTO millstream_inbox_fence",
        "close",
        "INSERT INTO millstream_inbox",
        "close",
        "effects",
        "commit",
    ]
    assert spy.statements[0][0].endswith("WHERE millstream_inbox_fence.fence <= excluded.fence")


def test_a_table_in_a_schema_is_named_in_full_where_sql_wants_it() -> None:
    inbox = Inbox("shop.total", paramstyle="format", table="app.seen")
    assert "CREATE TABLE IF NOT EXISTS app.seen_fence" in inbox.schema
    assert "CREATE INDEX IF NOT EXISTS seen_fence_seen ON app.seen_fence" in inbox.schema
    spy = Spy()
    inbox.fresh(spy, Message("orders", "5-1", (), key=b"k"))
    assert spy.statements[0][0].startswith("INSERT INTO app.seen_fence (")
    assert spy.statements[0][0].endswith("WHERE seen_fence.fence <= excluded.fence")


def test_a_driver_that_counts_no_rows_is_refused() -> None:
    spy = Spy(rowcount=-1)
    with (
        pytest.raises(ConfigError, match="rowcount"),
        Inbox("a.b", paramstyle="qmark").once(spy, Message("orders", "5-1", ())),
    ):
        pass
    assert spy.statements[-1] == ("rollback", None)


@pytest.mark.parametrize("table", ["", "a b", "a;DROP TABLE x", "a.b.c", "1a", "a" * 60])
def test_a_table_name_that_is_not_valid_is_refused(table: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid table"):
        Inbox("a.b", paramstyle="qmark", table=table)


def test_a_parameter_style_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sqlite3\.paramstyle"):
        Inbox("a.b", paramstyle="dollar")


def test_a_connection_that_commits_each_statement_by_itself_is_refused() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    inbox = Inbox("a.b", paramstyle="qmark")
    inbox.create_tables(connection)
    message = Message("orders", "5-1", ())
    with pytest.raises(ConfigError, match="without autocommit"), inbox.once(connection, message):
        pass
    with pytest.raises(ConfigError, match="without autocommit"):
        inbox.fresh(connection, message)
    connection.execute("BEGIN")  # a transaction of the caller's own is one, but not for `once` to end
    with pytest.raises(ConfigError, match="without autocommit"), inbox.once(connection, message):
        pass
    assert inbox.fresh(connection, message)
    connection.execute("ROLLBACK")
    connection.execute("BEGIN")
    assert inbox.fresh(connection, message)
    connection.close()


def test_a_purge_of_zero_rows_at_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 row"):
        Inbox("a.b", paramstyle="qmark").purge(Spy(), older_than_ms=0, batch=0)
