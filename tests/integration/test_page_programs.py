"""The Python of the pages runs as it is printed. Excerpts get the names that their page takes for granted."""

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import psycopg
import pytest

from millstream import App, Message, State
from millstream.balancer import Balancer, announce
from millstream.delivery import DeadLetterFilter, DeadLetterQueue, DelayedMessages, ReliableStream
from millstream.groups import Reader, ReadPolicy
from millstream.handlers import Inbox
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys
from millstream.testing import run
from millstream.testing.history import HistoryError
from millstream.testing.topologies import cluster
from tests.support.commandline import reserved_port
from tests.support.consoles import client_of, fill_with
from tests.support.databases import postgres_server
from tests.support.pages import ROOT, run_python, run_tests
from tests.support.replicas import FOLLOWS
from tests.support.service_process import get
from tests.support.waiting import FAIL_SAFE_S, eventually, eventually_async

pytestmark = [pytest.mark.cli]


@dataclass
class Order:
    """What handlers of the pages are given."""

    customer: str = ""
    order_id: str = ""


class EndOfTest(BaseException):
    """Leaves a loop that a page lets run for ever."""


def in_redis(url: str, *printed: str) -> dict[str, str]:
    """The addresses that a page prints, and that of the test."""
    return dict.fromkeys(printed or ("redis://127.0.0.1:6379/0",), url)


