"""LiveReads: one read for all viewers of an open page, whose value or error is kept for a while."""

import asyncio

import pytest

from millstream.services.console.live_reads import LiveReads
from tests.support.clocks import ManualClock
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]


class Source:
    """Counts its reads. A read lasts until `go_on` is set, and then fails if `error` is set."""

    def __init__(self) -> None:
        self.reads = 0
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def read(self) -> int:
        self.reads += 1
        await self.go_on.wait()
        if self.error:
            raise self.error
        return self.reads


def test_fifty_viewers_wait_for_one_read_and_get_its_value_until_it_is_too_old() -> None:
    async def run() -> None:
        clock, source = ManualClock(), Source()
        live = LiveReads[int](keep_ms=5_000, clock=clock)
        waiting = [asyncio.create_task(live.get("page", source.read)) for _ in range(50)]
        await asyncio.sleep(0)
        clock.now_ms += 60_000  # a slow read: its value is kept from its end on
        source.go_on.set()
        assert set(await asyncio.gather(*waiting)) == {(1, 5_000.0)}
        clock.now_ms += 4_000
        assert await live.get("page", source.read) == (1, 1_000.0)
        assert (await live.get("other page", source.read))[0] == 2
        clock.now_ms += 1_000
        assert (await live.get("page", source.read))[0] == 3

    asyncio.run(run())


def test_a_cancelled_request_ends_no_read_that_others_wait_for() -> None:
    async def run() -> None:
        source, live = Source(), LiveReads[int]()
        first, second = (asyncio.create_task(live.get("page", source.read)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        source.go_on.set()
        assert ((await second)[0], source.reads) == (1, 1)

    asyncio.run(run())


def test_an_error_is_kept_as_long_as_a_value() -> None:
    async def run() -> None:
        clock, source = ManualClock(), Source()
        live = LiveReads[int](keep_ms=5_000, clock=clock)
        source.go_on.set()
        source.error = OSError("away")
        for _ in range(3):
            with pytest.raises(OSError, match="away"):
                await live.get("page", source.read)
        source.error = None
        clock.now_ms += 5_000
        assert (await live.get("page", source.read))[0] == 2

    asyncio.run(run())


def test_no_more_than_two_hundred_values_are_kept() -> None:
    async def run() -> None:
        source, live = Source(), LiveReads[int](keep_ms=3_600_000)
        source.go_on.set()
        for n in range(201):
            await live.get(n, source.read)
        assert (await live.get(200, source.read))[0] == 201
        assert (await live.get(0, source.read))[0] == 202, "the oldest one had to go"

    asyncio.run(run())


def test_a_value_is_forgotten_when_it_is_too_old_though_no_request_comes() -> None:
    async def run() -> None:
        source, live = Source(), LiveReads[int](keep_ms=1)
        source.go_on.set()
        await live.get("page", source.read)
        await asyncio.to_thread(eventually, lambda: not live._known, "the end of its time")

    asyncio.run(run())
