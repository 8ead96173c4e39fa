"""The inbox on real databases: a message takes effect once, an older owner of its key not at all."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millstream.errors import ConfigError, StaleOwner
from millstream.handlers.sql_inbox import Inbox
from millstream.model import Message
from tests.support.databases import Database, postgres_server
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("inbox")]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty database with one table of the user's own, `effects`."""
    if request.param == "sqlite":
        database = Database("sqlite", str(tmp_path / "effects.db"))
    else:
        database = Database("postgres", request.getfixturevalue("postgres"))
    with closing(database.connect()) as connection:
        for table in ("effects", "millstream_inbox", "millstream_inbox_fence"):
            connection.cursor().execute(f"DROP TABLE IF EXISTS {table}")
        connection.cursor().execute("CREATE TABLE effects (id TEXT)")
        Inbox("shop.total", paramstyle=database.paramstyle).create_tables(connection)
    return database


@pytest.fixture
def inbox(database: Database) -> Inbox:
    return Inbox("shop.total", paramstyle=database.paramstyle)


@pytest.fixture
def connection(database: Database) -> Iterator[Any]:
    with closing(database.connect()) as connection:
        yield connection


def message(entry_id: str, *, stream: str = "orders", key: bytes | None = None, fence: int = 0) -> Message:
    return Message(stream=stream, id=entry_id, pairs=(), key=key, fence=fence)


def write(connection: Any, entry_id: str) -> None:
    """The user's effect of a message."""
    connection.cursor().execute(f"INSERT INTO effects VALUES ('{entry_id}')")


