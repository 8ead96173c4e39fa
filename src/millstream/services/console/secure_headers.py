"""SecureHeaders: headers of every response, those of errors included.

The process of a console has its server add them, as that answers some requests before the application sees them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "same-origin",  # with no-referrer, browsers send the origin "null" with forms
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Nothing is loaded from elsewhere, no script of a page or of another site runs, no page frames this one, and nothing is kept in a cache."""


class SecureHeaders:
    """ASGI middleware that adds `headers` to each response."""

    def __init__(self, app: "ASGIApp", headers: Mapping[str, str] = SECURE_HEADERS) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass the request on."""

        async def send_with_headers(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
