"""The console as an ASGI application: its routes, and the checks before a view answers."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from millstream.admin.audit_log import may_have_run
from millstream.admin.stuck_places import StuckScan
from millstream.admin.value_redaction import Redact, show_all
from millstream.errors import ConfigError, MillstreamError, RedisError, WrongType
from millstream.redis_client import DEFAULT_URL
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.display import Display
from millstream.services.console.guard import CHALLENGE, Authorize, Guard, make_guard
from millstream.services.console.handler_rates import HandlerRates
from millstream.services.console.live_reads import LiveReads
from millstream.services.console.login import MOST_FIELDS, FormSecret, form_of, login_routes, root_of, token_of
from millstream.services.console.pages import Page, PageRequest, Shared
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rendering import render
from millstream.services.console.rights import ConsoleTokens, Viewer
from millstream.services.console.secure_headers import SecureHeaders
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.console.stream_rates import StreamRates
from millstream.services.console.views import PAGES
from millstream.services.web.errors import Refused
from millstream.services.web.origin_check import OriginCheck

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

RENEWAL_HEADER = "Millstream-Renewal"
"""The header of a request in which an open page renews its figures. No form and no link of another site sends it."""

RENEW_AFTER_HEADER = "Millstream-Renew-After-Ms"
"""In how many milliseconds there are newer figures."""

_MOST_STUCK_PLACES = 1_000

_ANY_TOKEN = secrets.token_hex(32)
"""Stands for the form token in what several viewers get."""

_OF_ONE_VIEWER = ("done", "signature")
"""Parameters that the figures of a page do not depend on."""


@dataclass(frozen=True, kw_only=True)
class ConsoleParts:
    """The components of a console. `host_names`: accepted names in the header Host; None: any.

    `live`: what open pages renew their figures with.
    """

    clients: ClientPool
    guard: Guard
    names: StreamNames
    ranking: StreamRanking
    redrives: RedriveThreads
    redact: Redact = show_all
    host_names: Container[str] | None = None
    shared: Shared = field(default_factory=Shared)
    stuck: StuckScan = field(default_factory=partial(StuckScan, most=_MOST_STUCK_PLACES))
    rates: StreamRates = field(default_factory=StreamRates)
    handler_rates: HandlerRates = field(default_factory=HandlerRates)
    live: LiveReads[bytes] = field(default_factory=LiveReads)


def console_app(
    url: str = DEFAULT_URL,
    *,
    authorize: Authorize | None = None,
    token_file: Path | None = None,
    redact: Redact = show_all,
    host_names: Container[str] | None = None,
) -> "ASGIApp":
    """The console as an ASGI application, to be mounted in another one or served by itself.

    * `url`: of Redis
    * `authorize`: called with each request (`starlette.requests.Request`); returns the Level, or the Viewer, of its
      sender, or None to refuse it; may be a coroutine function. The application around the console logs people in
    * `token_file`: without `authorize`: lines with a token, its level and `name=NAME`; people log in with a token
    * `redact`: called with the name and the text of each value that messages contain; returns the text to show
    * `host_names`: accepted names in the header Host; None: any

    Raises ConfigError without `authorize` and `token_file`, and for a token file that cannot be read or has no token.
    """
    tokens = ConsoleTokens()
    if token_file is not None:
        tokens.read(token_file)
    if authorize is None and not tokens:
        raise ConfigError("give authorize=, or token_file= with a token: else every client could read all messages")
    clients = ClientPool(url)
    guard = make_guard(clients, tokens, token_file, authorize)
    names = StreamNames(url)
    parts = ConsoleParts(
        clients=clients,
        guard=guard,
        names=names,
        ranking=StreamRanking(url, names),
        redrives=RedriveThreads(url),
        redact=redact,
        host_names=host_names,
    )
    return SecureHeaders(make_console(parts))


def make_console(parts: ConsoleParts) -> Starlette:
    """The ASGI application of these parts. What serves it adds SECURE_HEADERS to each response."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(parts.redrives.stop)
        parts.clients.close()

    routes = [
        Route("/console.css", _StaticFile("console.css", "text/css").answer, methods=["GET"]),
        Route("/console.js", _StaticFile("console.js", "text/javascript").answer, methods=["GET"]),
        Route("/healthz", _healthz, methods=["GET"]),
        *(login_routes(parts.guard) if parts.guard.has_login else ()),
        *(Route(one.path, _Endpoint(parts, one).answer, methods=[one.method]) for one in PAGES),
    ]
    service = Starlette(routes=routes, middleware=[Middleware(OriginCheck, (), parts.host_names)], lifespan=lifespan)
    service.router.redirect_slashes = False
    service.add_exception_handler(Refused, _answer_refused)
    service.add_exception_handler(RedisError, _RedisErrors(parts.redact).answer)
    service.add_exception_handler(HTTPException, _answer_http)
    service.add_exception_handler(Exception, _answer_failure)
    return service


