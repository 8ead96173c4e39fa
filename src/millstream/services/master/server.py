"""One master process: its rounds in a thread, its API in front, until it is told to stop."""

import signal
import socket
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from millstream.observability.health import Health
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.services.master.acknowledgements import Acknowledger
from millstream.services.master.api import Parts, make_api
from millstream.services.master.call_batching import Batches
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
class Serving:
    """Where a master listens, and what it lets in.

    * `names`: under which hosts it goes; None: any
    * `limits`: what its clients may take up
    * `most_page`: items of a page at most
    """

    url: str = field(repr=False)
    tokens: Tokens
    allowed: AllowList
    host: str = "127.0.0.1"
    port: int = 0
    names: Container[str] | None = None
    limits: Limits = field(default_factory=lambda: Limits(connections=2_000))
    most_page: int = 1_000


def run_master(settings: MasterSettings, serving: Serving, *, on_ready: Callable[[str], None]) -> None:
    """Be a master until SIGTERM or SIGINT; `on_ready` is told where it listens.

    Leases stay as they are: another master goes on, or this one when it is back. Raises ServerError, and what ended
    its rounds.
    """
    stopping = threading.Event()
    recorder, health = Recorder(), Health()
    with Client(serving.url) as client:
        registry = Registry(client, settings.keys)
        desk = Delegator(client, registry, settings, metrics=recorder)
        progress = health.progress(settings.label, run_within_ms=_ROUND_WITHIN_MS)
        rounds = DelegationLoop(serving.url, desk, registry, settings, progress=progress, metrics=recorder)
        acknowledger = Acknowledger(client, registry, desk, metrics=recorder)
        pinger = HealthChecker(registry, settings, serving.allowed, on_death=rounds.hurry)
        api = make_api(
            Parts(
                settings=settings, registry=registry, desk=desk, views=Queries(client, registry, settings),
                acknowledgements=Batches(acknowledger.acknowledge, name="millstream-acknowledge"),
                tokens=serving.tokens, allowed=serving.allowed, pinger=pinger, health=health, recorder=recorder,
                hurry=rounds.hurry, names=serving.names, most_page=serving.most_page,
            )
        )  # fmt: skip
        listener = listen(serving.host, serving.port, connections=serving.limits.connections)
        server = Server(api, serving.limits, metrics=recorder, stop_s=_STOP_S)
        serve_beside(server, listener, lambda: rounds.run(stopping), stopping, on_ready=on_ready)


def serve_beside(
    server: Server, listener: socket.socket, work: Callable[[], None], stopping: threading.Event, *,
    on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve while `work`, which ends once it is `stopping`, goes on in a thread; until SIGTERM or SIGINT.

    `on_ready` is told where it listens. Raises what ended the work.
    """
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)
            server.should_exit = True

    thread = threading.Thread(target=guarded, name="millstream-work")
    thread.start()
    try:
        on_ready(url_of(listener))
        # The server passes the signal that ended it on, once it has served its last request.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        server.run(sockets=[listener])
    finally:
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]
