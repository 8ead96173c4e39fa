"""WebSockets of the gateway: an app that sends while its client ends the connection."""

import asyncio
import threading
from typing import Any

import pytest

from millstream.observability.metrics import Recorder
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server, WebSockets
from millstream.services.web.listen import listen, url_of
from millstream.services.web.socket_server import SocketProtocol
from tests.support.hostile_clients import HANDSHAKE, BareConnection
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router]

NOT_UTF8 = b"\x81\x82\x00\x00\x00\x00\xff\xfe"
SOCKETS = WebSockets(protocol=SocketProtocol, frame_bytes=1_000, ping_s=FAIL_SAFE_S, pong_s=FAIL_SAFE_S)


@pytest.mark.parametrize("message", [{"type": "websocket.send", "text": "late"}, {"type": "websocket.close"}])
def test_an_app_that_sends_after_a_text_that_is_not_utf8_finds_that_its_client_has_left(message: Any) -> None:
    errors: list[BaseException] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] not in ("websocket.disconnect", "lifespan.shutdown"):
            if event["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif event["type"] == "websocket.connect":
                await send({"type": "websocket.accept"})
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.shutdown.complete"})
            return
        try:
            await send(message)  # the connection is not closed yet
        except (OSError, RuntimeError) as error:
            errors.append(error)

    server = Server(app, Limits(connections=10), metrics=Recorder(), stop_s=1, sockets=SOCKETS)
    with listen("127.0.0.1", 0, connections=10) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            with BareConnection(url_of(listener)) as connection:
                assert connection.ask(b"GET /s HTTP/1.1\r\n" + HANDSHAKE + b"\r\n") == 101
                connection.send(NOT_UTF8)
                connection.wait_closed()
            eventually(lambda: errors, "the app to send")
        finally:
            server.should_exit = True
            thread.join(FAIL_SAFE_S)
    assert [isinstance(error, OSError) for error in errors] == [True], errors
