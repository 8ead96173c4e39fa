"""run_master: one master process, with the delegation loop on a thread and the API on the main thread."""

import socket
import threading
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass, field

from millstream.observability.health import Health
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import HealthServer
from millstream.redis_client.client import Client
from millstream.services.master.acknowledgements import Acknowledger
from millstream.services.master.api import MasterContext, make_api
from millstream.services.master.call_batching import CallBatcher
from millstream.services.master.delegation import Delegator
from millstream.services.master.delegation_loop import DelegationLoop
from millstream.services.master.health_checks import HealthChecker
from millstream.services.master.health_url_allowlist import AllowList
from millstream.services.master.queries import Queries
from millstream.services.master.registry import Registry
from millstream.services.master.scopes import Tokens
from millstream.services.master.settings import MasterSettings
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server
from millstream.services.web.listen import listen, url_of

_ROUND_WITHIN_MS = 30_000.0
_STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MasterServerOptions:
    """Where a master listens, and which requests it accepts.

    * `host_names`: accepted host names of requests; None: any
    * `limits`: limits of its HTTP connections
    * `max_page`: maximum number of items on a page
    * `metrics_address`: host and port of `/healthz`, `/readyz` and `/metrics` without a token; None: not served there
    """

    url: str = field(repr=False)
    tokens: Tokens
    allow_list: AllowList
    host: str = "127.0.0.1"
    port: int = 0
    host_names: Container[str] | None = None
    limits: Limits = field(default_factory=lambda: Limits(connections=2_000))
    max_page: int = 1_000
    metrics_address: tuple[str, int] | None = None


def run_master(
    settings: MasterSettings,
    serving: MasterServerOptions,
    *,
    recorder: Recorder | None = None,
    on_ready: Callable[[str, str | None], None],
) -> None:
    """Run a master until SIGTERM or SIGINT. `on_ready` is called with its URL, and that of /metrics or None.

    Leases stay when it stops: another master goes on with them, or this one after its restart. Raises ServerError, and
    the exception that ended the delegation loop.
    """
    stopping = threading.Event()
    recorder, health, metrics_url = recorder or Recorder(), Health(), None
    with Client(serving.url) as client, ExitStack() as stack:
        if serving.metrics_address is not None:
            host, port = serving.metrics_address
            metrics_url = f"{stack.enter_context(HealthServer(health, recorder, host=host, port=port)).url}/metrics"
        registry = Registry(client, settings.keys)
        delegator = Delegator(client, registry, settings, metrics=recorder)
        progress = health.progress(settings.label, run_within_ms=_ROUND_WITHIN_MS)
        loop = DelegationLoop(serving.url, delegator, registry, settings, progress=progress, metrics=recorder)
        acknowledger = Acknowledger(client, registry, delegator, metrics=recorder)
        checker = HealthChecker(registry, settings, serving.allow_list, on_death=loop.check_leases_now)
        api = make_api(
            MasterContext(
                settings=settings,
                registry=registry,
                delegator=delegator,
                queries=Queries(client, registry, settings),
                ack_batches=CallBatcher(acknowledger.acknowledge, name="millstream-acknowledge"),
                tokens=serving.tokens,
                allow_list=serving.allow_list,
                health_checker=checker,
                health=health,
                recorder=recorder,
                check_leases_now=loop.check_leases_now,
                host_names=serving.host_names,
                max_page=serving.max_page,
            )
        )
        listener = listen(serving.host, serving.port, connections=serving.limits.connections)
        server = Server(api, serving.limits, metrics=recorder, stop_s=_STOP_S)
        serve_with_worker(
            server, listener, lambda: loop.run(stopping), stopping, on_ready=lambda url: on_ready(url, metrics_url)
        )


def serve_with_worker(
    server: Server,
    listener: socket.socket,
    work: Callable[[], None],
    stopping: threading.Event,
    *,
    on_ready: Callable[[str], None],
) -> None:
    """Serve HTTP until SIGTERM or SIGINT, with `work` on a thread; setting `stopping` ends it.

    `on_ready` is called with the URL. Raises the exception that ended `work`.
    """
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised below, once the server has stopped
            failures.append(error)
            server.should_exit = True

    thread = threading.Thread(target=guarded, name="millstream-work")
    thread.start()
    try:
        server.stop_at_signals()
        on_ready(url_of(listener))
        server.run(sockets=[listener])
    finally:
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]
