"""The master's HTTP API. Its OpenAPI document is at `/openapi.json`."""

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
from millstream.services.master.acknowledgements import AckRequest, AckResult
from millstream.services.master.call_batching import CallBatcher
from millstream.services.master.delegation import Delegator, entry_id_of
from millstream.services.master.health_checks import HealthChecker
from millstream.services.master.health_url_allowlist import AllowList
from millstream.services.master.json_body_route import BodyRoute, Permission, first_error
from millstream.services.master.queries import Queries
from millstream.services.master.registry import Registry
from millstream.services.master.schemas import (
    AcknowledgeRequest,
    AcknowledgeResponse,
    ConsumerPage,
    Cursor,
    ErrorResponse,
    FailRequest,
    FailResponse,
    HealthResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    NotAcknowledged,
    RegisterRequest,
    RegisterResponse,
    ReleaseRequest,
    ReleaseResponse,
    TicketPage,
)
from millstream.services.master.scopes import Scope, Tokens
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused, install_error_handlers, json_handler
from millstream.services.web.origin_check import OriginCheck

_PAGE = 100
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 500, 503)
}


@dataclass(frozen=True, kw_only=True)
class MasterContext:
    """The components that the API calls."""

    settings: MasterSettings
    registry: Registry
    delegator: Delegator
    queries: Queries
    tokens: Tokens
    allow_list: AllowList
    ack_batches: CallBatcher[AckRequest, AckResult]
    health_checker: HealthChecker
    health: Health
    recorder: Recorder
    check_leases_now: Callable[[], None]
    host_names: Container[str] | None
    max_page: int


def make_api(parts: MasterContext) -> FastAPI:
    """The API of one master. Health checks of the consumers run while it is served."""

    @asynccontextmanager
    async def checking_health(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(parts.health_checker.run())
        with parts.ack_batches:
            yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    api = FastAPI(
        title="millstream master",
        version=version("millstream"),
        docs_url=None,
        redoc_url=None,
        lifespan=checking_health,
        responses=_PROBLEMS,
    )
    api.add_middleware(OriginCheck, origins=(), names=parts.host_names)
    api.router.route_class = BodyRoute
    install_error_handlers(api, "the master")
    api.add_exception_handler(RequestValidationError, json_handler(lambda error: 422, first_error))
    _add_consumer_routes(api, parts)
    _add_message_routes(api, parts)
    _add_query_routes(api, parts)
    return api


def _requires(parts: MasterContext, scope: Scope) -> Any:
    return Depends(Permission(parts.tokens, scope))


def _add_consumer_routes(api: FastAPI, parts: MasterContext) -> None:
    settings, registry, delegator = parts.settings, parts.registry, parts.delegator

    @api.post("/api/consumers/register", dependencies=[_requires(parts, "register")])
    def register(body: RegisterRequest) -> RegisterResponse:
        """Register a consumer: masters check its health and assign it messages.

        Messages of its earlier incarnation are reassigned to other consumers.
        """
        if body.health_url is not None:
            parts.allow_list.parse(body.health_url)
        found = registry.register(
            body.consumer,
            health_url=body.health_url,
            max_tickets=body.max_tickets or settings.max_tickets,
            instance=body.instance,
            silent_ms=settings.dead_after_ms,
        )
        parts.check_leases_now()  # frees the leases of its earlier incarnation
        delegator.assign(body.consumer, found, count=1)
        return RegisterResponse(
            consumer=body.consumer,
            stream=settings.ticket_stream,
            group=settings.group,
            max_tickets=found.max_tickets,
            ping_interval_s=settings.ping_ms / 1000,
        )

    @api.post("/api/consumers/heartbeat", dependencies=[_requires(parts, "register")])
    def heartbeat(body: HeartbeatRequest) -> HeartbeatResponse:
        """Report that a consumer is alive. If it has a health URL, only the health URL counts. 404: register again."""
        found = registry.get(body.consumer)
        if found is None:
            raise Refused(404, f"no consumer {body.consumer!r} is registered: register first")
        if found.health_url is None:
            registry.record_success(body.consumer, found.incarnation, every_ms=settings.ping_ms // 4)
        return HeartbeatResponse(
            message_ids=[lease.queued[0].id.decode() for lease in delegator.leases_of(body.consumer)]
        )


def _add_message_routes(api: FastAPI, parts: MasterContext) -> None:
    delegator, required = parts.delegator, [_requires(parts, "acknowledge")]

    @api.post("/api/messages/acknowledge", dependencies=required)
    async def acknowledge(body: AcknowledgeRequest) -> AcknowledgeResponse:
        """Acknowledge a message. Idempotent. 409: another consumer has it or has done it. 404: no such message."""
        ids = [entry_id_of(one) for one in body.message_ids or [body.message_id or ""]]
        found = await parts.ack_batches.call(AckRequest(body.consumer, ids))
        answer = AcknowledgeResponse(known=not found.newly_acked and not found.refused, next=_texts(found.next_ids))
        if body.message_id is not None and found.refused:
            raise found.refused[0][1]
        if body.message_ids:
            answer.refused = [
                NotAcknowledged(message_id=one.decode(), status=why.status, error=str(why))
                for one, why in found.refused
            ]
        return answer

    @api.post("/api/messages/fail", dependencies=required)
    def fail(body: FailRequest) -> FailResponse:
        """Report a failed message. It is retried later, before all newer messages of its ticket."""
        outcome, ids = delegator.fail(body.consumer, body.message_id, body.error, retry=body.retry)
        return FailResponse(outcome=outcome, next=_texts(ids))

    @api.post("/api/messages/release", dependencies=required)
    def release(body: ReleaseRequest) -> ReleaseResponse:
        """Release a message. Without `message_id`: release all and unregister, for a consumer that stops."""
        if body.message_id is None:
            parts.registry.stop_assigning(body.consumer)
        released = delegator.release(body.consumer, body.message_id)
        if body.message_id is None:
            parts.registry.unregister(body.consumer)
        return ReleaseResponse(released=released)


def _add_query_routes(api: FastAPI, parts: MasterContext) -> None:
    required = [_requires(parts, "read")]
    default = min(_PAGE, parts.max_page)

    @api.get("/api/tickets", dependencies=required)
    def tickets(cursor: Cursor = None, limit: Annotated[int, Query(ge=1, le=parts.max_page)] = default) -> TicketPage:
        """The tickets with unfinished messages, and the consumer that has each."""
        return parts.queries.tickets(cursor, limit)

    @api.get("/api/consumers", dependencies=required)
    def consumers(
        cursor: Cursor = None, limit: Annotated[int, Query(ge=1, le=parts.max_page)] = default
    ) -> ConsumerPage:
        """The registered consumers and their messages."""
        return parts.queries.consumers(cursor, limit)

    @api.get("/api/health", responses={503: {"model": HealthResponse}})
    async def health(response: Response) -> HealthResponse:
        """Whether this master's delegation loop makes progress. Uses no pool thread: all may be waiting for Redis."""
        reasons = parts.health.failures()
        response.status_code = 503 if reasons else 200
        return HealthResponse(status="failing" if reasons else "ok", master=parts.settings.master, reasons=reasons)

    @api.get("/metrics", dependencies=required, response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        body, content_type = exposition(parts.recorder)
        return Response(body, media_type=content_type)


def _texts(ids: Sequence[bytes]) -> list[str]:
    return [one.decode() for one in ids]
