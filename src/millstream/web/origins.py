"""Which web pages may use the server: a browser sends what any page asks it to, to any address it can reach.

CORS keeps a page from reading an answer, but neither from opening a WebSocket nor from using up connections. And a name
of somebody else's may lead to 127.0.0.1 (DNS rebinding), where a server for this machine alone asks for no token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from millstream.fanout.asking import header

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_MOST_HEAD = 16_384
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OwnPages:
    """ASGI middleware that turns away pages of other origins than this one and those in `origins` ("*": any).

    `names`: under which hosts this server goes; None: any.
    """

    def __init__(self, app: "ASGIApp", origins: Sequence[str], names: Sequence[str] | None) -> None:
        self._app = app
        self._origins = origins
        self._names = names

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        host = header(scope, b"host") or ""
        if _size(scope) > _MOST_HEAD:
            await JSONResponse({"error": f"the request is longer than {_MOST_HEAD:,} bytes"}, 431)(scope, receive, send)
        elif self._names is not None and _name(host) not in self._names:
            await JSONResponse({"error": f"this is not {host!r}"}, 421)(scope, receive, send)
        elif not self._welcome(header(scope, b"origin"), host):
            text = "pages from elsewhere may not use this server, unless it is started with --allow-origin"
            await JSONResponse({"error": text}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _welcome(self, origin: str | None, host: str) -> bool:
        if origin is None or "*" in self._origins or origin in self._origins:
            return True
        return origin.partition("://")[2] == host


def _size(scope: "Scope") -> int:
    head = sum(len(name) + len(value) for name, value in scope["headers"])
    return head + len(scope["raw_path"]) + len(scope["query_string"])


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
