"""The router as a guest of an event loop: the same promises without a thread of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.model import Message
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.router import Router
from millstream.testing.proxy import Proxy
from tests.support.routers import READERS, ids, ids_in, make_router, publish, take_items
from tests.support.threads import threads_named
from tests.support.waiting import FAIL_SAFE_S, eventually_async

pytestmark = [pytest.mark.router]

NAMES = [f"s{n}" for n in range(100)]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return request.param


def in_loop(url: str, reader: Any, body: Callable[[Router], Awaitable[None]]) -> None:
    """Run `body` with a router in the loop of the program, which has no thread of its own."""
    before = threads_named("millstream-router")

    async def main() -> None:
        async with make_router(url, reader) as router:
            await asyncio.wait_for(body(router), FAIL_SAFE_S)
            assert threads_named("millstream-router") <= before

    asyncio.run(main())


def test_a_thousand_messages_of_a_hundred_streams_arrive_whole_and_in_order(client: Client, reader: Any) -> None:
    async def body(router: Router) -> None:
        got: dict[str, list[str]] = {name: [] for name in NAMES}

        async def follow(name: str) -> None:
            async for item in router.subscribe(name, buffer=5):
                got[name] += ids([item])

        tasks = [asyncio.create_task(follow(name)) for name in NAMES]
        await asyncio.to_thread(publish, client, NAMES, range(10))
        await eventually_async(lambda: sum(map(len, got.values())) == 1000, "all messages")
        assert got == {name: ids_in(client, name) for name in NAMES}
        router.close()
        await asyncio.gather(*tasks)

    in_loop(client.url, reader, body)


def test_broken_connections_are_replaced(millstream_fresh_server: EmbeddedServer, reader: Any) -> None:
    with Proxy(millstream_fresh_server.port) as proxy, Client(millstream_fresh_server.url) as client:

        async def body(router: Router) -> None:
            subscriptions = [router.subscribe(name) for name in NAMES]
            for n in range(5):
                await asyncio.to_thread(publish, client, NAMES, [n])
                for one in subscriptions:
                    assert isinstance(await anext(one), Message)
                proxy.cut_all()

        in_loop(proxy.url, reader, body)


def test_other_threads_and_loops_may_subscribe_and_close(client: Client, reader: Any) -> None:
    async def body(router: Router) -> None:
        def elsewhere() -> None:
            take_items(router.subscribe("s"), 3)

            async def other_loop() -> Any:
                return await anext(router.subscribe("s"))

            assert isinstance(asyncio.run(other_loop()), Message)
            assert router.close(timeout_ms=FAIL_SAFE_S * 1000)

        subscription = router.subscribe("s")
        waiting = asyncio.create_task(asyncio.to_thread(elsewhere))
        await asyncio.to_thread(publish, client, ["s"], range(3))
        await waiting
        assert [item async for item in subscription]

    in_loop(client.url, reader, body)


def test_a_running_router_cannot_move_into_a_loop(client: Client) -> None:
    async def main(router: Router) -> None:
        async with router:
            pass

    with Router(client.url) as router:
        router.subscribe("s")
        with pytest.raises(ConfigError, match="before the first subscription"):
            asyncio.run(main(router))


def test_a_task_may_close_the_router_while_others_wait(client: Client, reader: Any) -> None:
    async def body(router: Router) -> None:
        async def follow(name: str) -> int:
            got = 0
            async for _ in router.subscribe(name):
                got += 1
                if name == "s0":
                    router.close()
            return got

        tasks = [asyncio.create_task(follow(name)) for name in NAMES]
        await eventually_async(lambda: router.figures().streams == len(NAMES), "all to be served")
        await asyncio.to_thread(publish, client, ["s0"], [0])
        assert await asyncio.gather(*tasks) == [1] + [0] * 99

    in_loop(client.url, reader, body)


def test_no_task_waits_for_a_router_that_has_failed(client: Client, millstream_url: str, reader: Any) -> None:
    async def body(router: Router) -> None:
        early = router.subscribe("s0")
        await asyncio.to_thread(publish, client, ["s0"], [0])
        await anext(early)
        router._reactor.call(lambda: 1 // 0)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            await anext(early)
        with pytest.raises(ConfigError, match="has failed; create a new one: ZeroDivisionError"):
            router.subscribe("s1")

    in_loop(millstream_url, reader, body)
