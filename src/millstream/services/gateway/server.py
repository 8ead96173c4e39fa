"""The server process: a router, the service in front of it, until it is told to stop."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from millstream.errors import ConfigError, MillstreamError
from millstream.observability.health import Health, HealthServer, Progress
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.router import ReadPolicy, Router
from millstream.services.gateway.auth import Access
from millstream.services.gateway.connection import Pace
from millstream.services.gateway.connections import ConnectionLimits, ConnectionManager
from millstream.services.gateway.gc_freeze import GcFreeze
from millstream.services.gateway.routes import Parts, make_service
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server, WebSockets
from millstream.services.web.listen import address, listen
from millstream.services.web.socket_server import SocketProtocol

logger = logging.getLogger(__name__)

_FRAME_BYTES = 4_096
_PULSE_S = 5.0
_LOOK_S = 1.0
_BESIDE = 100
_LAST_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where to listen, and whom to let in.

    * `access`: who may follow what; `token_file`: read again when it changes
    * `origins`: whose pages may use it, beside its own
    * `names`: under which hosts it goes; None: any
    * `pages`: a folder that is served too
    * `request_s`: seconds in which a request has to arrive
    * `health_port`: for `/healthz`, `/readyz` and `/metrics`, on 127.0.0.1; None: nowhere
    * `stop_s`: how long a stop may take, in seconds
    """

    url: str = field(repr=False)
    access: Access
    token_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    origins: Sequence[str] = ()
    names: Container[str] | None = None
    pages: Path | None = None
    request_s: float = 10.0
    health_port: int | None = None
    pace: Pace = field(default_factory=Pace)
    room: ConnectionLimits = field(default_factory=ConnectionLimits)
    stop_s: float = 5.0


def run_serving(serving: Serving, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` is told where it listens.

    Raises ConfigError where too few files may be open, ServerError, and Unavailable if Redis is away at the start.
    """
    # Beside those who follow streams there are requests for tickets, pages and health.
    limits = Limits(connections=serving.room.connections + _BESIDE, request_s=serving.request_s)
    recorder, health = Recorder(), Health()
    with ExitStack() as stack:
        client = stack.enter_context(Client(serving.url))
        client.execute("PING")
        if serving.health_port is not None:
            stack.enter_context(HealthServer(health, recorder, port=serving.health_port))
        listener = listen(serving.host, serving.port, connections=limits.connections, stall_s=serving.pace.stall_s)
        stack.callback(listener.close)
        # The server passes the signal that ended it on, once it has served its last request.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asyncio.run(_serve(serving, limits, client, listener, (recorder, health), on_ready))


async def _serve(
    serving: Serving,
    limits: Limits,
    client: Client,
    listener: socket.socket,
    reports: tuple[Recorder, Health],
    on_ready: Callable[[str], None],
) -> None:
    recorder, health = reports
    progress = health.progress("serve", run_within_ms=0)
    read = ReadPolicy(budget_bytes=serving.pace.budget_bytes)
    async with Router(serving.url, read=read, metrics=recorder) as router:
        house = ConnectionManager(router, room=serving.room, pace=serving.pace, metrics=recorder)
        service = make_service(
            Parts(
                house=house, access=serving.access, health=health, metrics=recorder, origins=serving.origins,
                names=serving.names, pages=serving.pages,
            )
        )  # fmt: skip
        beside = [
            asyncio.create_task(_pulse(client, progress)),
            asyncio.create_task(GcFreeze(lambda: house.traffic).run()),
        ]
        if serving.token_file is not None:
            beside.append(asyncio.create_task(_follow_file(serving.access, serving.token_file)))
        pace = serving.pace
        sockets = WebSockets(
            protocol=SocketProtocol, frame_bytes=_FRAME_BYTES, ping_s=pace.heartbeat_s, pong_s=pace.stall_s
        )
        server = Server(
            service, limits, metrics=recorder, stop_s=_LAST_S, sockets=sockets,
            ending=lambda: house.close(serving.stop_s),
        )  # fmt: skip
        on_ready(address(listener))
        await server.serve([listener])
        health.stopping()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def _pulse(client: Client, progress: Progress) -> None:
    """Whether Redis answers, also while no stream is followed."""
    while True:
        try:
            await asyncio.to_thread(client.execute, "PING")
            progress.read()
        except MillstreamError:
            pass  # what health says of it is that nothing was heard
        await asyncio.sleep(_PULSE_S)


async def _follow_file(access: Access, path: Path) -> None:
    """Let the tokens be those that the file holds. Nobody's mistake in it shuts out all, or lets all in."""
    known: tuple[int, ...] | None = ()  # not what is there now: it may be newer than what was read at the start
    while True:
        await asyncio.sleep(_LOOK_S)
        if (found := _version(path)) != known:
            known = found
            try:
                access.renew(path)
            except ConfigError as error:
                logger.warning("the tokens stay as they were: %s", error)
            else:
                logger.info("the token file has been read again")


def _version(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written, or another takes its place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
