"""Relays that are killed at random while rows are written: each committed row is in the stream once, in order."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from millstream.redis_client.client import Client
from tests.support.commandline import run, start
from tests.support.databases import postgres_server

pytestmark = [pytest.mark.cli, pytest.mark.faults]

KILLS = 200 if os.environ.get("MILLSTREAM_SOAK") else 5
KEYS = 5
WRITERS = 3


@contextmanager
def writing(address: str) -> Iterator[None]:
    """Transactions that write rows: each takes the next number of its key, and commits late, or not at all."""
    stopping = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(address) as connection:
            while not stopping.is_set():
                connection.execute(
                    "WITH next AS (UPDATE keys SET n = n + 1 WHERE key = %s RETURNING key, n) "
                    "INSERT INTO outbox (message) SELECT jsonb_build_object('key', key, 'n', n) FROM next",
                    (chance.randrange(KEYS),),
                )
                if chance.random() < 0.5:
                    time.sleep(chance.random() / 50)
                if chance.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()

    threads = [threading.Thread(target=write, args=(random.randrange(1 << 30),)) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def test_relays_that_are_killed_at_random_publish_each_committed_row_once_in_order(
    fresh_client: Client, tmp_path: Path
) -> None:
    with postgres_server() as address:
        relay = ("relay", "postgres", "orders", "--database", address, "--poll", "10ms")
        assert run(*relay, "--create-tables", "--once", url=fresh_client.url).code == 0
        with psycopg.connect(address) as connection:
            connection.execute("CREATE TABLE keys (key int PRIMARY KEY, n int)")
            connection.execute("INSERT INTO keys SELECT key, 0 FROM generate_series(0, %s) key", (KEYS - 1,))
        with writing(address):
            for _ in range(KILLS):
                before = fresh_client.execute("XLEN", "orders")
                process = start(*relay, url=fresh_client.url)
                while fresh_client.execute("XLEN", "orders") == before:
                    time.sleep(random.random() / 100)
                    assert process.poll() is None
                time.sleep(random.random() / 10)
                process.kill()
                process.communicate()
        done = run(*relay, "--once", url=fresh_client.url)
        assert done.code == 0, done.err
        with psycopg.connect(address) as connection:
            committed: dict[int, int] = dict(connection.execute("SELECT key, n FROM keys").fetchall())
    found: dict[int, list[int]] = {}
    for _, pairs in fresh_client.execute("XRANGE", "orders", "-", "+"):
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        found.setdefault(int(fields[b"key"]), []).append(int(fields[b"n"]))
    assert found == {key: list(range(1, n + 1)) for key, n in committed.items() if n}
