"""The gateway process: a router and the HTTP service in front of it, until a signal stops it."""

import asyncio
import logging
import socket
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.observability.health import Health, Progress
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import HealthServer
from millstream.redis_client.client import Client
from millstream.router import ReadPolicy, Router
from millstream.services.gateway.auth import Authorizer
from millstream.services.gateway.browser_routes import GatewayContext, make_app
from millstream.services.gateway.client_connection import FlowControl
from millstream.services.gateway.connection_manager import ConnectionLimits, ConnectionManager
from millstream.services.gateway.gc_freeze import GcFreeze
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server, WebSockets
from millstream.services.web.listen import listen, url_of
from millstream.services.web.socket_server import SocketProtocol
from millstream.services.web.token_reload import reload_tokens

logger = logging.getLogger(__name__)

_FRAME_BYTES = 4_096
_CHECK_S = 5.0
_OTHER_CONNECTIONS = 100
_SHUTDOWN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of a gateway.

    * `authorizer`: which token may follow which streams; `token_file`: reloaded when it changes
    * `origins`: origins whose pages may use it, beside its own
    * `host_names`: accepted Host names; None: any
    * `pages`: a folder of static files to serve
    * `request_s`: seconds in which a request must arrive
    * `metrics_address`: host and port of `/healthz`, `/readyz` and `/metrics`; None: these are not served
    * `stop_s`: how long a stop may take, in seconds
    """

    url: str = field(repr=False)
    authorizer: Authorizer
    token_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    origins: Sequence[str] = ()
    host_names: Container[str] | None = None
    pages: Path | None = None
    request_s: float = 10.0
    metrics_address: tuple[str, int] | None = None
    flow: FlowControl = field(default_factory=FlowControl)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    stop_s: float = 5.0


def run_gateway(
    serving: GatewayOptions, *, recorder: Recorder | None = None, on_ready: Callable[[str, str | None], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` gets the URL, and that of /metrics or None.

    Raises ConfigError where the limit of open files is too low, ServerError, and Unavailable if Redis does not answer
    at the start.
    """
    # Beside connections that follow streams there are requests for tickets, pages and health.
    limits = Limits(connections=serving.limits.connections + _OTHER_CONNECTIONS, request_s=serving.request_s)
    recorder, health, metrics_url = recorder or Recorder(), Health(), None
    with ExitStack() as stack:
        client = stack.enter_context(Client(serving.url))
        client.execute("PING")
        if serving.metrics_address is not None:
            host, port = serving.metrics_address
            metrics_url = f"{stack.enter_context(HealthServer(health, recorder, host=host, port=port)).url}/metrics"
        listener = listen(serving.host, serving.port, connections=limits.connections, stall_s=serving.flow.stall_s)
        stack.callback(listener.close)
        ready = partial(on_ready, url_of(listener), metrics_url)
        asyncio.run(_serve(serving, limits, client, listener, (recorder, health), ready))


async def _serve(
    serving: GatewayOptions,
    limits: Limits,
    client: Client,
    listener: socket.socket,
    observability: tuple[Recorder, Health],
    on_ready: Callable[[], None],
) -> None:
    recorder, health = observability
    progress = health.progress("serve", run_within_ms=0)
    read = ReadPolicy(budget_bytes=serving.flow.budget_bytes)
    async with Router(serving.url, read=read, metrics=recorder) as router:
        manager = ConnectionManager(router, limits=serving.limits, pace=serving.flow, metrics=recorder)
        service = make_app(
            GatewayContext(
                connections=manager,
                authorizer=serving.authorizer,
                health=health,
                metrics=recorder,
                origins=serving.origins,
                host_names=serving.host_names,
                pages=serving.pages,
            )
        )
        background = [
            asyncio.create_task(_check_redis(client, progress)),
            asyncio.create_task(GcFreeze(lambda: manager.counts).run()),
        ]
        if serving.token_file is not None:
            background.append(asyncio.create_task(reload_tokens(serving.authorizer.reload, serving.token_file)))
        pace = serving.flow
        sockets = WebSockets(
            protocol=SocketProtocol, frame_bytes=_FRAME_BYTES, ping_s=pace.heartbeat_s, pong_s=pace.stall_s
        )
        server = Server(
            service,
            limits,
            metrics=recorder,
            stop_s=_SHUTDOWN_S,
            sockets=sockets,
            on_shutdown=lambda: manager.close(serving.stop_s),
        )
        server.stop_at_signals()
        on_ready()
        await server.serve([listener])
        health.on_stopping()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


async def _check_redis(client: Client, progress: Progress) -> None:
    """Check that Redis answers, also while no stream is followed."""
    while True:
        try:
            await asyncio.to_thread(client.execute, "PING")
            progress.on_read()
        except MillstreamError:
            pass  # health reports the missing progress
        await asyncio.sleep(_CHECK_S)
