"""What becomes of connections when the server stops."""

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import pytest

from millstream.observability.metrics import NO_METRICS
from millstream.router import Item, Router
from millstream.services.gateway.client_connection import FlowControl
from millstream.services.gateway.close_reasons import CloseReason
from millstream.services.gateway.connection_manager import ConnectionLimits, ConnectionManager
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.router]

HOUR_S = 3_600.0


class Deaf:
    """The wire of a client that reads nothing, not even the closing message, until the wire is cut."""

    kind: Literal["sse", "websocket"] = "sse"
    timed_out = False

    def __init__(self) -> None:
        self.cut = asyncio.Event()

    async def open(self) -> None: ...

    def render(self, item: Item, position: str) -> bytes:
        return b""

    async def send(self, items: Iterable[bytes]) -> None:
        await self.cut.wait()

    async def send_in_parts(self, parts: Iterable[bytes]) -> None:
        await self.cut.wait()

    async def send_heartbeat(self) -> None:
        await self.cut.wait()

    async def close(self, ending: CloseReason) -> None:
        await self.cut.wait()
        raise OSError("it was cut")

    async def receive(self) -> bool:
        await self.cut.wait()
        return False

    def abort(self) -> None:
        self.cut.set()


def test_a_stop_cuts_off_a_client_that_does_not_read_the_closing_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.services.gateway.client_connection._CLOSE_TIMEOUT_S", HOUR_S)

    async def main() -> Any:
        pace = FlowControl(heartbeat_s=HOUR_S, stall_s=HOUR_S)
        connections = ConnectionManager(
            Router("redis://127.0.0.1:1"), limits=ConnectionLimits(), pace=pace, metrics=NO_METRICS
        )
        wire = Deaf()
        serving = asyncio.create_task(connections.serve(wire, b"", []))
        await eventually_async(lambda: connections.counts.open == 1, "the connection")
        await connections.close(0.01)
        await serving
        return wire.cut.is_set(), connections.counts.open, connections.counts.ended

    assert asyncio.run(main()) == (True, 0, 1)
