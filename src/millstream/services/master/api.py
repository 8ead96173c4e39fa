"""A master's HTTP API. Its OpenAPI document is at `/openapi.json`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from millstream.observability.health import Health
from millstream.observability.metrics import Recorder, exposition
from millstream.services.master.acknowledgements import Acknowledgement, Done
from millstream.services.master.call_batching import Batches
from millstream.services.master.delegation import Delegator, entry_id_of
from millstream.services.master.health_checks import HealthChecker
from millstream.services.master.health_url_allowlist import AllowList
from millstream.services.master.queries import Queries
from millstream.services.master.registry import Registry
from millstream.services.master.routes import BodyRoute, Permission, first_mistake
from millstream.services.master.schemas import (
    Acknowledged,
    Acknowledging,
    Alive,
    Consumers,
    Failed,
    Failing,
    Heartbeat,
    NotAcknowledged,
    Problem,
    Registered,
    Registering,
    Released,
    Releasing,
    Standing,
    Tickets,
)
from millstream.services.master.scopes import Scope, Tokens
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused, install_error_handlers, json_handler
from millstream.services.web.origin_check import OriginCheck

_PAGE = 100
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem} for code in (401, 403, 404, 409, 413, 415, 422, 503)
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the API is made of."""

    settings: MasterSettings
    registry: Registry
    desk: Delegator
    views: Queries
    tokens: Tokens
    allowed: AllowList
    acknowledgements: Batches[Done, Acknowledgement]
    pinger: HealthChecker
    health: Health
    recorder: Recorder
    hurry: Callable[[], None]
    names: Container[str] | None
    most_page: int


def make_api(parts: Parts) -> FastAPI:
    """The API of one master; while it is served, consumers are pinged."""

    @asynccontextmanager
    async def pinging(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(parts.pinger.run())
        with parts.acknowledgements:
            yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    api = FastAPI(
        title="millstream master", version=version("millstream"), docs_url=None, redoc_url=None, lifespan=pinging,
        responses=_PROBLEMS,
    )  # fmt: skip
    api.add_middleware(OriginCheck, origins=(), names=parts.names)
    api.router.route_class = BodyRoute
    install_error_handlers(api, "the master")
    api.add_exception_handler(RequestValidationError, json_handler(lambda error: 422, first_mistake))
    _add_consumers(api, parts)
    _add_messages(api, parts)
    _add_looks(api, parts)
    return api


def _may(parts: Parts, scope: Scope) -> Any:
    return Depends(Permission(parts.tokens, scope))


def _add_consumers(api: FastAPI, parts: Parts) -> None:
    settings, registry, desk = parts.settings, parts.registry, parts.desk

    @api.post("/api/consumers/register", dependencies=[_may(parts, "register")])
    def register(body: Registering) -> Registered:
        """Begin a life of a consumer: it is pinged and given messages. What its last life had goes on to others."""
        if body.health_url is not None:
            parts.allowed.target(body.health_url)
        found = registry.register(
            body.consumer, health_url=body.health_url, max_tickets=body.max_tickets or settings.max_tickets,
            instance=body.instance, silent_ms=settings.silent_ms,
        )  # fmt: skip
        parts.hurry()  # what an earlier life of it held is free then
        desk.deal(body.consumer, found, count=1)
        return Registered(
            consumer=body.consumer, stream=settings.ticket_stream, group=settings.group, max_tickets=found.max_tickets,
            ping_interval_s=settings.ping_ms / 1000,
        )  # fmt: skip

    @api.post("/api/consumers/heartbeat", dependencies=[_may(parts, "register")])
    def heartbeat(body: Heartbeat) -> Alive:
        """Say that a consumer lives. Of one with a health URL it is that which counts. 404: register again."""
        found = registry.get(body.consumer)
        if found is None:
            raise Refused(404, f"no consumer {body.consumer!r} is registered: register first")
        if found.health_url is None:
            registry.healthy(body.consumer, found.incarnation, every_ms=settings.ping_ms // 4)
        return Alive(message_ids=[lease.waiting[0].id.decode() for lease in desk.held_by(body.consumer)])


def _add_messages(api: FastAPI, parts: Parts) -> None:
    desk, may = parts.desk, [_may(parts, "acknowledge")]

    @api.post("/api/messages/acknowledge", dependencies=may)
    async def acknowledge(body: Acknowledging) -> Acknowledged:
        """Say that a message is done. May be repeated. 409: it is not the consumer's any more. 404: there is none."""
        ids = [entry_id_of(one) for one in body.message_ids or [body.message_id or ""]]
        found = await parts.acknowledgements.call(Done(body.consumer, ids))
        answer = Acknowledged(known=not found.fresh and not found.refused, next=_texts(found.next))
        if body.message_id is not None and found.refused:
            raise found.refused[0][1]
        if body.message_ids:
            answer.refused = [
                NotAcknowledged(message_id=one.decode(), status=why.status, error=str(why))
                for one, why in found.refused
            ]
        return answer

    @api.post("/api/messages/fail", dependencies=may)
    def fail(body: Failing) -> Failed:
        """Say that a message could not be done: it is tried again later, before all newer ones of its ticket."""
        outcome, ids = desk.fail(body.consumer, body.message_id, body.error, retry=body.retry)
        return Failed(outcome=outcome, next=_texts(ids))

    @api.post("/api/messages/release", dependencies=may)
    def release(body: Releasing) -> Released:
        """Give a message back; without `message_id` all, and leave: for a consumer that stops."""
        if body.message_id is None:
            parts.registry.close(body.consumer)
        released = desk.release(body.consumer, body.message_id)
        if body.message_id is None:
            parts.registry.remove(body.consumer)
        return Released(released=released)


def _add_looks(api: FastAPI, parts: Parts) -> None:
    may = [_may(parts, "read")]
    default = min(_PAGE, parts.most_page)

    @api.get("/api/tickets", dependencies=may)
    def tickets(cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=parts.most_page)] = default) -> Tickets:
        """Who works on which ticket, and what waits for whom."""
        return parts.views.tickets(cursor, limit)

    @api.get("/api/consumers", dependencies=may)
    def consumers(
        cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=parts.most_page)] = default
    ) -> Consumers:
        """The registered consumers, and what they have."""
        return parts.views.consumers(cursor, limit)

    @api.get("/api/health", responses={503: {"model": Standing}})
    async def health(response: Response) -> Standing:
        """Whether this master makes its rounds. It takes no thread, as those may all wait for Redis."""
        reasons = parts.health.failures()
        response.status_code = 503 if reasons else 200
        return Standing(status="failing" if reasons else "ok", master=parts.settings.master, reasons=reasons)

    @api.get("/metrics", dependencies=may, response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        body, content_type = exposition(parts.recorder)
        return Response(body, media_type=content_type)


def _texts(ids: Sequence[bytes]) -> list[str]:
    return [one.decode() for one in ids]