def effects(database: Database) -> list[str]:
    """What is committed, as another connection sees it."""
    with closing(database.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT id FROM effects ORDER BY id")
        return [row[0] for row in cursor.fetchall()]


def run(inbox: Inbox, connection: Any, given: Message) -> bool:
    with inbox.once(connection, given) as fresh:
        if fresh:
            write(connection, given.id)
    return fresh


@pytest.mark.parametrize("key", [None, b"customer"])
def test_a_repeated_message_is_skipped(database: Database, inbox: Inbox, connection: Any, key: bytes | None) -> None:
    assert [run(inbox, connection, message("5-1", key=key)) for _ in range(3)] == [True, False, False]
    assert effects(database) == ["5-1"]


def test_messages_are_distinguished_by_stream_id_and_consumer(
    database: Database, inbox: Inbox, connection: Any
) -> None:
    other = Inbox("shop.other", paramstyle=database.paramstyle)
    assert run(inbox, connection, message("5-1"))
    assert run(inbox, connection, message("5-10"))
    assert run(inbox, connection, message("5-1", stream="returns"))
    assert run(other, connection, message("5-1"))
    assert not run(inbox, connection, message("5-1"))


def test_a_handler_that_raises_leaves_no_effects_and_its_message_is_fresh_again(
    database: Database, inbox: Inbox, connection: Any
) -> None:
    def failing() -> None:
        with inbox.once(connection, message("5-1", key=b"k", fence=3)):
            write(connection, "5-1")
            raise LookupError

    with pytest.raises(LookupError):
        failing()
    assert effects(database) == []
    assert run(inbox, connection, message("5-1", key=b"k", fence=2)), "the fence was rolled back too"
    assert effects(database) == ["5-1"]


def test_an_older_owner_of_a_key_is_refused_and_writes_nothing(
    database: Database, inbox: Inbox, connection: Any
) -> None:
    assert run(inbox, connection, message("5-1", key=b"k", fence=1))
    assert run(inbox, connection, message("7-1", key=b"k", fence=2_000_000_000_000_000))
    with pytest.raises(StaleOwner, match=r"orders 6-1"):
        run(inbox, connection, message("6-1", key=b"k", fence=1))
    assert run(inbox, connection, message("6-2", key=b"other", fence=1)), "its other keys are its own"
    assert run(inbox, connection, message("8-1", key=b"k", fence=2_000_000_000_000_000))
    assert effects(database) == ["5-1", "6-2", "7-1", "8-1"]


def test_a_fencing_token_belongs_to_a_key_of_one_stream(inbox: Inbox, connection: Any) -> None:
    assert run(inbox, connection, message("5-1", key=b"k", fence=9))
    assert run(inbox, connection, message("5-1", stream="returns", key=b"k", fence=1))


def test_names_and_keys_of_any_bytes_are_distinguished(inbox: Inbox, connection: Any) -> None:
    streams = ["a", "a\x00", "a\udcff", "a%00", "ä", "a b", "{a}:b"]
    assert all(run(inbox, connection, message("5-1", stream=stream, key=b"\x00\xff")) for stream in streams)
    assert not any(run(inbox, connection, message("5-1", stream=stream, key=b"\x00\xff")) for stream in streams)
    assert run(inbox, connection, message("6-1", key=b"x" * 1_000_000))


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_twin_waits_for_the_first_transaction_and_runs_only_if_that_rolls_back(
    database: Database, inbox: Inbox, connection: Any, ending: str
) -> None:
    assert inbox.fresh(connection, message("5-1", key=b"k", fence=1))
    write(connection, "5-1")
    found: list[bool] = []

    def twin() -> None:
        with closing(database.connect()) as other:
            found.append(run(inbox, other, message("5-1", key=b"k", fence=2)))

    thread = threading.Thread(target=twin)
    thread.start()
    time.sleep(0.2)  # so that it could have done it
    assert not found
    getattr(connection, ending)()
    thread.join(FAIL_SAFE_S)
    assert found == [ending == "rollback"]
    assert effects(database) == ["5-1"]


def test_many_threads_process_each_message_once(database: Database, inbox: Inbox) -> None:
    fresh: list[str] = []

    def work() -> None:
        with closing(database.connect()) as connection:
            for number in range(40):
                given = message(f"{number}-0", key=b"%d" % (number % 3), fence=1)
                if run(inbox, connection, given):
                    fresh.append(given.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert sorted(fresh) == effects(database) == sorted(f"{number}-0" for number in range(40))


def test_a_batch_of_messages_can_be_one_transaction_of_the_caller(
    database: Database, inbox: Inbox, connection: Any
) -> None:
    batch = [message(f"{number}-0", key=b"k", fence=1) for number in range(3)]
    assert run(inbox, connection, batch[1])
    assert [inbox.fresh(connection, each) for each in batch] == [True, False, True]
    connection.rollback()
    assert [inbox.fresh(connection, each) for each in batch] == [True, False, True]
    connection.commit()
    assert [inbox.fresh(connection, each) for each in batch] == [False, False, False]
    connection.rollback()


def test_only_old_rows_are_purged_in_small_transactions(database: Database, inbox: Inbox, connection: Any) -> None:
    other = Inbox("shop.other", paramstyle=database.paramstyle)
    for number in range(7):
        run(inbox, connection, message(f"{number}-0", key=b"%d" % number, fence=1))
    run(other, connection, message("0-0"))
    for table in ("millstream_inbox", "millstream_inbox_fence"):
        connection.cursor().execute(f"UPDATE {table} SET seen_ms = seen_ms - 100000")
    connection.commit()
    run(inbox, connection, message("9-0", key=b"9", fence=1))
    assert inbox.purge(connection, older_than_ms=200_000) == 0
    assert inbox.purge(connection, older_than_ms=50_000, batch=3) == 14
    assert not run(inbox, connection, message("9-0", key=b"9", fence=1))
    assert not run(other, connection, message("0-0"))
    assert run(inbox, connection, message("1-0"))


def test_the_tables_of_the_inbox_can_be_created_again(inbox: Inbox, connection: Any) -> None:
    run(inbox, connection, message("5-1"))
    inbox.create_tables(connection)
    assert not run(inbox, connection, message("5-1"))


def test_postgres_in_autocommit_is_refused_unless_a_transaction_is_open(postgres: str) -> None:
    inbox = Inbox("shop.auto", paramstyle=psycopg.paramstyle)
    with psycopg.connect(postgres, autocommit=True) as connection:
        inbox.create_tables(connection)
        with pytest.raises(ConfigError, match="without autocommit"), inbox.once(connection, message("5-1")):
            pass
        with pytest.raises(ConfigError, match="without autocommit"):
            inbox.fresh(connection, message("5-1"))
        with connection.transaction(force_rollback=True):
            assert inbox.fresh(connection, message("5-1"))
        with connection.transaction():
            assert inbox.fresh(connection, message("5-1"))
        with connection.transaction():
            assert not inbox.fresh(connection, message("5-1"))


def test_the_tables_can_be_in_a_schema_of_postgres(postgres: str) -> None:
    inbox = Inbox("shop.total", paramstyle=psycopg.paramstyle, table="app.seen")
    with psycopg.connect(postgres) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS app")
        inbox.create_tables(connection)
        given = message("5-1", key=b"k", fence=5)
        assert inbox.fresh(connection, given)
        assert not inbox.fresh(connection, given)
        with pytest.raises(StaleOwner):
            inbox.fresh(connection, message("6-1", key=b"k", fence=4))
