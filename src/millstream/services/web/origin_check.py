"""OriginCheck: which web pages may use a service, as a browser sends requests of any page to any reachable address.

CORS keeps a page from reading a response, but neither from opening a WebSocket nor from using up connections. And a
name that an attacker owns may resolve to this machine (DNS rebinding), where a service may require no token.
"""

import ipaddress
import socket
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from millstream.services.web.headers import header

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANY_ADDRESS = ("0.0.0.0", "::")


class OriginCheck:
    """ASGI middleware that refuses pages of other origins than its own and those in `origins` ("*": any).

    `names`: accepted Host names; None: any.
    """

    def __init__(self, app: "ASGIApp", origins: Sequence[str], names: Container[str] | None) -> None:
        self._app = app
        self._origins = origins
        self._host_names = names

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        host = header(scope, b"host") or ""
        if self._host_names is not None and (_host_name(host) or "") not in self._host_names:
            await JSONResponse({"error": f"this server does not serve the host {host!r}"}, 421)(scope, receive, send)
        elif not self._is_allowed(scope, host):
            text = "pages of other origins may not use this server; allow one with --allow-origin"
            await JSONResponse({"error": text}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: "Scope", host: str) -> bool:
        if "*" in self._origins:
            return True
        origin = header(scope, b"origin")
        if origin is not None:
            return origin in self._origins or origin.partition("://")[2] == host
        # Images, scripts and forms of other pages send no Origin, but Sec-Fetch-Site (W3C, "Fetch Metadata Request
        # Headers"); a followed link is allowed.
        if header(scope, b"sec-fetch-site") in (None, "same-origin", "none"):
            return True
        return (header(scope, b"sec-fetch-mode"), header(scope, b"sec-fetch-dest")) == ("navigate", "document")


class AllowedHosts:
    """Host names that only the operator of a machine can point at it: an address, a name without a dot, its own name.

    A name that an attacker registers can resolve to any machine, and such names have dots. `more`: names to accept as
    well.
    """

    def __init__(self, host: str, more: Iterable[str]) -> None:
        self._loopback_only = host in LOOPBACK
        self._names = {*LOOPBACK, *(name.lower() for name in more)}
        if not self._loopback_only:
            self._names |= {host.lower(), socket.gethostname().lower()}
        self._names -= set(_ANY_ADDRESS)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not name:
            return False
        if name in self._names or self._loopback_only:
            return name in self._names
        return "." not in name or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
