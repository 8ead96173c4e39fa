"""Inbox: effects in the user's own SQL database that take place once, although a handler may run again.

The transaction that writes the effects also records the message: the idempotent consumer, or inbox (Gregor Hohpe and
Bobby Woolf, "Enterprise Integration Patterns"). It also refuses an older owner of the key (Martin Kleppmann's fencing
tokens). The database decides which transaction comes first; no clock is trusted.
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

_MARKERS = {"qmark": "?", "numeric": ":{0}", "named": ":p{0}", "format": "%s", "pyformat": "%(p{0})s"}
_TABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*\.)?[A-Za-z_][A-Za-z0-9_]{0,50}")
_PLAIN = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")
_IN_TRANSACTION = 2  # libpq's PQTRANS_INTRANS, the value in psycopg and psycopg2

# The same text for SQLite from 3.24 and PostgreSQL from 9.5 on, except for the parameter markers.
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
_RECORD = """\
INSERT INTO {inbox} (consumer, stream, id, seen_ms) VALUES ({0}, {1}, {2}, {3})
ON CONFLICT (consumer, stream, id) DO NOTHING"""
_FENCE = """\
INSERT INTO {fence} (consumer, stream, key_hash, fence, seen_ms) VALUES ({0}, {1}, {2}, {3}, {4})
ON CONFLICT (consumer, stream, key_hash) DO UPDATE SET fence = excluded.fence, seen_ms = excluded.seen_ms
WHERE {fence_name}.fence <= excluded.fence"""
_PURGE_INBOX = """\
DELETE FROM {inbox} WHERE (consumer, stream, id) IN
(SELECT consumer, stream, id FROM {inbox} WHERE consumer = {0} AND seen_ms < {1} LIMIT {2})"""
_PURGE_FENCE = """\
DELETE FROM {fence} WHERE (consumer, stream, key_hash) IN
(SELECT consumer, stream, key_hash FROM {fence} WHERE consumer = {0} AND seen_ms < {1} LIMIT {2})"""


class Cursor(Protocol):
    """The part of a DB-API 2 cursor (PEP 249) that the inbox uses."""

    @property
    def rowcount(self) -> int:
        """Number of rows that the last statement changed."""

    def execute(self, operation: Any, parameters: Any = ..., /) -> object:
        """Run one statement."""

    def close(self) -> object:
        """Close the cursor."""


class Connection(Protocol):
    """The part of a DB-API 2 connection (PEP 249) that the inbox uses."""

    def cursor(self) -> Any:
        """Return a `Cursor`."""

    def commit(self) -> object:
        """Commit the transaction."""

    def rollback(self) -> object:
        """Roll back the transaction."""


class Inbox:
    """The inbox of one handler in an SQL database: `with inbox.once(connection, message) as fresh: ...`.

    * `consumer`: the name under which messages are recorded; one for each handler, never changed: `app.handler`
    * `paramstyle`: the driver's: `sqlite3.paramstyle`, `psycopg.paramstyle`
    * `table`: the inbox's table, with its schema if needed; the fencing tokens are in the table `..._fence`

    Works on SQLite from 3.24 and PostgreSQL from 9.5 on, through any DB-API 2 driver. It holds no connection: threads
    share it, each with a connection of its own. Raises ConfigError for an invalid parameter style or table.
    """

    def __init__(self, consumer: str, *, paramstyle: str, table: str = "millstream_inbox") -> None:
        if paramstyle not in _MARKERS:
            raise ConfigError(
                f"{paramstyle!r} is not a parameter style of PEP 249: give the driver's own, like sqlite3.paramstyle"
            )
        if not _TABLE.fullmatch(table):
            raise ConfigError(
                f"{table!r} is not a valid table of the inbox: use letters, digits and '_', as in app.inbox"
            )
        self._consumer = consumer
        self._paramstyle = paramstyle
        self._table = table
        self.schema = self._sql(_SCHEMA)
        """The statements that create its tables, for use in the application's own migrations."""
        self._record, self._set_fence = self._sql(_RECORD), self._sql(_FENCE)
        self._purge = (self._sql(_PURGE_INBOX), self._sql(_PURGE_FENCE))

    def create_tables(self, connection: Connection) -> None:
        """Create missing tables, and commit."""
        for statement in filter(str.strip, self.schema.split(";")):
            self._execute(connection, statement, ())
        connection.commit()

    @contextmanager
    def once(self, connection: Connection, message: Message) -> Iterator[bool]:
        """Open a transaction for the effects of `message`: it commits at the end, and rolls back if the block raises.

        Yields True if the message is new, and False if its effects are in the database already. Raises as `fresh`, and
        ConfigError for a connection in autocommit mode.
        """
        _refuse_autocommit(connection)
        try:
            yield self.fresh(connection, message)
            connection.commit()
        except BaseException:  # of any kind: a transaction left open may later commit the record without its effects
            connection.rollback()
            raise

    def fresh(self, connection: Connection, message: Message) -> bool:
        """Record `message` in the caller's own transaction; False if it was recorded before. The caller commits.

        Blocks while another open transaction has recorded the same message or key. Raises StaleOwner if a newer owner
        has recorded the key: roll back and drop the message. Raises ConfigError for an autocommit connection outside a
        transaction.
        """
        if not _in_transaction(connection):
            _refuse_autocommit(connection)
        # Quoted: PostgreSQL text allows neither NUL nor invalid Unicode. Hashed: an index allows no long keys.
        stream = quote(to_wire(message.stream), safe=_PLAIN)
        now_ms = time.time_ns() // 1_000_000
        if message.key is not None:
            key = blake2b(message.key, digest_size=16).hexdigest()
            if not self._execute_counted(
                connection, self._set_fence, (self._consumer, stream, key, message.fence, now_ms)
            ):
                raise StaleOwner(
                    f"a newer owner has recorded the key of {message.stream} {message.id}; nothing was written"
                )
        return self._execute_counted(connection, self._record, (self._consumer, stream, message.id, now_ms)) == 1

    def purge(self, connection: Connection, *, older_than_ms: float, batch: int = 1_000) -> int:
        """Delete records older than `older_than_ms` milliseconds; return the number of rows deleted.

        Each transaction deletes at most `batch` rows, so that other transactions wait only briefly. Keep records for
        longer than a message can take from the database's commit to its commit in Redis, the longest outage included: a
        message that is redelivered after its record was deleted takes effect again. Raises ConfigError for a batch
        below 1.
        """
        before_ms = time.time_ns() // 1_000_000 - int(older_than_ms)
        if batch < 1:
            raise ConfigError(f"purge(batch={batch}): at least 1 row at a time")
        total = 0
        for statement in self._purge:
            deleted = batch
            while deleted == batch:
                deleted = self._execute_counted(connection, statement, (self._consumer, before_ms, batch))
                connection.commit()
                total += deleted
        return total

    def _sql(self, text: str) -> str:
        markers = [_MARKERS[self._paramstyle].format(number) for number in range(1, 6)]
        fence = f"{self._table}_fence"
        names = {"inbox": self._table, "fence": fence}
        # An index lives in its table's schema and must not name it; nor may a reference to the table's old row.
        bare = {"index": self._table.rpartition(".")[2], "fence_name": fence.rpartition(".")[2]}
        return text.format(*markers, **names, **bare)

    def _execute_counted(self, connection: Connection, statement: str, values: Sequence[str | int]) -> int:
        changed = self._execute(connection, statement, values)
        if changed < 0:  # PEP 249 allows it, and it must not pass for "fresh"
            raise ConfigError("the database driver reports no rowcount: the inbox needs a driver that does")
        return changed

    def _execute(self, connection: Connection, statement: str, values: Sequence[str | int]) -> int:
        parameters: object = tuple(values)
        if values and self._paramstyle in ("named", "pyformat"):
            parameters = {f"p{number}": value for number, value in enumerate(values, start=1)}
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
    # A record that is committed before the effects would lose the message, so autocommit is refused.
    autocommit = getattr(connection, "autocommit", None)
    legacy_sqlite = hasattr(connection, "in_transaction") and autocommit is not False
    if autocommit is True or (legacy_sqlite and getattr(connection, "isolation_level", "") is None):
        raise ConfigError(
            "the connection is in autocommit mode, so the inbox and your writes would not be one transaction: open it "
            "without autocommit (sqlite3: not isolation_level=None)"
        )
