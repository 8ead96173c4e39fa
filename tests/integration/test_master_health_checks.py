"""How a master finds out which consumers are healthy: none of them stands in another's way, nor does the master itself."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.services.master.health_checks import HealthChecker
from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList
from millstream.services.master.registry import Registry
from millstream.services.master.settings import MasterSettings
from tests.support.masters import GROUP, KEYS, STREAM, HealthPage, SilentPage
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.master]


@pytest.fixture
def registry(client: Client) -> Registry:
    return Registry(client, KEYS)


def register(registry: Registry, name: str, url: str | None) -> None:
    registry.register(name, health_url=url, max_tickets=1, instance="", silent_ms=1_000)


@asynccontextmanager
async def pinging(registry: Registry, *, ping_ms: int = 200, failures: int = 100_000) -> AsyncIterator[list[str]]:
    """A pinger at work; the deaths that it found."""
    deaths: list[str] = []
    settings = MasterSettings(ticket_stream=STREAM, group=GROUP, ping_ms=ping_ms, ping_failures=failures)
    async with running(HealthChecker(registry, settings, AllowList(LOOPBACK), on_death=lambda: deaths.append("one"))):
        yield deaths


@asynccontextmanager
async def running(pinger: HealthChecker) -> AsyncIterator[None]:
    """The pinger at work."""
    task = asyncio.create_task(pinger.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_cookies_of_a_consumer_are_sent_to_no_consumer(registry: Registry) -> None:
    async def ping(giver: HealthPage, other: HealthPage) -> None:
        async with pinging(registry):
            await eventually_async(lambda: giver.calls > 2, "pings of who gives cookies")
            before = other.calls
            await eventually_async(lambda: other.calls > before + 1, "pings of the other")

    with HealthPage() as giver, HealthPage() as other:
        giver.gives_cookie = f"name={'x' * 3_500}; Path=/"
        register(registry, "giver", giver.url)
        register(registry, "other", other.url)
        asyncio.run(ping(giver, other))
        assert (giver.cookies, other.cookies) == ([], [])


def test_consumers_that_never_answer_do_not_prevent_pings_of_others(registry: Registry) -> None:
    many = 320

    async def ping(good: HealthPage, hole: SilentPage) -> int:
        async with pinging(registry, ping_ms=500):
            await eventually_async(lambda: good.calls >= 2, "a second ping of the one that answers")
            return hole.calls

    with HealthPage() as good, SilentPage() as hole:
        for number in range(many):
            register(registry, f"silent-{number}", hole.url)
        register(registry, "good", good.url)
        held_up_by = asyncio.run(ping(good, hole))
        assert held_up_by < many, "it was pinged again before the others had all had their turn"


def test_a_master_that_stood_still_finds_no_consumer_dead(registry: Registry) -> None:
    async def stand_still(page: HealthPage) -> list[str]:
        async with pinging(registry, ping_ms=1_500, failures=2) as deaths:
            for _ in range(3):
                before = page.calls
                await eventually_async(lambda: page.calls > before, "a ping")  # noqa: B023 - it is awaited here
                time.sleep(2)  # noqa: ASYNC251 - the event loop stands still, as if the process did, while it is answered
            await eventually_async(lambda: page.calls > 3, "a ping after that")
            return deaths

    with HealthPage() as page:
        page.delay_s = 0.1
        register(registry, "c1", page.url)
        assert asyncio.run(stand_still(page)) == []
        found = registry.get("c1")
        assert found is not None
        assert found.state == "alive"


def test_failures_do_not_count_while_redis_is_away(millstream_fresh_server: EmbeddedServer) -> None:
    async def wait(registry: Registry) -> None:
        settings = MasterSettings(ticket_stream=STREAM, group=GROUP, ping_ms=200, ping_failures=100_000)
        pinger = HealthChecker(registry, settings, AllowList(LOOPBACK), on_death=lambda: None)
        async with running(pinger):
            await eventually_async(lambda: sum(pinger.failures.values()) > 2, "some silence")
            millstream_fresh_server.stop()
            await eventually_async(lambda: not pinger.failures, "a new beginning")

    with Client(millstream_fresh_server.url) as client:
        registry = Registry(client, KEYS)
        register(registry, "c1", None)
        asyncio.run(wait(registry))


@pytest.mark.parametrize("url", [None, "silent"])
def test_a_consumer_that_does_not_answer_is_found_dead(registry: Registry, url: str | None) -> None:
    async def wait(is_dead: Callable[[], bool]) -> list[str]:
        async with pinging(registry, failures=2) as deaths:
            await eventually_async(is_dead, "its death")
            return deaths

    def is_dead() -> bool:
        found = registry.get("c1")
        return found is not None and found.state == "dead"

    with SilentPage() as hole:
        register(registry, "c1", hole.url if url else None)
        asyncio.run(wait(is_dead))
