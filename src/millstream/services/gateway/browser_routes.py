"""The routes that browsers and other clients connect to: server-sent events, WebSockets, tickets, health, and static pages if configured."""

import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocketClose

from millstream.observability import metrics as m
from millstream.observability.health import Health
from millstream.observability.metrics import Metrics
from millstream.services.gateway.auth import Authorizer
from millstream.services.gateway.connection_manager import ConnectionManager
from millstream.services.gateway.follow_request import parse_follow_request
from millstream.services.gateway.transports import EventTransport, SocketTransport, reason_of
from millstream.services.web.errors import Refused, install_error_handlers
from millstream.services.web.headers import bearer_token
from millstream.services.web.origin_check import OriginCheck

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_REFUSED_CODE = 4_000


class _AnyPath(Convertor[str]):
    """The rest of a path, whatever it contains: the default convertor ends at a line break."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        """Unchanged; `parse_follow_request` parses the raw bytes."""
        return value

    def to_string(self, value: str) -> str:
        """Unchanged."""
        return value


register_url_convertor("name", _AnyPath())


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """The components of the gateway.

    * `origins`: origins whose pages may use it, beside its own
    * `host_names`: accepted Host names; None: any
    * `pages`: a folder of static files to serve
    """

    connections: ConnectionManager
    authorizer: Authorizer
    health: Health
    metrics: Metrics
    origins: Sequence[str] = ()
    host_names: Container[str] | None = None
    pages: Path | None = None


class _TicketRequest(msgspec.Struct):
    streams: list[str]


def make_app(parts: GatewayContext) -> Starlette:
    """The ASGI application."""
    events, sockets = _EventRoute(parts), _SocketRoute(parts)
    routes: list[BaseRoute] = [
        Route("/streams", events, methods=["GET"]),
        Route("/streams/{stream:name}", events, methods=["GET"]),
        WebSocketRoute("/ws", sockets),
        WebSocketRoute("/ws/{stream:name}", sockets),
        Route("/tickets", _tickets(parts), methods=["POST"]),
        Route("/healthz", _healthz(parts), methods=["GET"]),
    ]
    if parts.pages is not None:
        routes.append(Mount("/", _StaticPages(directory=parts.pages, html=True)))
    middleware = [Middleware(OriginCheck, parts.origins, parts.host_names)]
    if parts.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=parts.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "Last-Event-ID"],
            )
        )
    service = Starlette(routes=routes, middleware=middleware)
    service.router.redirect_slashes = False
    install_error_handlers(service, "the server")
    return service


class _EventRoute:
    """Server-sent events, as an ASGI application."""

    def __init__(self, parts: GatewayContext) -> None:
        self._parts = parts

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Deliver the requested streams. Raises Refused."""
        parts = self._parts
        try:
            if scope["method"] != "GET":
                raise Refused(405, "only GET")
            request = parse_follow_request(scope, b"/streams")
            principal = parts.authorizer.authorize(request.streams, token=request.token, ticket=request.ticket)
            await parts.connections.serve(EventTransport(scope, receive, send), principal, request.starts)
        except Refused as refused:
            parts.metrics.count(m.SERVE_REFUSED, status=str(refused.status))
            raise


class _SocketRoute:
    """WebSockets, as an ASGI application.

    A script sees no response to a refused handshake, only a close code and a reason.
    """

    def __init__(self, parts: GatewayContext) -> None:
        self._parts = parts

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Deliver the requested streams, or close with 4000 plus the HTTP status."""
        parts, transport = self._parts, SocketTransport(scope, receive, send)
        try:
            request = parse_follow_request(scope, b"/ws")
            principal = parts.authorizer.authorize(request.streams, token=request.token, ticket=request.ticket)
            await parts.connections.serve(transport, principal, request.starts)
        except Refused as refused:
            parts.metrics.count(m.SERVE_REFUSED, status=str(refused.status))
            await transport.open()
            code = _REFUSED_CODE + refused.status
            await send({"type": "websocket.close", "code": code, "reason": reason_of(str(refused))})


class _StaticPages(StaticFiles):
    """Static files, for HTTP requests only; no hidden ones, such as `.git` or `.env`."""

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Send a file, or close a WebSocket."""
        app = super().__call__ if scope["type"] == "http" else WebSocketClose()
        await app(scope, receive, send)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """The path of a file. `.well-known` is public (RFC 8615)."""
        if any(part.startswith(".") and part not in (".", ".well-known") for part in Path(path).parts):
            return "", None
        return super().lookup_path(path)


def _tickets(parts: GatewayContext) -> Callable[[Request], "object"]:
    async def tickets(request: Request) -> Response:
        try:
            ticket_request = msgspec.json.decode(await request.body(), type=_TicketRequest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Refused(422, f'send {{"streams": ["NAME"]}}: {error}') from error
        ticket = parts.authorizer.issue_ticket(bearer_token(request.scope), ticket_request.streams)
        body = {"ticket": ticket.text, "expires_in_s": ticket.seconds}
        return JSONResponse(body, headers={"Cache-Control": "no-store"})

    return tickets


def _healthz(parts: GatewayContext) -> Callable[[Request], Response]:
    def healthz(request: Request) -> Response:  # noqa: ARG001 - Starlette passes it
        """Reports the status only, as it requires no token."""
        failing = bool(parts.health.failures())
        return JSONResponse({"status": "failing" if failing else "ok"}, 503 if failing else 200)

    return healthz
