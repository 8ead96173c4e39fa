"""What pages show runs as they print it, and prints what they show."""

import asyncio
import runpy
import signal
from pathlib import Path

import httpx
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing import run
from tests.support.applications import application
from tests.support.commandline import reserved_port
from tests.support.gateways import Events
from tests.support.pages import REDIS, Block, not_printed, run_consoles, run_tests, write_files

pytestmark = [pytest.mark.cli]

PAGES = ("README.md", "docs/start/workers.md", "docs/schedules.md", "docs/timers.md", "docs/limits.md")

WITH_A_REDIS = ("docs/keys.md", "docs/handlers.md", "docs/auto.md", "docs/commands.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_console_examples_of_a_page_print_the_output_that_it_shows(page: str, tmp_path: Path) -> None:
    with reserved_port() as port:
        run_consoles(page, tmp_path, port)


@pytest.mark.parametrize("page", WITH_A_REDIS)
def test_the_console_examples_of_a_page_for_a_redis_that_runs_print_the_output_that_it_shows(
    page: str, client: Client, tmp_path: Path
) -> None:
    run_consoles(page, tmp_path, int(client.url.rpartition(":")[2].partition("/")[0]))


def test_the_tests_of_the_page_on_testing_pass(tmp_path: Path) -> None:
    assert "5 passed" in run_tests("docs/testing.md", tmp_path)


@pytest.fixture
def cookbook(client: Client, tmp_path: Path) -> dict[str, Path]:
    """The programs of the cookbook, on the shared server."""
    return write_files("docs/guides/cookbook.md", tmp_path, {REDIS: client.url.removeprefix("redis://").split("/")[0]})


def test_the_cookbooks_api_publishes_a_repeated_request_once(cookbook: dict[str, Path], client: Client) -> None:
    api = runpy.run_path(str(cookbook["api.py"]))["api"]

    async def call() -> list[httpx.Response]:
        order, key = {"customer": "ann", "amount": 1.5}, {"Idempotency-Key": "a-1"}
        transport = httpx.ASGITransport(api)
        async with (
            api.router.lifespan_context(api),
            httpx.AsyncClient(transport=transport, base_url="http://api") as to,
        ):
            accepted = [await to.post("/orders", json=order, headers=key) for _ in range(2)]
            return [*accepted, await to.post("/orders", json={"customer": "ann"})]

    *answers, refused = asyncio.run(call())
    assert [answer.status_code for answer in (*answers, refused)] == [202, 202, 422]
    ((entry_id, pairs),) = client.execute("XRANGE", "orders", "-", "+")
    assert [answer.json()["id"] for answer in answers] == [entry_id.decode()] * 2
    assert pairs == [b"customer", b"ann", b"amount", b"1.5"]


def test_the_cookbooks_server_publishes_processes_and_streams_and_stops(
    cookbook: dict[str, Path], client: Client, tmp_path: Path
) -> None:
    options = ("--app-dir", str(cookbook["live_api.py"].parent), "--timeout-graceful-shutdown", "3600")
    with application("live_api:api", client.url, tmp_path / "log", *options) as web:
        with Events(web.url, "/totals", {}) as page:
            page.wait()
            for _ in range(3):
                assert web.http.post("/orders/ann").status_code == 202
            assert [event.data["fields"]["orders"] for event in page.next(3)] == ["1", "2", "3"]
            position = page.seen.last_id
        web.http.post("/orders/ann")
        with Events(web.url, "/totals", {"Last-Event-ID": position}) as page:
            assert [event.data["fields"] for event in page.next()] == [{"customer": "ann", "orders": "4"}]
            web.process.send_signal(signal.SIGTERM)
            assert [event.kind for event in page.rest()] == ["end"]
        assert web.wait() == -signal.SIGTERM
        assert "Application shutdown complete" in web.log.read_text()
    consumers = client.execute("XINFO", "CONSUMERS", "orders", HandlerKeys("live", "total", "orders").group)
    assert [consumer[1] for consumer in consumers] == [b"waiting"], "the worker has left its group"


def test_the_cookbooks_job_is_published_once_by_two_machines(cookbook: dict[str, Path], client: Client) -> None:
    for _ in range(2):
        runpy.run_path(str(cookbook["nightly.py"]))
    days = [pairs for _, pairs in client.execute("XRANGE", "nightly", "-", "+")]
    assert [pairs[0] for pairs in days] == [b"day"] * len({pairs[1] for pairs in days}), "one a day"


def test_the_cookbooks_handlers_each_get_the_message(cookbook: dict[str, Path]) -> None:
    app = runpy.run_path(str(cookbook["fan_out.py"]))["app"]
    order = {"customer": "ann", "amount": "7"}
    assert run(app, "invoice", order).outputs == [{"customer": "ann", "total": "7"}]
    assert run(app, "audit", order).outputs == [{"order": "1-1", "fields": "customer,amount"}]


def test_a_printed_line_that_is_missing_or_too_rare_is_found() -> None:
    printed = ["noise", "2026-01-01T00:00:00.000Z  totals  1700000000000-0  sum=1.0", "dead  1.9 s"]
    shown = "2026-11-23T09:31:08.370Z  totals  1795426268370-12   sum="
    assert not_printed(["dead    0.3 s", f"{shown}1.0"], printed) == []
    assert not_printed([f"{shown}2.0"], printed) == [f"{shown}2.0"]
    assert not_printed([f"{shown}1.0", f"{shown}1.0"], printed) == [f"{shown}1.0"] * 2


def test_a_console_has_commands_and_outputs() -> None:
    block = Block(language="console", text="$ pip install x\n$ a \\\n    b\nout\n$ c\n...\n")
    assert block.commands == "a \\\n    b\nc"
    assert block.outputs == ["out"]
