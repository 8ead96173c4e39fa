"""The server process: a router, the service in front of it, until it is told to stop."""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from millstream.client import Client
from millstream.errors import ConfigError, MillstreamError
from millstream.fanout.access import Access
from millstream.fanout.connection import Pace
from millstream.fanout.house import House, Room
from millstream.fanout.pauses import Pauses
from millstream.fanout.service import Parts, make_service
from millstream.health import Health, HealthServer, Progress
from millstream.metrics import Recorder
from millstream.router import Router
from millstream.web.listening import address, listen

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

_SENT_BYTES = 65_536
_HEAD_BYTES = 16_384
_HEAD_S = 10.0
_FRAME_BYTES = 4_096
_PULSE_S = 5.0
_LOOK_S = 1.0
_MOST_WAITING, _AT_ONCE = 2_048, 32
_FILES_BESIDE = 200


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Where to listen, and whom to let in.

    * `access`: who may follow what; `token_file`: read again when it changes
    * `origins`: whose pages may use it, beside its own
    * `names`: under which hosts it goes; None: any
    * `pages`: a folder that is served too
    * `health_port`: for `/healthz`, `/readyz` and `/metrics`, on 127.0.0.1; None: nowhere
    * `stop_s`: how long a stop may take, in seconds
    """

    url: str = field(repr=False)
    access: Access
    token_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    origins: Sequence[str] = ()
    names: Sequence[str] | None = None
    pages: Path | None = None
    health_port: int | None = None
    pace: Pace = field(default_factory=Pace)
    room: Room = field(default_factory=Room)
    stop_s: float = 5.0


def run_serving(serving: Serving, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` is told where it listens.

    Raises ConfigError where too few files may be open, ServerError, and Unavailable if Redis is away at the start.
    """
    _check_files(serving.room.connections)
    recorder, health = Recorder(), Health()
    with ExitStack() as stack:
        client = stack.enter_context(Client(serving.url))
        client.execute("PING")
        if serving.health_port is not None:
            stack.enter_context(HealthServer(health, recorder, port=serving.health_port))
        listener = listen(serving.host, serving.port)
        stack.callback(listener.close)
        _bound(listener, serving.pace)
        # The server passes the signal that ended it on, once it has served its last request.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asyncio.run(_serve(serving, client, listener, (recorder, health), on_ready))


async def _serve(
    serving: Serving,
    client: Client,
    listener: socket.socket,
    reports: tuple[Recorder, Health],
    on_ready: Callable[[str], None],
) -> None:
    recorder, health = reports
    progress = health.progress("serve", run_within_ms=0)
    async with Router(serving.url, metrics=recorder) as router:
        house = House(router, room=serving.room, pace=serving.pace, metrics=recorder)
        service = make_service(
            Parts(
                house=house, access=serving.access, health=health, metrics=recorder, origins=serving.origins,
                names=serving.names, pages=serving.pages,
            )
        )  # fmt: skip
        beside = [
            asyncio.create_task(_pulse(client, progress)),
            asyncio.create_task(Pauses(lambda: house.traffic).run()),
        ]
        if serving.token_file is not None:
            beside.append(asyncio.create_task(_follow_file(serving.access, serving.token_file)))
        server = _Server(_config(service, serving), house, serving.stop_s)
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


class _Channel(H11Protocol):
    """A connection that says how it can be cut, and that has to say soon what it wants."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.app_state = {**self.app_state, "abort": self.transport.abort}
        self.loop.call_later(_HEAD_S, self._late)

    def _late(self) -> None:
        if self.scope is None and not self.transport.is_closing():
            self.transport.abort()


class _Server(uvicorn.Server):
    """Ends what never ends by itself before it waits for the rest."""

    def __init__(self, config: uvicorn.Config, house: House, stop_s: float) -> None:
        super().__init__(config)
        self._house = house
        self._stop_s = stop_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Many may wait to be let in, but are let in a few at a time, so that they hold up nobody."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_MOST_WAITING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody in, end every stream, then go on as usual."""
        for server in self.servers:
            server.close()
        await self._house.close(self._stop_s)
        await super().shutdown(sockets)


def _config(service: "ASGIApp", serving: Serving) -> uvicorn.Config:
    return uvicorn.Config(
        service, http=_Channel, ws=WebSocketsSansIOProtocol, log_config=None, access_log=False, server_header=False,
        proxy_headers=False, lifespan="off", backlog=_AT_ONCE, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=_HEAD_BYTES,
        limit_concurrency=serving.room.connections + _FILES_BESIDE // 2,
        ws_max_size=_FRAME_BYTES, ws_per_message_deflate=False,
        ws_ping_interval=serving.pace.heartbeat_s, ws_ping_timeout=serving.pace.stall_s,
    )  # fmt: skip


def _bound(listener: socket.socket, pace: Pace) -> None:
    """What connections inherit: not much is sent ahead, and who has vanished is noticed (tcp(7), socket(7))."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(pace.stall_s * 1000))


def _check_files(connections: int) -> None:
    """Allow as many open files as connections need. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _FILES_BESIDE
    if soft < needed and hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(f"{connections:,} connections need more open files than the {hard:,} allowed: --connections")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
