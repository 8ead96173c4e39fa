"""run_consumer: runs a delegated consumer on a thread and serves its `/api/health` to masters."""

import threading
from collections.abc import Callable
from dataclasses import replace

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from millstream.observability.metrics import NO_METRICS
from millstream.services.master.delegated_consumer import ConsumerSettings, DelegatedConsumer, Function
from millstream.services.master.master_process import serve_with_worker
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server
from millstream.services.web.listen import listen, url_of

_STOP_S = 5.0


def run_consumer(
    function: Function,
    settings: ConsumerSettings,
    *,
    host: str,
    port: int,
    limits: Limits,
    stop_s: float,
    on_ready: Callable[[str], None],
) -> None:
    """Run a consumer until SIGTERM or SIGINT. Without a health URL in `settings`, its listen address is registered.

    Raises ServerError, and the exception that ended the consumer.
    """
    stopping = threading.Event()
    listener = listen(host, port, connections=limits.connections)
    settings = replace(settings, health_url=settings.health_url or f"{url_of(listener)}/api/health")
    consumer = DelegatedConsumer(function, settings, stopping)
    server = Server(_pages(consumer, settings.consumer), limits, metrics=NO_METRICS, stop_s=_STOP_S)
    serve_with_worker(server, listener, lambda: consumer.run(stop_s=stop_s), stopping, on_ready=on_ready)


def _pages(consumer: DelegatedConsumer, name: str) -> Starlette:
    async def health(_: Request) -> JSONResponse:
        overdue = consumer.overdue()
        body = {"status": "failing" if overdue else "ok", "consumer": name, "overdue": overdue}
        return JSONResponse(body, 503 if overdue else 200)

    return Starlette(routes=[Route("/api/health", health)])
