"""How large messages are sent: in parts, so that no client waits for one of them."""

import asyncio
import json
from typing import Any, cast

import pytest

from millstream.model import Message
from millstream.observability.metrics import NO_METRICS
from millstream.redis_client.escaping import PART_BYTES
from millstream.services.gateway.transports import EventTransport
from millstream.services.web.connections import Connections, Limits

pytestmark = [pytest.mark.router]

LONGEST = 6 * PART_BYTES + 1_000
"""Each character may become an escape of six."""


class RecordingClient:
    """A client of events that records what it is sent, and how often other tasks ran meanwhile."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.other_runs = 0
        connection = Connections(Limits(connections=1), metrics=NO_METRICS).open(cast("Any", self))
        self.wire = EventTransport({"state": {"connection": connection}}, self._never, self._send)

    async def _never(self) -> Any: ...

    async def _send(self, message: Any) -> None:
        self.bodies.append(message["body"])

    def abort(self) -> None: ...

    async def others(self) -> None:
        """Another task on the same loop."""
        while True:
            self.other_runs += 1
            await asyncio.sleep(0)


def sent_for(message: Message) -> RecordingClient:
    async def main() -> RecordingClient:
        found = RecordingClient()
        other = asyncio.create_task(found.others())
        rendered = found.wire.render(message, message.id)
        assert not isinstance(rendered, bytes)
        await found.wire.send_in_parts(rendered)
        other.cancel()
        return found

    return asyncio.run(main())


@pytest.mark.parametrize("value", [b"\x01" * 1_000_000, b"\xff" * 1_000_000], ids=["text", "bytes"])
def test_a_large_message_is_sent_in_parts_and_other_tasks_run_between_them(value: bytes) -> None:
    found = sent_for(Message("s", "1-0", [b"v", value]))
    assert max(map(len, found.bodies)) <= LONGEST
    assert found.other_runs >= len(value) // PART_BYTES
    text = value.decode() if value[0] == 1 else {"hex": value.hex()}
    lines = b"".join(found.bodies).decode().split("\n")
    assert lines[0] == "id: 1-0"
    assert lines[2:] == ["", ""]
    assert json.loads(lines[1].removeprefix("data: ")) == {"stream": "s", "id": "1-0", "fields": {"v": text}}