@contextmanager
def program(text_of: str, folder: Path, url: str, *, number: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """A Python block of a page as a program, which is interrupted at the end of the block."""
    code = "import sys\nfrom tests.support.pages import run_python\n"
    code += f"run_python({text_of!r}, replaced={in_redis(url)!r}, only=[{number}])\n"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        process.wait(FAIL_SAFE_S)
    finally:
        process.kill()
        process.communicate()


# --- Streams and groups ---


def test_the_reader_of_the_page_on_groups_acknowledges_all(client: Client, tmp_path: Path) -> None:
    client.execute("XADD", "orders", "*", "customer", "ann")

    def group() -> Mapping[bytes, int]:
        found = client.execute("XINFO", "GROUPS", "orders")
        return dict(zip(found[0][::2], found[0][1::2], strict=True)) if found else {}

    with program("docs/consumer-groups.md", tmp_path, client.url):
        eventually(lambda: group().get(b"entries-read") == 1 and group()[b"pending"] == 0, "an acknowledged entry")


def test_the_reader_of_the_page_on_groups_moves_away_what_fails_too_often(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute("XGROUP", "CREATE", "orders", "billing", "0", "MKSTREAM")
    ids = [client.execute("XADD", "orders", "*", "n", word).decode() for word in ("hopeless", "good", "bad")]
    client.execute("XREADGROUP", "GROUP", "billing", "earlier", "COUNT", 1, "STREAMS", "orders", ">")
    claim = ("XCLAIM", "orders", "billing", "earlier", 0, ids[0], "IDLE", 3_600_000, "RETRYCOUNT", 20)
    client.execute(*claim)

    def process(message: Any) -> None:
        word = message.fields[b"n"] if b"n" in message.fields else message.fields["n"]
        if word == b"good":
            client.execute("XADD", "orders", "*", "n", "end")
        elif word == b"bad":
            raise ValueError("bad")
        else:
            raise EndOfTest

    policy = ReadPolicy(claim_after_ms=60_000)
    reader = Reader(client, group="billing", consumer="billing-1", streams=["orders"], policy=policy)
    names = {"reader": reader, "client": client, "process": process, "logger": logging.getLogger("billing")}
    with reader, pytest.raises(EndOfTest):
        run_python("docs/consumer-groups.md", names, only=[1])
    ((_, moved),) = client.execute("XRANGE", "orders:aside", "-", "+")
    assert moved == [b"id", ids[0].encode(), b"n", b"hopeless"]
    pending = [entry[0].decode() for entry in client.execute("XPENDING", "orders", "billing", "-", "+", 10)]
    assert ids[2] in pending
    assert not {ids[0], ids[1]} & set(pending)
    assert f"message {ids[2]} of orders comes again" in caplog.text


def test_the_page_on_reliable_streams_acknowledges_and_dead_letters(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.execute("XADD", "orders", "1-0", "order", "o-1")
    client.execute("XADD", "orders", "2-0", "name", "none")
    run_python("docs/reliable-streams.md", replaced=in_redis(client.url), only=[0])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["b'1-0'", "b'2-0'"]
    assert client.execute("XPENDING", "orders", HandlerKeys("shop", "ship", "orders").group)[0] == 0
    (filed,) = DeadLetterQueue(client).find(DeadLetterFilter())
    assert filed.letter is not None
    assert (filed.reason, filed.letter.error) == ("rejected", "it names no order")


def test_the_loop_of_the_page_on_reliable_streams_runs_and_ends(client: Client) -> None:
    client.execute("XADD", "orders", "1-0", "order", "o-1")

    def wait() -> None:
        eventually(lambda: client.execute("XLEN", "shipped"), "an output")

    replaced = {**in_redis(client.url), "...\nloop.stop()": "wait()\nloop.stop()"}
    run_python("docs/reliable-streams.md", {"wait": wait}, replaced, only=[1])
    ((_, output),) = client.execute("XRANGE", "shipped", "-", "+")
    assert output == [b"order", b"1-0"]
    assert client.execute("XPENDING", "orders", HandlerKeys("shop", "ship", "orders").group)[0] == 0


# --- Producers, dead letters, partitions ---


def test_the_producer_of_the_page_publishes_at_once_and_later(client: Client) -> None:
    run_python("docs/producing.md", replaced=in_redis(client.url, "redis://localhost:6379/0"), only=[0])
    assert client.execute("XLEN", "payments") == 1_001
    (waiting,) = DelayedMessages(client).find("reminders")
    assert list(waiting.pairs) == [b"order", b"o-17"]


def test_the_producer_of_the_page_publishes_to_a_replica(
    millstream_fresh_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_safe_ms = int(FAIL_SAFE_S * 1000)
    replaced = {'"redis://localhost:6379/0"': "client", "timeout_ms=500": f"timeout_ms={fail_safe_ms}"}
    with (
        EmbeddedServer(extra={**FOLLOWS, "replicaof": f"127.0.0.1 {millstream_fresh_server.port}"}) as replica,
        Client(millstream_fresh_server.url, timeout_ms=2 * fail_safe_ms) as client,
    ):
        eventually(lambda: b"master_link_status:up" in replica.call("INFO", "replication"), "a replica")
        run_python("docs/producing.md", {"client": client}, replaced, only=[1])
        assert replica.call("XLEN", "payments") == 1
    assert not capsys.readouterr().out


def test_the_page_on_producing_reports_what_no_replica_has(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    replaced = {**in_redis(client.url, "redis://localhost:6379/0"), "timeout_ms=500": "timeout_ms=1"}
    run_python("docs/producing.md", replaced=replaced, only=[1])
    ((entry_id, _),) = client.execute("XRANGE", "payments", "-", "+")
    assert capsys.readouterr().out == f"not replicated: ['{entry_id.decode()}']\n"


def test_the_page_on_producing_lists_and_cancels_delayed_messages(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with Producer(client.url) as producer:
        waiting = producer.publish("reminders", {"order": "o-17"}, delay_ms=3_600_000)
    replaced = {**in_redis(client.url, "redis://localhost:6379/0"), "1763702263123456": waiting}
    run_python("docs/producing.md", replaced=replaced, only=[2])
    assert waiting in capsys.readouterr().out
    assert list(DelayedMessages(client).find("reminders")) == []


def test_the_page_on_dead_letters_lists_and_redrives(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    stream = ReliableStream(client, "flights", app="airline", handler="depart", consumer="c")
    stream.join()
    client.execute("XADD", "flights", "1-0", "flight", "N1")
    (delivery,) = stream.fetch(count=1, block_ms=1)
    stream.dead_letter((delivery, stream.new_dead_letter(delivery, reason="failed", error="no gate")))
    run_python("docs/dead-letters.md", replaced=in_redis(client.url))
    listed, redriven = capsys.readouterr().out.splitlines()
    assert "failed" in listed
    assert "b'N1'" in listed
    assert redriven.split()[1] == client.execute("XREVRANGE", "flights", "+", "-", "COUNT", 1)[0][0].decode()


def test_the_page_on_partitions_publishes_and_declares_a_handler() -> None:
    with cluster() as deployed:
        module = run_python("docs/partitions.md", replaced={"redis+cluster://localhost:7000": deployed.url})
        with Client(deployed.url) as client:
            assert sum(client.execute("XLEN", name) for name in client.scan_streams("*orders*")) == 1_001
    assert list(module["app"].handlers) == ["bill"]


# --- Handlers ---


def test_the_signatures_of_the_pages_declare_handlers() -> None:
    app = App("shop")
    module = run_python("docs/handlers.md", {"Message": Message}, only=[0, 2])
    run_python("docs/leases.md", {"app": app, "CallEvent": Order, "Message": Message, "State": State}, only=[3])
    assert [list(one.handlers) for one in (module["app"], app)] == [["total", "invoice"], ["bill"]]


def test_the_inbox_of_the_page_books_a_payment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = run_python("docs/exactly-once-sql.md", only=[0])
    for _ in range(2):
        run(module["app"], "book", {"account": "ann", "cents": "500"})
    with closing(sqlite3.connect(tmp_path / "bank.db")) as connection:
        assert connection.execute("SELECT * FROM accounts").fetchall() == [("ann", 500)]


def test_the_inbox_of_the_page_books_a_payment_once_in_postgresql(tmp_path: Path) -> None:
    message = Message("payments", "1-0", (b"account", b"ann", b"cents", b"500"), key=b"ann")
    payment = type("Payment", (), {"account": "ann", "cents": 500})()
    with postgres_server() as address:
        with psycopg.connect(address) as connection:
            connection.execute("CREATE SCHEMA app")
            connection.execute("CREATE TABLE accounts (account TEXT PRIMARY KEY, balance BIGINT NOT NULL)")
            Inbox("bank.book", paramstyle=psycopg.paramstyle, table="app.inbox").create_tables(connection)
        names = {"message": message, "payment": payment}
        for _ in range(2):
            module = run_python("docs/exactly-once-sql.md", names, {"dbname=bank": address}, only=[1])
        written: list[Message] = []
        with psycopg.connect(address) as connection:
            assert connection.execute("SELECT * FROM accounts").fetchall() == [("ann", 500)]
            names = {"messages": [message, Message("payments", "2-0", (b"account", b"bob"), key=b"bob")]}
            names |= {"inbox": module["inbox"], "connection": connection}
            run_python(
                "docs/exactly-once-sql.md", {**names, "write_all": lambda _, fresh: written.extend(fresh)}, only=[2]
            )
    assert [one.id for one in written] == ["2-0"]


# --- Leases and the router ---


def test_the_loop_of_the_page_on_leases_begins_an_announced_stream(client: Client, tmp_path: Path) -> None:
    with program("docs/leases.md", tmp_path, client.url) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("begin call:4711 {'tariff': 'night'} ")


def test_the_coroutine_of_the_page_on_leases_releases_its_streams_when_it_is_cancelled(client: Client) -> None:
    announce(client, "calls", "call:1")
    follow = run_python("docs/leases.md", only=[1])["follow"]

    def owned() -> bool:
        return bool(client.execute("HLEN", ServiceKeys("calls").owners))

    async def begin_and_cancel() -> None:
        task = asyncio.create_task(follow(client.url))
        await eventually_async(owned, "an owned stream")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(begin_and_cancel())
    assert not owned(), "nobody has to wait for the end of its lease"
    with Balancer(client.url, "calls", consumer="next") as balancer:
        eventually(
            lambda: [lease.stream for lease in balancer.leases] == ["call:1"], "a lease of the stream that was released"
        )


def test_the_weight_of_the_page_on_leases_falls_with_the_lag() -> None:
    module = run_python("docs/leases.md", replaced=in_redis("redis://127.0.0.1:1"), only=[2])
    assert module["weight"]() == 1
    module["waiting"] = 10_000
    assert module["weight"]() == 0.5


def test_the_program_of_the_page_on_the_router_prints_new_entries(client: Client, tmp_path: Path) -> None:
    client.execute("XADD", "entity:4711", "1700000000000-0", "state", "paid")
    client.execute("XADD", "entity:4711", "1700000000001-0", "state", "sent")
    with program("docs/router.md", tmp_path, client.url) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1700000000001-0 {'state': b'sent'}\n"


# --- Observing and testing ---


def test_the_call_of_the_page_on_testing_gives_what_it_shows() -> None:
    run_python("docs/testing.md", run_python("docs/start/workers.md", only=[0]), only=[0])


def test_the_health_of_the_page_on_metrics_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    answers: list[httpx.Response] = []

    def read() -> list[int]:
        if answers:
            raise EndOfTest
        return [1, 2]

    with reserved_port() as port:

        def process(batch: Iterable[int]) -> None:
            assert list(batch) == [1, 2]
            answers.append(get(f"http://127.0.0.1:{port}/healthz"))
            answers.append(get(f"http://127.0.0.1:{port}/metrics"))

        with pytest.raises(EndOfTest):
            run_python("docs/metrics.md", {"read": read, "process": process}, {"9464": str(port)}, only=[1, 2])
    assert [answer.status_code for answer in answers] == [200, 200]
    assert "billing.import" in answers[0].text


def test_the_blocks_of_the_page_on_histories_print_and_find_what_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HistoryError):
        run_python("docs/history-checker.md", only=[0])
    assert "report" in run_python("docs/history-checker.md", {"folder": tmp_path}, only=[1])
    run_python("docs/history-checker.md", only=[2, 3])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    page = (ROOT / "docs/history-checker.md").read_text()
    assert [summary for summary in printed if f"\n# {summary}\n" not in page] == []


def test_the_engine_of_the_page_on_the_contract_keeps_it(tmp_path: Path) -> None:
    assert "1 passed" in run_tests("docs/contract.md", tmp_path)


def test_the_console_is_mounted_in_an_application_as_the_page_says(client: Client) -> None:
    fill_with(client, "x")
    app = run_python("docs/console.md", replaced=in_redis(client.url))["app"]
    with client_of(app) as http:
        assert http.get("/console/").status_code == 401
        assert "bob: payloads" in http.get("/console/", headers={"x-user": "bob"}).text
        assert "ann: admin" in http.get("/console/", headers={"x-user": "ann"}).text
        assert "(hidden)" in http.get("/console/key?handler=shop.pay&key=parked+x", headers={"x-user": "bob"}).text
