"""A console in a thread of the test, whose open pages renew their figures often, or as often as it says."""

import asyncio
import threading
from pathlib import Path
from typing import Self

from millstream.observability.metrics import Recorder
from millstream.services.console.app import ConsoleParts, make_console
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.guard import make_guard
from millstream.services.console.live_reads import LiveReads
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rights import ConsoleTokens
from millstream.services.console.secure_headers import SECURE_HEADERS
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.web.connections import Limits
from millstream.services.web.http_server import Server
from millstream.services.web.listen import listen, url_of
from tests.support.waiting import FAIL_SAFE_S

_CONNECTIONS = 100
_HOUR_MS = 3_600_000.0


class ConsoleThread:
    """A console with the tokens of a file, on `port` or any free one. A context manager that stops it at the end."""

    def __init__(self, redis_url: str, token_file: Path, *, port: int = 0, renew_ms: float = 300.0) -> None:
        tokens, self._clients = ConsoleTokens(), ClientPool(redis_url)
        tokens.read(token_file)
        names = StreamNames(redis_url, keep_ms=renew_ms, wait_ms=_HOUR_MS)
        parts = ConsoleParts(
            clients=self._clients,
            guard=make_guard(self._clients, tokens, token_file),
            names=names,
            ranking=StreamRanking(redis_url, names),
            redrives=RedriveThreads(redis_url),
            live=LiveReads(keep_ms=renew_ms),
        )
        limits = Limits(connections=_CONNECTIONS)
        self._server = Server(make_console(parts), limits, metrics=Recorder(), stop_s=1, headers=SECURE_HEADERS)
        self._listener = listen("127.0.0.1", port, connections=_CONNECTIONS)
        self.url = url_of(self._listener)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._listener])))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop, and wait for its end."""
        self._server.should_exit = True
        self._thread.join(FAIL_SAFE_S)
        self._clients.close()
