"""RequestLimits: limits the size of requests, and how long they may take to arrive."""

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from millstream.services.web.connections import Connections

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CLOSE = {"connection": "close"}


class RequestLimits:
    """ASGI middleware that refuses requests beyond the limits. The app sees a request once its body has arrived."""

    def __init__(self, app: "ASGIApp", connections: Connections) -> None:
        self._app = app
        self._connections = connections
        self._limits = connections.limits

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif refused := self._check(scope):
            status, text = refused
            await JSONResponse({"error": text}, status, _CLOSE)(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._app(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    def _check(self, scope: "Scope") -> tuple[int, str] | None:
        if self._connections.is_full():
            return 503, f"all {self._limits.connections:,} connections of the server are in use; retry later"
        if _size(scope) > self._limits.head_bytes:
            return 431, f"URL and headers are longer than {self._limits.head_bytes:,} bytes"
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy that reads the other of the two would treat a part of the body as the next request.
            return 400, "send Content-Length or Transfer-Encoding, not both (RFC 9112, 6.1)"
        return None

    async def _forward(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            async with asyncio.timeout(self._limits.request_s):
                body = await self._body(receive)
        except TimeoutError:
            text = f"the request did not arrive within {self._limits.request_s:g} s"
            await JSONResponse({"error": text}, 408, _CLOSE)(scope, receive, send)
            return
        except _TooLarge:
            text = f"the request is larger than {self._limits.body_bytes:,} bytes"
            await JSONResponse({"error": text}, 413, _CLOSE)(scope, receive, send)
            return
        if body is None:
            return  # the client has disconnected midway
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> "Message":
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _body(self, receive: "Receive") -> bytes | None:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size, more = size + len(part), message.get("more_body", False)
            if size > self._limits.body_bytes:
                raise _TooLarge
            parts.append(part)
        return b"".join(parts)


class _TooLarge(Exception):
    """The body of a request is too large."""


def _size(scope: "Scope") -> int:
    head = sum(len(name) + len(value) for name, value in scope["headers"])
    return head + len(scope["raw_path"]) + len(scope["query_string"])