class _Endpoint:
    """One page as an endpoint of Starlette."""

    def __init__(self, parts: ConsoleParts, page: Page) -> None:
        self._parts = parts
        self._page = page

    async def answer(self, request: Request) -> Response:
        """Let the view answer, in a thread, if the viewer may have the page. Raises Refused."""
        parts, page = self._parts, self._page
        is_renewal = page.is_live and RENEWAL_HEADER in request.headers
        viewer = await parts.guard.viewer_of(request, is_live=is_renewal)
        if viewer is None:
            if parts.guard.has_login and page.method == "GET":
                return RedirectResponse(f"{root_of(request)}/login", 303)
            raise Refused(401, "log in first", CHALLENGE if parts.guard.has_login else None)
        if not viewer.may(page.level):
            raise Refused(403, f"this needs the level {page.level.word}, and {viewer.name} has {viewer.level.word}")
        form = await form_of(request) if page.method == "POST" else {}
        if page.method == "POST":
            parts.guard.check_form(request, token_of(form))
        secret = FormSecret(request)
        if is_renewal:
            return await self._renew(request, viewer, secret.form_token)
        response = await parts.clients.in_thread(lambda: self._view(request, viewer, form, secret.form_token))
        secret.keep(request, response)
        return response

    async def _renew(self, request: Request, viewer: Viewer, form_token: str) -> Response:
        """The figures of an open page, the same for all viewers of its address and level but for their form tokens.

        Each viewer has figures of their own where the application around the console decides what they see of messages.
        """
        parts = self._parts

        async def read() -> bytes:
            view = await parts.clients.in_thread(lambda: self._view(request, viewer, {}, _ANY_TOKEN, is_renewal=True))
            return bytes(view.body)

        if parts.guard.authorize is not None and parts.redact is not show_all:
            body, kept_ms = await read(), parts.live.keep_ms
        else:
            query = tuple(sorted((name, one) for name, one in _query_of(request).items() if name not in _OF_ONE_VIEWER))
            body, kept_ms = await parts.live.get((root_of(request), self._page.path, query, viewer.level), read)
        headers = {RENEW_AFTER_HEADER: str(ceil(kept_ms))}
        return HTMLResponse(body.replace(_ANY_TOKEN.encode(), form_token.encode()), headers=headers)

    def _view(
        self,
        request: Request,
        viewer: Viewer,
        form: Mapping[str, Sequence[str]],
        form_token: str,
        *,
        is_renewal: bool = False,
    ) -> Response:
        parts, display = self._parts, Display(self._parts.redact)
        try:
            with parts.clients.client() as client:
                return self._page.view(
                    PageRequest(
                        client=client,
                        clients=parts.clients,
                        viewer=viewer,
                        display=display,
                        shared=parts.shared,
                        names=parts.names,
                        ranking=parts.ranking,
                        redrives=parts.redrives,
                        rates=parts.rates,
                        handler_rates=parts.handler_rates,
                        stuck=parts.stuck,
                        root=root_of(request),
                        path=self._page.path,
                        query=_query_of(request),
                        form=form,
                        form_token=form_token,
                        has_login=parts.guard.has_login,
                        now_ms=time.time() * 1000,
                        live_ms=parts.live.keep_ms if self._page.is_live else None,
                        is_renewal=is_renewal,
                    )
                )
        except (Refused, RedisError):
            raise
        except ConfigError as error:
            raise Refused(400, display.text(str(error))) from error
        except MillstreamError as error:
            raise Refused(404, display.text(str(error))) from error


class _RedisErrors:
    """Answers requests that ended in an error of Redis."""

    def __init__(self, redact: Redact) -> None:
        self._display = Display(redact)

    def answer(self, request: Request, error: Exception) -> Response:
        """A page with the error, and whether an action may have been done."""
        doubt = (
            ". The action may have been done: see its page and the audit before you repeat it"
            if request.method == "POST" and isinstance(error, RedisError) and may_have_run(error)
            else ""
        )
        damage = (
            ". Another program has written to it: see what millstream doctor finds"
            if isinstance(error, WrongType)
            else ""
        )
        return _problem(request, 503, f"Redis: {self._display.text(str(error))}{doubt}{damage}")


def _query_of(request: Request) -> Mapping[str, str]:
    text = request.scope["query_string"].decode("ascii", "replace")
    try:
        found = parse_qs(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise Refused(400, f"the address cannot be read: {error}") from error
    # A key may be empty; any other parameter that is empty is a missing one.
    return {name: values[0] for name, values in found.items() if values[0] or name == "key"}


class _StaticFile:
    """A file of the package, the same for all."""

    def __init__(self, name: str, media_type: str) -> None:
        self._name = name
        self._media_type = media_type

    def answer(self, _: Request) -> Response:
        """The file."""
        text = resources.files("millstream.services.console").joinpath(f"static/{self._name}").read_text("utf-8")
        return Response(text, media_type=self._media_type)


async def _healthz(_: Request) -> Response:
    """Report only that the process serves, as this page requires no token."""
    return PlainTextResponse("ok")


def _answer_refused(request: Request, error: Exception) -> Response:
    return _problem(request, getattr(error, "status", 500), str(error), getattr(error, "headers", None))


def _answer_http(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    return _problem(request, status, "there is no such page" if status == 404 else str(getattr(error, "detail", "")))


def _answer_failure(request: Request, error: Exception) -> Response:
    logger.error("a page of the console failed: %s", request.url.path, exc_info=error)
    return _problem(request, 500, "internal error; the log of the console has the cause")


def _problem(request: Request, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return HTMLResponse(render("problem.html", root=root_of(request), status=status, problem=text), status, headers)
