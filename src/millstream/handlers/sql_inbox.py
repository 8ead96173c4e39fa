"""Effects in the user's own SQL database that take place once, although a handler may run again.

What was done is noted in the database itself, in the transaction that does it: the idempotent consumer, or inbox
(Gregor Hohpe and Bobby Woolf, "Enterprise Integration Patterns"), and in the same transaction an older owner of
a key is refused (Martin Kleppmann's fencing tokens). The database decides who comes first; no clock is trusted.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Protocol
from urllib.parse import quote

from millstream.errors import ConfigError, StaleOwner
from millstream.model import Message
from millstream.redis_client.key_names import to_wire

_MARKS = {"qmark": "?", "numeric": ":{0}", "named": ":p{0}", "format": "%s", "pyformat": "%(p{0})s"}
_TABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]{0,50}")
_PLAIN = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")
_IN_TRANSACTION = 2  # libpq's PQTRANS_INTRANS, as psycopg and psycopg2 have it

# The same text for SQLite from 3.24 and PostgreSQL from 9.5 on, but for the places of the parameters.
_SCHEMA = """\
CREATE TABLE IF NOT EXISTS {inbox} (
    consumer TEXT NOT NULL,
    stream TEXT NOT NULL,
    id TEXT NOT NULL,
    seen_ms BIGINT NOT NULL,
    PRIMARY KEY (consumer, stream, id)
);
CREATE INDEX IF NOT EXISTS {index}_seen ON {inbox} (consumer, seen_ms);
CREATE TABLE IF NOT EXISTS {fence} (
    consumer TEXT NOT NULL,
    stream TEXT NOT NULL,
    key_hash TEXT NOT NULL,
    fence BIGINT NOT NULL,
    seen_ms BIGINT NOT NULL,
    PRIMARY KEY (consumer, stream, key_hash)
);
CREATE INDEX IF NOT EXISTS {index}_fence_seen ON {fence} (consumer, seen_ms);
"""
_NOTE = """\
INSERT INTO {inbox} (consumer, stream, id, seen_ms) VALUES ({0}, {1}, {2}, {3})
ON CONFLICT (consumer, stream, id) DO NOTHING"""
_HOLD = """\
INSERT INTO {fence} (consumer, stream, key_hash, fence, seen_ms) VALUES ({0}, {1}, {2}, {3}, {4})
ON CONFLICT (consumer, stream, key_hash) DO UPDATE SET fence = excluded.fence, seen_ms = excluded.seen_ms
WHERE {fence_name}.fence <= excluded.fence"""
_FORGET_INBOX = """\
DELETE FROM {inbox} WHERE (consumer, stream, id) IN
(SELECT consumer, stream, id FROM {inbox} WHERE consumer = {0} AND seen_ms < {1} LIMIT {2})"""
_FORGET_FENCE = """\
DELETE FROM {fence} WHERE (consumer, stream, key_hash) IN
(SELECT consumer, stream, key_hash FROM {fence} WHERE consumer = {0} AND seen_ms < {1} LIMIT {2})"""


class Cursor(Protocol):
    """What is needed of a DB-API 2 cursor (PEP 249)."""

    @property
    def rowcount(self) -> int:
        """Rows that the last statement changed."""

    def execute(self, operation: Any, parameters: Any = ..., /) -> object:
        """Run one statement."""

    def close(self) -> object:
        """Let go of it."""


class Connection(Protocol):
    """What is needed of a DB-API 2 connection (PEP 249)."""

    def cursor(self) -> Any:
        """Return a `Cursor`."""

    def commit(self) -> object:
        """End the transaction."""

    def rollback(self) -> object:
        """Undo the transaction."""


class Inbox:
    """The inbox of one handler in an SQL database: `with inbox.once(connection, message) as fresh: ...`.

    * `consumer`: names who has seen a message; one for each handler, never changed: `app.handler`
    * `paramstyle`: that of the driver: `sqlite3.paramstyle`, `psycopg.paramstyle`
    * `table`: the inbox's table, with its schema if need be; fences are in the table of that name with `_fence`

    Works on SQLite from 3.24 and PostgreSQL from 9.5 on, through any DB-API 2 driver. It holds no connection: threads
    share it, each with a connection of its own. Raises ConfigError for a parameter style or a table that cannot be.
    """

    def __init__(self, consumer: str, *, paramstyle: str, table: str = "millstream_inbox") -> None:
        if paramstyle not in _MARKS:
            raise ConfigError(
                f"{paramstyle!r} is no parameter style of PEP 249: give the driver's own, like sqlite3.paramstyle"
            )
        if not _TABLE.fullmatch(table):
            raise ConfigError(f"{table!r} cannot be a table of the inbox: use letters, digits and '_', as in app.inbox")
        self._consumer = consumer
        self._paramstyle = paramstyle
        self._table = table
        self.schema = self._sql(_SCHEMA)
        """The statements that create its tables, for those who keep them with their own migrations."""
        self._note, self._hold = self._sql(_NOTE), self._sql(_HOLD)
        self._forget = (self._sql(_FORGET_INBOX), self._sql(_FORGET_FENCE))

    def create_tables(self, connection: Connection) -> None:
        """Create the tables that are not there yet, and commit."""
        for statement in filter(str.strip, self.schema.split(";")):
            self._execute(connection, statement, ())
        connection.commit()

    @contextmanager
    def once(self, connection: Connection, message: Message) -> Iterator[bool]:
        """A transaction that takes `message` into the database once: commits at the end, rolls back if it raises.

        Gives True if the message is fresh, and False if what it does is in the database already. Raises as `fresh`,
        and ConfigError for a connection that commits each statement by itself.
        """
        _refuse_autocommit(connection)
        try:
            yield self.fresh(connection, message)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise

    def fresh(self, connection: Connection, message: Message) -> bool:
        """Note `message` in the caller's own transaction; False if it was noted before. The caller commits.

        Waits while another transaction has the same message, or its key, in hand. Raises StaleOwner if a newer owner
        has been at its key: roll back and let the message go. Raises ConfigError outside a transaction.
        """
        if not _in_transaction(connection):
            _refuse_autocommit(connection)
        # Quoted: PostgreSQL takes neither NUL nor broken Unicode as text. Hashed: an index takes no long key.
        stream = quote(to_wire(message.stream), safe=_PLAIN)
        now_ms = time.time_ns() // 1_000_000
        if message.key is not None:
            key = blake2b(message.key, digest_size=16).hexdigest()
            if not self._changed(connection, self._hold, (self._consumer, stream, key, message.fence, now_ms)):
                raise StaleOwner(f"a newer owner has been at the key of {message.stream} {message.id}: nothing is done")
        return self._changed(connection, self._note, (self._consumer, stream, message.id, now_ms)) == 1

    def purge(self, connection: Connection, *, older_than_ms: float, batch: int = 1_000) -> int:
        """Delete what was noted more than `older_than_ms` milliseconds ago and return how many rows that was.

        In transactions of at most `batch` rows, so that nobody waits for long. Keep notes for longer than a message
        can take from the database's commit to its commit in Redis, the longest outage included: a message that comes
        again after its note has gone is done again. Raises ConfigError for a batch of nothing.
        """
        before_ms = time.time_ns() // 1_000_000 - int(older_than_ms)
        if batch < 1:
            raise ConfigError(f"purge(batch={batch}): at least 1 row at a time")
        total = 0
        for statement in self._forget:
            deleted = batch
            while deleted == batch:
                deleted = self._changed(connection, statement, (self._consumer, before_ms, batch))
                connection.commit()
                total += deleted
        return total

    def _sql(self, text: str) -> str:
        marks = [_MARKS[self._paramstyle].format(place) for place in range(1, 6)]
        fence = f"{self._table}_fence"
        names = {"inbox": self._table, "fence": fence}
        # An index lives in its table's schema and may not name it; nor may a reference to the table's old row.
        bare = {"index": self._table.rpartition(".")[2], "fence_name": fence.rpartition(".")[2]}
        return text.format(*marks, **names, **bare)

    def _changed(self, connection: Connection, statement: str, values: Sequence[str | int]) -> int:
        changed = self._execute(connection, statement, values)
        if changed < 0:  # which PEP 249 allows, and which must not be taken for "fresh"
            raise ConfigError(
                "the database driver does not say how many rows were changed: the inbox needs one that does"
            )
        return changed

    def _execute(self, connection: Connection, statement: str, values: Sequence[str | int]) -> int:
        parameters: object = tuple(values)
        if values and self._paramstyle in ("named", "pyformat"):
            parameters = {f"p{place}": value for place, value in enumerate(values, start=1)}
        cursor: Cursor = connection.cursor()
        try:
            cursor.execute(statement, parameters)
            return cursor.rowcount
        finally:
            cursor.close()


def _in_transaction(connection: Any) -> bool:
    found = getattr(connection, "in_transaction", None)  # sqlite3
    if found is None:
        found = getattr(getattr(connection, "info", None), "transaction_status", None) == _IN_TRANSACTION  # psycopg
    return bool(found)


def _refuse_autocommit(connection: Any) -> None:
    # A note that is committed before the effects is a lost message, so this must not go by unnoticed.
    autocommit = getattr(connection, "autocommit", None)
    legacy_sqlite = hasattr(connection, "in_transaction") and autocommit is not False
    if autocommit is True or (legacy_sqlite and getattr(connection, "isolation_level", "") is None):
        raise ConfigError(
            "the connection commits each statement by itself, so the inbox could not be one with your writes: "
            "open it without autocommit (sqlite3: not isolation_level=None)"
        )
