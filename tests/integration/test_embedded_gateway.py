"""Live streams from the routes of an application, on a plain uvicorn."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.services.gateway import EmbeddedGateway
from tests.support.applications import Application, application
from tests.support.gateways import Events, numbers, publish
from tests.support.waiting import eventually

pytestmark = [pytest.mark.router]

TARGET = "tests.support.apps.embedded_app:api"
PAD = 100_000


@pytest.fixture
def web(client: Client, tmp_path: Path) -> Iterator[Application]:
    with application(TARGET, client.url, tmp_path / "log") as found:
        yield found


def follow(web: Application, path: str, **headers: str) -> Events:
    return Events(web.url, f"/events/{path}", headers)


def test_a_client_of_a_route_that_reconnects_gets_what_it_missed_and_nothing_twice(
    client: Client, web: Application
) -> None:
    ids = publish(client, "s", range(3))
    with follow(web, "s") as events:
        assert events.headers["content-type"] == "text/event-stream"
        assert events.ids(3) == ids
    ids += publish(client, "s", range(3, 5))
    with follow(web, "s", Last_Event_ID=ids[2]) as events:
        assert numbers(events.next(2)) == [3, 4]
        ids += publish(client, "s", [5])
        assert events.ids(1) == ids[5:]
    with follow(web, f"s?after={ids[4]}") as events:
        assert events.ids(1) == ids[5:]


def test_several_streams_of_a_route_are_resumed_together(client: Client, web: Application) -> None:
    publish(client, "a", [1])
    publish(client, "b", [2])
    with follow(web, "a,b") as events:
        assert sorted(numbers(events.next(2))) == [1, 2]
        position = events.seen.last_id
    publish(client, "b", [3])
    with follow(web, "a,b", Last_Event_ID=position) as events:
        assert numbers(events.next()) == [3]


def test_what_the_worker_of_the_application_returns_reaches_its_clients(web: Application) -> None:
    with follow(web, "out?after=latest") as events:
        events.wait()
        web.http.post("/in", json={"n": "7"})
        assert numbers(events.next()) == [7]


def test_a_stop_of_the_server_ends_every_response_with_a_hint_when_to_reconnect(
    client: Client, web: Application
) -> None:
    publish(client, "s", [1])
    with follow(web, "s") as events, follow(web, "nothing") as other:
        assert numbers(events.next()) == [1]
        other.wait_head()
        web.process.send_signal(signal.SIGTERM)
        for one in (events, other):
            [end] = one.rest()
            assert (end.kind, end.data["reason"]) == ("end", "stopping")
            assert one.ended, "the response came to its proper end"
        # Without the end of the responses, uvicorn waits for them for ever.
        assert web.wait() == -signal.SIGTERM
    assert "Application shutdown complete" in web.log.read_text()
    assert "Traceback" not in web.log.read_text()


def test_a_request_that_cannot_be_served_is_refused_as_the_application_refuses(web: Application) -> None:
    assert web.http.get("/events/s", headers={"Last-Event-ID": "nonsense"}).status_code == 400
    assert web.http.post("/events/s").status_code == 405
    with follow(web, "s?user=ann") as one, follow(web, "s?user=ann") as two, follow(web, "s?user=bob") as other:
        for events in (one, two, other):
            events.wait_head()
        refused = web.http.get("/events/s?user=ann")
        assert refused.status_code == 429
        assert "close one" in refused.json()["detail"]
    eventually(lambda: web.http.get("/subscriptions").json() == 0, "the end of all subscriptions")


def test_a_client_that_reads_nothing_is_given_up_and_holds_no_subscription(client: Client, tmp_path: Path) -> None:
    publish(client, "s", range(500), PAD)
    env, options = {"MILLSTREAM_TEST_STALL_S": "0.5"}, ("--timeout-graceful-shutdown", "1")
    with (
        application(TARGET, client.url, tmp_path / "log", *options, env=env) as web,
        Events(web.url, "/events/s", {}, receive_bytes=4_096) as lazy,
    ):
        assert lazy.status == 200
        eventually(lambda: "without completing response" in web.log.read_text(), "its end", log=web.log.read_text)
        assert web.http.get("/subscriptions").json() == 0
        publish(client, "t", [7])  # so little is sent at once, however late it is read
        with follow(web, "t") as events:
            assert numbers(events.next()) == [7], "others are served"


def test_the_handlers_of_signals_are_put_back_at_the_end_of_the_block(client: Client) -> None:
    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        before = signal.getsignal(signal.SIGTERM)
        async with EmbeddedGateway(client.url):
            within = signal.getsignal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            await stopped.wait()  # the handler that was there is called, too
        return [within == before, signal.getsignal(signal.SIGTERM) == before]

    assert asyncio.run(main()) == [False, True]


def test_a_handler_that_another_library_still_calls_after_the_block_calls_the_one_before(client: Client) -> None:
    calls: list[int] = []

    async def main() -> Any:
        async with EmbeddedGateway(client.url):
            chained = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, frame: None)  # a library that calls `chained`, but not within
        return chained

    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        asyncio.run(main())(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM]


def test_a_response_follows_one_to_a_hundred_streams() -> None:
    gateway = EmbeddedGateway("redis://127.0.0.1:1/0")
    request = Request({"type": "http", "method": "GET", "headers": [], "query_string": b""})
    for streams in ((), ("s",) * 101):
        with pytest.raises(ConfigError, match="1 to 100 streams"):
            gateway.events(request, *streams)
