"""What the app below sees of requests that are not what they should be."""

import asyncio
from typing import Any, cast

import pytest

from millstream.observability.metrics import NO_METRICS
from millstream.services.web.connections import Connections, Limits
from millstream.services.web.request_limits import RequestLimits

pytestmark = [pytest.mark.router, pytest.mark.master]


def answers(*messages: dict[str, Any], at_work: int = 0) -> tuple[list[bytes], list[int]]:
    """The bodies that the app saw, and the statuses that were sent, for a request that arrives in these messages.

    `at_work`: connections that have sent a request; there may be one.
    """
    seen: list[bytes] = []
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])

    async def main() -> None:
        left = list(messages)

        async def receive() -> Any:
            return left.pop(0)

        async def send(message: Any) -> None:
            sent.extend([message["status"]] if "status" in message else [])

        limits = Limits(connections=1, body_bytes=10)
        connections = Connections(limits, metrics=NO_METRICS)
        for _ in range(at_work):
            connections.clear_wait(connections.open(cast("Any", None)))
        scope = {"type": "http", "method": "POST", "raw_path": b"/", "query_string": b"", "headers": []}
        await RequestLimits(app, connections)(scope, receive, send)

    asyncio.run(main())
    return seen, sent


def part(body: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_arrives_whole() -> None:
    assert answers(part(b"ab", more=True), part(b"cd", more=False)) == ([b"abcd"], [])


def test_a_request_that_its_client_breaks_off_does_not_reach_the_app() -> None:
    assert answers(part(b"ab", more=True), {"type": "http.disconnect"}) == ([], [])


def test_a_body_that_is_too_large_is_refused_before_its_end_arrives() -> None:
    assert answers(part(b"0123456789", more=True), part(b"0", more=True)) == ([], [413])


def test_a_request_is_refused_while_all_connections_are_busy() -> None:
    request = part(b"ab", more=False)
    assert answers(request, at_work=1) == ([b"ab"], []), "it is the one"
    assert answers(request, at_work=2) == ([], [503])
