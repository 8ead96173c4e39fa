"""The cookbook's handler charges once for each payment, although answers are lost and its processes are killed."""

import json
import os
import runpy
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from millstream.delivery import DeadLetterFilter, DeadLetterQueue
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from tests.support.commandline import running
from tests.support.pages import write_files
from tests.support.processes import kill_with_descendants
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.worker_processes import PrintFigures
from tests.support.workers import working

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 1
pytestmark = [pytest.mark.worker]


@dataclass
class PaymentApi:
    """An API that charges once for each key."""

    silences: dict[str, int] = field(default_factory=dict)
    """How many calls for an order take effect without an answer."""
    holds: set[str] = field(default_factory=set)
    """Orders whose answer comes only at the end of the test."""
    keys: list[str] = field(default_factory=list)
    """The key of each call."""
    charges: dict[str, str] = field(default_factory=dict)
    """The order that was charged under each key."""
    ended: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def charge(self, key: str, order: str) -> bytes | None:
        """Charge an order; None for no answer."""
        self.keys.append(key)
        self.charges.setdefault(key, order)
        if order in self.holds:
            self.ended.wait(FAIL_SAFE_S)
        silent = self.silences.get(order, 0)
        self.silences[order] = max(0, silent - 1)
        return None if silent else json.dumps({"id": f"charge of {order}"}).encode()


@pytest.fixture
def api() -> Iterator[PaymentApi]:
    found = PaymentApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = found.charge(self.headers["Idempotency-Key"], body["order"])
            if answer is None:
                self.close_connection = True
                return
            self.send_response(402 if body["cents"] == 0 else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        found.port = server.server_port
        yield found
        found.ended.set()
        server.shutdown()


@pytest.fixture
def program(api: PaymentApi, tmp_path: Path) -> Path:
    """The cookbook's program, which calls the API of the test."""
    return write_files("docs/guides/cookbook.md", tmp_path, {"127.0.0.1:9000": f"127.0.0.1:{api.port}"})["charge.py"]


def publish(client: Client, **fields: object) -> str:
    with Producer(client.url) as producer:
        return producer.publish("payments", {"cents": 500, **fields})


def charged(client: Client) -> list[dict[bytes, bytes]]:
    return [mapping_of(pairs) for _, pairs in client.execute("XRANGE", "charged", "-", "+")]


def test_a_payment_is_charged_once_although_its_answer_is_lost(client: Client, api: PaymentApi, program: Path) -> None:
    handler = runpy.run_path(str(program))["app"].handlers["charge"]
    api.silences["o-1"] = 2
    entry_id = publish(client, order="o-1")
    with working(client, handler):
        eventually(lambda: charged(client), "the charge")
    assert len(api.keys) == 3
    assert set(api.keys) == {f"shop.charge:payments/{entry_id}"}
    assert list(api.charges.values()) == ["o-1"]
    assert charged(client) == [{b"order": b"o-1", b"charge": b"charge of o-1"}]


def test_each_payment_is_charged_once_although_its_worker_is_killed_during_the_call(
    client: Client, api: PaymentApi, program: Path, print_figures: PrintFigures
) -> None:
    command = ("worker", f"{program}:app", "--claim", "2s")
    orders: dict[str, str] = {}
    for number in range(KILLS):
        with running(*command, url=client.url) as worker:
            eventually(lambda: len(charged(client)) >= len(orders), "the charges of the killed calls before")
            order = f"o-{number}"
            api.holds.add(order)
            orders[f"shop.charge:payments/{publish(client, order=order)}"] = order
            eventually(lambda: len(api.charges) == len(orders), "the call")
            kill_with_descendants(worker)
        api.holds.clear()
    with running(*command, url=client.url):
        eventually(lambda: len(charged(client)) >= len(orders), "the charge of the last killed call")
    assert api.charges == orders
    assert min(Counter(api.keys).values()) >= 2, "each was called before the kill and after it"
    assert [row[b"order"].decode() for row in charged(client)] == [*orders.values()]
    print_figures(None, kills=KILLS, calls=len(api.keys), charges=len(api.charges), outputs=len(charged(client)))


def test_a_redriven_payment_keeps_the_key_of_its_publisher_and_gets_another_one_without(
    client: Client, api: PaymentApi, program: Path
) -> None:
    handler = runpy.run_path(str(program))["app"].handlers["charge"]
    api.silences |= dict.fromkeys(("o-1", "o-2"), handler.retry.attempts)
    first = publish(client, order="o-1", payment_id="p-1")
    second = publish(client, order="o-2")
    letters = DeadLetterQueue(client)
    with working(client, handler):
        eventually(lambda: len(list(letters.find(DeadLetterFilter()))) == 2, "both dead letters")
        redriven = [outcome.new_id for outcome in letters.redrive(letters.select(DeadLetterFilter()))]
        eventually(lambda: len(charged(client)) == 2, "both charges")
    assert not {first, second} & set(redriven), "the redriven entries have ids of their own"
    by_order = [sorted(key for key, order in api.charges.items() if order == name) for name in ("o-1", "o-2")]
    assert by_order[0] == ["shop.charge:p-1"]
    assert len(by_order[1]) == 2, "as the page says: charged twice, since only the id of the entry tells"
    assert f"shop.charge:payments/{second}" in by_order[1]


def test_a_declined_payment_is_a_dead_letter_without_another_attempt(
    client: Client, api: PaymentApi, program: Path
) -> None:
    handler = runpy.run_path(str(program))["app"].handlers["charge"]
    publish(client, order="o-1", cents=0)
    letters = DeadLetterQueue(client)
    with working(client, handler):
        eventually(lambda: list(letters.find(DeadLetterFilter(reason="rejected"))), "the dead letter")
    assert len(api.keys) == 1
