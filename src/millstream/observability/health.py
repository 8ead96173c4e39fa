"""Health as progress, not as a live process: who reads and runs, and three pages that tell.

A worker that lives but no longer consumes passes every check of its process. So it is healthy only while Redis
answers its reads and the runs of its handlers end.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, ServerError
from millstream.observability.metrics import Recorder

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_MARGIN_MS = 30_000.0
_CALLER_S = 5.0


class Progress:
    """What one handler's loop has got done. Any thread may tell it; see `Health.progress`."""

    def __init__(self, *, read_within_ms: float, run_within_ms: float, clock: Clock) -> None:
        self._read_within_ms = read_within_ms
        self._run_within_ms = run_within_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._ever_read = False
        # Until something has happened, time counts from the start.
        self._read_ms = self._ended_ms = clock.monotonic_ms()

    def read(self) -> None:
        """Redis has answered a read, if only that nothing is there. A paused loop says so too, as it looks again."""
        with self._lock:
            self._ever_read = True
            self._read_ms = self._clock.monotonic_ms()

    def started(self, n: int = 1) -> None:
        """`n` runs of the handler have started. What waits, for its turn or for a retry, does not run."""
        with self._lock:
            if not self._running:
                self._ended_ms = self._clock.monotonic_ms()
            self._running += n

    def ended(self, n: int = 1) -> None:
        """`n` runs have ended, well or badly, and what came of them is committed or given up."""
        with self._lock:
            self._running = max(0, self._running - n)
            self._ended_ms = self._clock.monotonic_ms()

    @contextmanager
    def running(self, n: int = 1) -> Iterator[None]:
        """`started` and `ended` around a block."""
        self.started(n)
        try:
            yield
        finally:
            self.ended(n)

    def failures(self, *, stopping: bool) -> Iterator[str]:
        """Why it is not healthy, in words; nothing if it is. While stopping it need not read any more."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            silent_ms, stuck_ms, running = now_ms - self._read_ms, now_ms - self._ended_ms, self._running
        if silent_ms > self._read_within_ms and not stopping:
            yield f"Redis has not answered a read for {silent_ms / 1000:.1f} s"
        if running and stuck_ms > self._run_within_ms:
            yield f"{running} in hand, and no run has ended for {stuck_ms / 1000:.1f} s"

    @property
    def ever_read(self) -> bool:
        """True once Redis has answered a read."""
        return self._ever_read

    def figures(self) -> dict[str, float]:
        """Where it stands, for people."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            return {
                "running": self._running,
                "seconds_since_read": round((now_ms - self._read_ms) / 1000, 1),
                "seconds_since_run_ended": round((now_ms - self._ended_ms) / 1000, 1),
            }


class Health:
    """The health of a process: that of all its handlers, each for itself, so that no busy one hides a stuck one.

    * `read_within_ms`: a handler whose last answered read is older is not healthy, in milliseconds

    Raises ConfigError for a limit that is not positive.
    """

    def __init__(self, *, read_within_ms: float = 30_000.0, clock: Clock = SYSTEM_CLOCK) -> None:
        if read_within_ms <= 0:
            raise ConfigError(f"Health(read_within_ms={read_within_ms}): give a positive number of milliseconds")
        self._read_within_ms = read_within_ms
        self._clock = clock
        self._handlers: dict[str, Progress] = {}
        self._stopping = False

    def progress(self, handler: str, *, run_within_ms: float) -> Progress:
        """The progress of `handler` (`app.name`), for its loop to report to.

        `run_within_ms` is the handler's time limit, in milliseconds: 30 s more without the end of any run, while
        some are under way, and it is not healthy.
        """
        found = Progress(
            read_within_ms=self._read_within_ms, run_within_ms=run_within_ms + _MARGIN_MS, clock=self._clock
        )
        self._handlers = {**self._handlers, handler: found}
        return found

    def stopping(self) -> None:
        """From now on the process is not ready, and need not read to be healthy."""
        self._stopping = True

    def failures(self) -> list[str]:
        """Why the process is not healthy; empty if it is."""
        return [
            f"{name}: {failure}"
            for name, progress in self._handlers.items()
            for failure in progress.failures(stopping=self._stopping)
        ]

    def unreadiness(self) -> list[str]:
        """Why the process is not ready for work; empty if it is."""
        reasons = self.failures()
        reasons += [f"{name}: no read yet" for name, progress in self._handlers.items() if not progress.ever_read]
        if not self._handlers:
            reasons.append("no handler has started")
        if self._stopping:
            reasons.append("it is stopping")
        return reasons

    def page(self, reasons: list[str]) -> bytes:
        """The answer in JSON: a status, the reasons for it and where each handler stands."""
        figures = {name: progress.figures() for name, progress in self._handlers.items()}
        status = "failing" if reasons else "ok"
        return msgspec.json.encode({"status": status, "reasons": reasons, "handlers": figures})


class HealthServer:
    """Serves `/healthz` and `/readyz`, given a health, and `/metrics`, given a recorder, from a thread, until `close`.

    A context manager.

    * `host`, `port`: where it listens; 0 finds a free port. The pages need no password: think before you leave 127.0.0.1

    Raises ServerError if it cannot listen there.
    """

    def __init__(
        self, health: Health | None, recorder: Recorder | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        pages = _pages(health, recorder)
        try:
            self._server = _listen(host, port, pages)
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"cannot serve health or metrics on {host}:{port} ({error}); choose another port"
            ) from error
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="millstream-health", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "HealthServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Requests under way are dropped."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listen(host: str, port: int, pages: "WSGIApplication") -> "WSGIServer":
    # Imported here, since most processes count their progress and serve no pages.
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    class Server(ThreadingMixIn, WSGIServer):
        """A thread for each request: a caller that dawdles holds up no other."""

        daemon_threads = True
        block_on_close = False

    class Requests(WSGIRequestHandler):
        """Silent, and patient with a caller for only so many seconds."""

        timeout = _CALLER_S

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Say nothing: a probe comes every few seconds."""

    return make_server(host, port, pages, Server, Requests)


def _pages(health: Health | None, recorder: Recorder | None) -> "WSGIApplication":
    metrics = None if recorder is None else _metrics_page(recorder)

    def serve(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            return _answer(start_response, "405 Method Not Allowed", b'{"error":"only GET"}')
        if path == "/metrics" and metrics is not None:
            return metrics(environ, start_response)
        if path not in ("/healthz", "/readyz") or health is None:
            return _answer(start_response, "404 Not Found", b'{"error":"try /healthz, /readyz or /metrics"}')
        reasons = health.failures() if path == "/healthz" else health.unreadiness()
        return _answer(start_response, "503 Service Unavailable" if reasons else "200 OK", health.page(reasons))

    return serve


def _metrics_page(recorder: Recorder) -> "WSGIApplication":
    from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

    registry = CollectorRegistry()
    registry.register(recorder)
    ProcessCollector(registry=registry)
    return make_wsgi_app(registry)


def _answer(start_response: "StartResponse", status: str, body: bytes) -> list[bytes]:
    start_response(
        status,
        [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
        ],
    )
    return [body]
