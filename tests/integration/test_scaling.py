"""The KEDA objects of the page on scaling, against a real exporter: how many replicas they lead to."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.key_queues import park
from millstream.delivery.keyed_stream import KeyedStream, queue_of_key
from millstream.delivery.reliable_stream import ReliableStream
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import mapping_of
from tests.support.commandline import start
from tests.support.keda import replicas
from tests.support.processes import end
from tests.support.requirements import skip_without
from tests.support.service_process import get
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.keys]

PAGE = Path(__file__).parents[2] / "docs/scaling.md"
TOTAL = HandlerKeys("shop", "total", "orders")
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Exporter:
    """A `millstream exporter` on a Redis, as KEDA reaches it."""

    server: EmbeddedServer
    client: Client
    url: str

    def get(self, url: str) -> tuple[int, Any]:
        """What the exporter answers for a URL of the page."""
        answer = get(url.replace("http://exporter:9464", self.url))
        return answer.status_code, answer.json()

    def figures(self, handler: str) -> dict[str, Any]:
        """All figures of a handler; empty while they are unknown."""
        status, answer = self.get(f"http://exporter:9464/scale?handler={handler}")
        found: dict[str, Any] = answer if status == 200 else {}
        return found

    def replicas(self, scaled: dict[str, Any], current: int) -> int:
        """What KEDA makes of it."""
        return replicas(scaled, self.get, current)


@pytest.fixture
def exporter(millstream_fresh_server: EmbeddedServer) -> Iterator[Exporter]:
    process = start("exporter", "--metrics-address", "0", "--json", url=millstream_fresh_server.url, stderr=None)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["metrics"].removesuffix("/metrics")
        with Client(millstream_fresh_server.url) as client:
            yield Exporter(millstream_fresh_server, client, url)
    finally:
        end(process)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def scaled() -> dict[str, dict[str, Any]]:
    """The ScaledObjects of the page, by name."""
    skip_without(find_spec("yaml"), "PyYAML is not installed: make setup")
    yaml = import_module("yaml")
    found = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)]
    assert all(one["apiVersion"] == "keda.sh/v1alpha1" and one["kind"] == "ScaledObject" for one in found)
    assert {trigger["type"] for one in found for trigger in one["spec"]["triggers"]} == {"metrics-api"}
    return {one["metadata"]["name"]: one for one in found}


def test_a_handler_without_a_key_is_scaled_by_its_messages_from_zero_and_back(
    exporter: Exporter, scaled: dict[str, dict[str, Any]]
) -> None:
    client, notify = exporter.client, scaled["shop-notify"]
    stream = ReliableStream(client, "notices", app="shop", handler="notify", consumer="w-0")
    stream.join()
    client.pipeline([("XADD", "notices", "*", "n", n) for n in range(2_500)])
    found = stream.fetch(count=100)
    eventually(lambda: exporter.figures("shop.notify").get("in_flight") == 100, "the figures")
    assert exporter.replicas(notify, 0) == 3
    assert exporter.replicas(notify, 20) == 3
    client.pipeline([("XADD", "notices", "*", "n", n) for n in range(30_000)])
    eventually(lambda: exporter.figures("shop.notify").get("waiting") == 32_500, "the figures")
    assert exporter.replicas(notify, 3) == 20
    while found:
        assert stream.ack(*found) == []
        found = stream.fetch(count=1_000)
    eventually(lambda: exporter.figures("shop.notify").get("waiting") == 0, "the figures")
    assert exporter.replicas(notify, 20) == 0


def test_a_handler_with_a_key_is_scaled_by_the_keys_that_can_go_on(
    exporter: Exporter, scaled: dict[str, dict[str, Any]]
) -> None:
    client, total = exporter.client, scaled["shop-total"]
    stream = KeyedStream(
        client,
        "orders",
        app="shop",
        handler="total",
        consumer="w-0",
        queue_of=lambda entry_id, pairs: queue_of_key(mapping_of(pairs).get(b"k"), entry_id),
    )
    stream.join()
    client.pipeline([("XADD", "orders", "*", "k", n % 200) for n in range(1_000)])
    while stream.enqueue_new(count=1_000, max_pending=10_000):
        pass
    eventually(lambda: exporter.figures("shop.total").get("keys_ready") == 200, "the figures")
    assert exporter.replicas(total, 1) == 4  # 200 of 64
    leased = stream.lease_keys(queues=150, entries=150, run=1, lease_ms=HOUR_MS, now_ms=0).leases
    eventually(lambda: exporter.figures("shop.total").get("keys_ready") == 200 - len(leased), "the figures")
    figures = exporter.figures("shop.total")
    assert figures["waiting"] == 1_000
    assert exporter.replicas(total, 10) == -(-(figures["keys_ready"] + figures["in_flight"]) // 64)
    for key in range(200):
        park(client, TOTAL, queue_of_key(b"%d" % key, b""), "by a test")
    eventually(lambda: exporter.figures("shop.total").get("keys_ready") == 0, "the figures")
    assert exporter.figures("shop.total")["waiting"] == 1_000, "no replica helps parked keys"
    assert exporter.replicas(total, 1) < 4


def test_an_error_leaves_the_replicas_as_they_are(exporter: Exporter, scaled: dict[str, dict[str, Any]]) -> None:
    counts = [0, 3, 20]
    for one in scaled.values():
        assert [exporter.replicas(one, current) for current in counts] == counts, "the handlers are unknown"
    notify = scaled["shop-notify"]
    ReliableStream(exporter.client, "notices", app="shop", handler="notify", consumer="w-0").join()
    eventually(lambda: exporter.figures("shop.notify"), "the figures")
    assert [exporter.replicas(notify, current) for current in counts] == [0, 0, 0]
    exporter.server.kill()
    eventually(lambda: not exporter.figures("shop.notify"), "that Redis is away")
    assert exporter.get("http://exporter:9464/scale?handler=shop.notify")[0] == 503
    assert [exporter.replicas(notify, current) for current in counts] == counts
    exporter.server.restart()
