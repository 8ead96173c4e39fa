"""A consumer as a service: it works in a thread, and answers `/api/health` as masters ask."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from millstream.master.consumer import ConsumerSettings, DelegatedConsumer, Function
from millstream.master.serving import address, listen, make_server, serve

logger = logging.getLogger(__name__)


def run_consumer(
    function: Function, settings: ConsumerSettings, *, host: str, port: int, stop_s: float,
    on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Be a consumer until SIGTERM or SIGINT. Without a health URL of its own it names the address it listens on.

    Raises ServerError, and what ended its work.
    """
    stopping = threading.Event()
    failures: list[BaseException] = []
    listener = listen(host, port)
    settings = replace(settings, health_url=settings.health_url or f"{address(listener)}/api/health")
    consumer = DelegatedConsumer(function, settings, stopping)
    server = make_server(_pages(consumer, settings.consumer))

    def work() -> None:
        try:
            consumer.run(stop_s=stop_s)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)
            server.should_exit = True

    thread = threading.Thread(target=work, name="millstream-consumer")
    thread.start()
    try:
        on_ready(address(listener))
        serve(server, listener)
    finally:
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]


def _pages(consumer: DelegatedConsumer, name: str) -> Starlette:
    async def health(_: Request) -> JSONResponse:
        overdue = consumer.overdue()
        body = {"status": "failing" if overdue else "ok", "consumer": name, "overdue": overdue}
        return JSONResponse(body, 503 if overdue else 200)

    return Starlette(routes=[Route("/api/health", health)])
