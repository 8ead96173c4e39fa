"""The console as a process: the HTTP service until a signal stops it."""

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path

from millstream.admin.value_redaction import Redact, show_all
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.services.console.app import ConsoleParts, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.guard import make_guard
from millstream.services.console.history_writer import HistoryWriter
from millstream.services.console.redrive_threads import STOP_S, RedriveThreads
from millstream.services.console.rights import ConsoleTokens
from millstream.services.console.secure_headers import SECURE_HEADERS
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server
from millstream.services.web.listen import listen, url_of


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """Options of a console.

    * `tokens`: which token has which level; an empty store lets every client read, and change nothing
    * `token_file`: reloaded when it changes
    * `host_names`: accepted names in the header Host; None: any
    * `redact`: hides what messages contain
    """

    url: str = field(repr=False)
    tokens: ConsoleTokens
    token_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    host_names: Container[str] | None = None
    redact: Redact = show_all
    limits: Limits


def run_console(serving: ConsoleOptions, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` gets the URL.

    Raises ConfigError where the limit of open files is too low, ServerError, and Unavailable if Redis does not answer
    at the start.
    """
    with Client(serving.url) as client:
        client.execute("PING")
    clients = ClientPool(serving.url)
    guard = make_guard(clients, serving.tokens, serving.token_file)
    names = StreamNames(serving.url)
    parts = ConsoleParts(
        clients=clients,
        guard=guard,
        names=names,
        ranking=StreamRanking(serving.url, names),
        redrives=RedriveThreads(serving.url),
        redact=serving.redact,
        host_names=serving.host_names,
    )
    history = HistoryWriter(serving.url)

    async def begin_stop() -> None:
        """Both have the same five seconds."""
        await parts.redrives.begin_stop()
        history.begin_stop()

    with listen(serving.host, serving.port, connections=serving.limits.connections) as listener:
        server = Server(
            make_console(parts),
            serving.limits,
            metrics=Recorder(),
            stop_s=STOP_S,
            on_shutdown=begin_stop,
            headers=SECURE_HEADERS,
        )
        server.stop_at_signals()
        on_ready(url_of(listener))
        with history:
            asyncio.run(server.serve([listener]))
