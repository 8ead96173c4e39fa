"""No request to a service is larger, or slower to arrive, than it has to be."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LONGEST_S = 10.0


class BodyLimit:
    """ASGI middleware that reads a request's body, of at most `most` bytes within ten seconds, before the app sees it."""

    def __init__(self, app: "ASGIApp", most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(_LONGEST_S):
                body = await self._body(receive)
        except TimeoutError:
            await _refuse(send, 408, f"the request did not arrive within {_LONGEST_S:.0f} s")
            return
        if body is None:
            await _refuse(send, 413, f"the request is larger than {self._most:,} bytes")
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> "Message":
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _body(self, receive: "Receive") -> bytes | None:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            part = message.get("body", b"")
            size, more = size + len(part), message.get("more_body", False)
            if size > self._most:
                return None
            parts.append(part)
        return b"".join(parts)


async def _refuse(send: "Send", status: int, text: str) -> None:
    body = msgspec.json.encode({"error": text})
    headers = [
        (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close"),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
