"""`millstream relay postgres` on a real PostgreSQL: each committed row is in the stream once, in order."""

import json
import os
import re
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from subprocess import run as run_program
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from millstream.admin.acl import RoleName, acl_rule
from millstream.errors import ConfigError, OutputError
from millstream.producer.postgres_relay import CLAIM, SCHEMA, PostgresRelay
from millstream.producer.session import Batch, ProducerSession
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import StreamKeys
from tests.support.commandline import call, ended, environment, running
from tests.support.databases import postgres_server
from tests.support.json_reference import faults, sections
from tests.support.pages import write_files
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("relay")]

PAGE = "docs/guides/relay-postgres.md"
MANY_ROWS = "INSERT INTO outbox (message) SELECT jsonb_build_object('n', n) FROM generate_series(1, %s) n"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as address:
        yield address


@pytest.fixture
def database(server: str) -> Iterator[psycopg.Connection]:
    """A connection to an empty database."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        yield connection


@pytest.fixture
def relay(client: Client, server: str, database: psycopg.Connection) -> Iterator[PostgresRelay]:
    relay = PostgresRelay(client, "orders", database=server)
    relay.run(threading.Event(), poll_ms=1, once=True, create_tables=True)
    yield relay
    relay.close()


def insert(connection: psycopg.Connection, *messages: str) -> None:
    for message in messages:
        connection.execute("INSERT INTO outbox (message) VALUES (%s)", (message,))


def published(client: Client) -> list[list[bytes]]:
    return [pairs for _, pairs in client.execute("XRANGE", "orders", "-", "+")]


def numbers(client: Client) -> list[int]:
    return [int(pairs[1]) for pairs in published(client)]


def left(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT count(*) FROM outbox").fetchone()
    assert row is not None
    return int(row[0])


def test_the_values_of_a_row_become_fields(relay: PostgresRelay, database: psycopg.Connection, client: Client) -> None:
    insert(
        database,
        '{"n": 12345678901234567890.10, "a": "x \\" \\u00e9", "b": true, "c": null, "d": [1, {"e": "f"}], "g": ""}',
    )
    assert relay.move_batch() == 1
    (pairs,) = published(client)
    found = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert found == {
        b"n": b"12345678901234567890.10",
        b"a": 'x " é'.encode(),
        b"b": b"true",
        b"d": b'[1, {"e": "f"}]',
        b"g": b"",
    }
    assert left(database) == 0


def test_a_row_that_is_committed_late_is_published_after_rows_with_higher_ids(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client
) -> None:
    with psycopg.connect(server) as late, psycopg.connect(server) as given_up:
        insert(late, '{"n": 1}')
        insert(given_up, '{"n": 2}')
        insert(database, '{"n": 3}')
        assert relay.move_batch() == 1
        given_up.rollback()
        late.commit()
        insert(database, '{"n": 4}')
        assert relay.move_batch() == 2
    assert numbers(client) == [3, 1, 4]
    assert left(database) == 0


def test_a_batch_that_was_published_and_not_deleted_is_skipped_and_later_rows_follow(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client
) -> None:
    insert(database, *(f'{{"n": {n}}}' for n in range(700)))
    database.execute("CREATE TABLE copy AS SELECT * FROM outbox")
    assert relay.move_batch() == 500
    # As a relay leaves it that dies before the deletion is committed.
    database.execute(
        "INSERT INTO outbox (id, message, relay_batch) "
        "SELECT id, message, batch FROM copy, outbox_relay ORDER BY id LIMIT 500"
    )
    other = PostgresRelay(client, "orders", database=server)
    assert [other.move_batch() for _ in range(3)] == [500, 200, 0]
    other.close()
    assert numbers(client) == list(range(700))
    assert left(database) == 0


def test_a_database_that_has_lost_the_last_commits_loses_no_row(
    relay: PostgresRelay, database: psycopg.Connection, client: Client
) -> None:
    database.execute("CREATE TABLE before AS SELECT * FROM outbox_relay")
    insert(database, '{"n": 1}')
    assert relay.move_batch() == 1
    database.execute("UPDATE outbox_relay SET batch = before.batch FROM before")
    insert(database, '{"n": 2}')
    assert relay.move_batch() == 1
    assert numbers(client) == [1, 2]
    # The deletion of a batch is lost, and the batch after it.
    database.execute("INSERT INTO outbox (message, relay_batch) VALUES ('{\"n\": 3}', 7)")
    database.execute("UPDATE outbox_relay SET batch = 7")
    assert [relay.move_batch(), relay.move_batch()] == [1, 1]
    assert numbers(client) == [1, 2, 3]
    assert left(database) == 0


def test_a_database_whose_clock_is_behind_the_last_batch_stops_the_relay_and_loses_no_row(
    relay: PostgresRelay, database: psycopg.Connection, client: Client
) -> None:
    row = database.execute("SELECT token FROM outbox_relay").fetchone()
    assert row is not None
    later = Batch()
    later.add((b"n",), [b"0"])
    ahead = ProducerSession(client, "orders", token=row[0], patience_ms=0, sequence=2**52)
    assert ahead.send(later)
    insert(database, '{"n": 1}')
    assert relay.move_batch() == 1
    with pytest.raises(ConfigError, match="delete the row of the relay's record"):
        relay.move_batch()
    assert left(database) == 1


def test_relays_that_create_the_tables_at_once_all_start(server: str, client: Client) -> None:
    def create(_: int) -> None:
        with closing(PostgresRelay(client, "orders", database=server)) as relay:
            relay.create_tables()

    for _ in range(10):
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS outbox, outbox_relay")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(create, range(4)))


def test_a_database_that_only_reads_is_waited_for(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    name = conninfo_to_dict(server)["dbname"]
    database.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    stopping = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stopping,), kwargs={"poll_ms": 1})
    try:
        insert(database, '{"n": 1}')
        thread.start()
        eventually(lambda: "PostgreSQL is unavailable" in caplog.text)
        database.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        eventually(lambda: numbers(client) == [1])
    finally:
        database.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
        stopping.set()
        thread.join()


def test_a_relay_waits_ten_seconds_for_a_lock_and_holds_none_for_ever(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    insert(database, '{"n": 1}')
    stopping = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stopping,), kwargs={"poll_ms": 1})
    with psycopg.connect(server) as holder:
        holder.execute("SELECT * FROM outbox_relay FOR UPDATE")
        thread.start()
        try:
            eventually(lambda: "lock timeout" in caplog.text)
            holder.rollback()
            eventually(lambda: numbers(client) == [1])
        finally:
            stopping.set()
            thread.join()


def test_redis_keeps_the_number_of_the_last_batch_for_a_year(
    relay: PostgresRelay, database: psycopg.Connection, client: Client
) -> None:
    insert(database, '{"n": 1}')
    relay.move_batch()
    row = database.execute("SELECT token FROM outbox_relay").fetchone()
    assert row is not None
    assert client.execute("TTL", StreamKeys("orders").producer(row[0])) > 365 * 86_400


def test_a_batch_has_about_a_megabyte(relay: PostgresRelay, database: psycopg.Connection, client: Client) -> None:
    insert(database, *(f'{{"n": {n}, "text": "{"x" * 400_000}"}}' for n in range(5)))
    assert [relay.move_batch() for _ in range(3)] == [3, 2, 0]
    assert numbers(client) == list(range(5))


def test_relays_at_once_publish_each_row_once(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client
) -> None:
    stopping = threading.Event()
    relays = [PostgresRelay(client, "orders", database=server) for _ in range(3)]
    threads = [threading.Thread(target=one.run, args=(stopping,), kwargs={"poll_ms": 1}) for one in relays]
    for thread in threads:
        thread.start()
    try:
        for at in range(0, 1_000, 20):
            insert(database, *(f'{{"n": {n}}}' for n in range(at, at + 20)))
        eventually(lambda: left(database) == 0, "an empty outbox")
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert numbers(client) == list(range(1_000))


@pytest.mark.parametrize("message", ["{}", '{"": 1}', '{"a": null}', json.dumps({f"f{n}": 1 for n in range(4_000)})])
def test_a_row_that_cannot_be_an_entry_stops_the_relay_until_it_is_deleted(
    message: str, relay: PostgresRelay, database: psycopg.Connection, client: Client
) -> None:
    insert(database, '{"n": 1}', message, '{"n": 3}')
    with pytest.raises(OutputError, match="the row 2 of outbox"):
        relay.move_batch()
    assert numbers(client) == []
    database.execute("DELETE FROM outbox WHERE id = 2")
    assert relay.move_batch() == 2
    assert numbers(client) == [1, 3]


def test_the_rows_of_a_table_go_to_one_stream(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client
) -> None:
    other = PostgresRelay(client, "others", database=server)
    with pytest.raises(ConfigError, match="go to the stream orders, not to others"):
        other.run(threading.Event(), poll_ms=1, once=True)


def test_the_command_moves_the_rows_of_a_table_in_a_schema_and_ends(
    client: Client, server: str, database: psycopg.Connection
) -> None:
    table = ("--database", server, "--table", "sales.Box")
    refused = call("relay", "postgres", "orders", *table, "--once", url=client.url)
    assert (refused.code, refused.err.count("\n")) == (2, 2)
    assert "--create-tables" in refused.err
    database.execute("CREATE SCHEMA sales")
    assert call("relay", "postgres", "orders", *table, "--once", "--create-tables", url=client.url).code == 0
    database.execute(
        "INSERT INTO sales.\"Box\" (message) SELECT jsonb_build_object('n', n) FROM generate_series(0, 9) n"
    )
    done = call("relay", "postgres", "orders", *table, "--once", "--json", url=client.url)
    page = sections()["relay postgres"]
    assert [fault for event in done.json_lines() for fault in faults(page, event)] == []
    assert done.json_lines()[-1] == {"event": "stopped", "rows": 10}
    assert numbers(client) == list(range(10))


@pytest.mark.parametrize("table", ["", "a.b.c", ".a", "a."])
def test_a_table_needs_a_name(table: str, client: Client) -> None:
    assert call("relay", "postgres", "s", "--table", table, url=client.url).code == 2


def test_neither_a_wrong_nor_a_refused_connection_string_shows_its_password(client: Client, tmp_path: Path) -> None:
    for wrong in ("host=x sesame'", "postgresql://me:open@sesame@127.0.0.1:1/shop"):
        refused = call("--debug", "relay", "postgres", "s", "--database", wrong, url=client.url)
        assert refused.code == 2
        assert "sesame" not in refused.out + refused.err
    log = tmp_path / "log"
    given = ("--database", "postgresql://me:sesame@127.0.0.1:1/shop")
    with (
        log.open("wb") as to,
        running("--debug", "relay", "postgres", "s", *given, url=client.url, stderr=to) as process,
    ):
        eventually(lambda: "PostgreSQL is unavailable" in log.read_text(), log=log.read_text)
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 0
    assert "sesame" not in log.read_text()


def test_the_relay_waits_for_postgresql_and_goes_on(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stopping,), kwargs={"poll_ms": 1})
    thread.start()
    try:
        insert(database, '{"n": 1}')
        eventually(lambda: numbers(client) == [1])
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'millstream relay'"
        )
        insert(database, '{"n": 2}')
        eventually(lambda: numbers(client) == [1, 2] and left(database) == 0)
    finally:
        stopping.set()
        thread.join()
    assert "PostgreSQL is unavailable" in caplog.text


def test_the_role_of_a_producer_is_enough(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client
) -> None:
    client.execute(*acl_rule("relay", [RoleName.PRODUCER], streams=["orders"]).line.split(), ">secret")
    insert(database, '{"n": 1}')
    url = client.url.replace("redis://", "redis://relay:secret@")
    assert call("relay", "postgres", "orders", "--database", server, "--once", url=url).code == 0
    assert numbers(client) == [1]


def test_a_batch_reads_few_blocks_while_an_open_transaction_keeps_rows_that_were_moved(
    relay: PostgresRelay, server: str, database: psycopg.Connection
) -> None:
    with psycopg.connect(server) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM outbox")
        database.execute(MANY_ROWS, (10_000,))
        relay.run(threading.Event(), poll_ms=1, once=True)
        database.execute("VACUUM ANALYZE outbox")  # keeps the rows, and counts none
        database.execute(MANY_ROWS, (500,))
        query = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + CLAIM).format(table=sql.Identifier("outbox"))
        row = database.execute(query, (500, 7, 1_000_000)).fetchone()
    assert row is not None
    (plan,) = row[0]
    assert plan["Plan"]["Shared Hit Blocks"] < 500 * 40
    assert left(database) == 500


def waiting_relay(connection: psycopg.Connection) -> int:
    """The process of PostgreSQL whose relay has read an empty table; 0 if there is none."""
    row = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'millstream relay' AND state = 'idle' "
        "AND query LIKE '%relay_batch IS NULL ORDER BY id LIMIT 1%'"
    ).fetchone()
    return 0 if row is None else int(row[0])


def statements_of_the_page() -> list[str]:
    return re.findall(r"```sql\n(.*?)```", Path(PAGE).read_text(), re.S)


def test_a_relay_that_is_notified_moves_rows_without_a_poll_also_on_a_new_connection(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client
) -> None:
    database.execute(statements_of_the_page()[1])
    hourly = ("--database", server, "--poll", "1h")
    with running("relay", "postgres", "orders", *hourly, url=client.url) as process:
        for number in range(3):
            before = eventually(lambda: waiting_relay(database), "a relay that has read the empty table")
            insert(database, f'{{"n": {number}}}')
            eventually(lambda: len(numbers(client)) == number + 1 and left(database) == 0, "the row")  # noqa: B023 - at once
        database.execute("SELECT pg_terminate_backend(%s)", (before,))
        eventually(lambda: waiting_relay(database) not in (0, before), "a new connection")
        insert(database, '{"n": 3}')
        eventually(lambda: numbers(client) == [0, 1, 2, 3], "the row after the new connection")
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 0, "a stop does not wait for the next poll"


def test_a_relay_with_rows_to_move_keeps_no_notifications(
    relay: PostgresRelay, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, connections = psycopg.connect, list[psycopg.Connection]()

    def remember(**options: Any) -> psycopg.Connection:
        connections.append(connect(**options))
        return connections[-1]

    monkeypatch.setattr(psycopg, "connect", remember)
    for number in range(3):
        insert(database, f'{{"n": {number}}}')
        assert relay.move_batch() == 1
        for _ in range(50):
            database.execute("NOTIFY outbox")
    # The statements of the first receive what was sent before.
    assert [relay.move_batch(), relay.move_batch()] == [0, 0]
    (connection,) = connections
    assert [*connection.notifies(timeout=0)] == []


class WithoutListen(socketserver.BaseRequestHandler):
    """Forwards a connection to PostgreSQL; for LISTEN it sends a statement that no PostgreSQL has, of the same length."""

    behind = ""

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self.behind)
            back = threading.Thread(target=self.forward, args=(server, self.request))
            back.start()
            self.forward(self.request, server)
            back.join()

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data.replace(b'LISTEN "outbox"', b"DO LANGUAGE c''"))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def test_a_relay_polls_where_the_server_has_no_notifications_and_logs_that_once(
    relay: PostgresRelay, server: str, database: psycopg.Connection, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    place = conninfo_to_dict(server)
    handler = type("_", (WithoutListen,), {"behind": f"{place['host']}/.s.PGSQL.5432"})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as pooler:
        threading.Thread(target=pooler.serve_forever).start()
        address = f"host=127.0.0.1 port={pooler.server_address[1]} user=test dbname=postgres sslmode=disable"
        moving, stopping = PostgresRelay(client, "orders", database=address), threading.Event()
        thread = threading.Thread(target=moving.run, args=(stopping,), kwargs={"poll_ms": 1})
        thread.start()
        try:
            insert(database, '{"n": 1}')
            eventually(lambda: numbers(client) == [1] and left(database) == 0, "the row")
            database.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'millstream relay'"
            )
            insert(database, '{"n": 2}')
            eventually(lambda: numbers(client) == [1, 2] and left(database) == 0, "the row after a new connection")
        finally:
            stopping.set()
            thread.join()
            pooler.shutdown()
    logged = [one.getMessage() for one in caplog.records if "notifications" in one.getMessage()]
    assert logged == [
        'outbox has no notifications: language "c" does not support inline code execution; polling for new rows'
    ]


def test_the_page_shows_the_tables_as_they_are_created() -> None:
    shown = statements_of_the_page()[0]
    names = {"table": "outbox", "record": "outbox_relay", "new": "outbox_new", "claimed": "outbox_claimed"}
    assert shown.strip() == SCHEMA.format(**{key: f'"{name}"' for key, name in names.items()}).strip()


def test_the_orders_of_the_page_reach_its_handler(
    client: Client, server: str, database: psycopg.Connection, tmp_path: Path
) -> None:
    place = conninfo_to_dict(server)
    address = {"PGHOST": str(place["host"]), "PGUSER": str(place["user"]), "PGDATABASE": str(place["dbname"])}
    files = write_files(PAGE, tmp_path)
    relay = ("relay", "postgres", "orders", "--database", server, "--once")
    assert call(*relay, "--create-tables", url=client.url).code == 0
    for amount in ("10", "7.5"):
        program = [sys.executable, str(files["order.py"]), "ann", amount]
        run_program(program, env={**os.environ, **address}, check=True)
    assert call(*relay, url=client.url).code == 0
    done = run_program(
        [sys.executable, "-m", "millstream.cli.main", "worker", f"{files['totals.py']}:app", "--once"],
        env=environment(client.url),
        check=False,
    )
    assert done.returncode == 0
    assert [pairs[-1] for _, pairs in client.execute("XRANGE", "totals", "-", "+")] == [b"10.0", b"17.5"]
