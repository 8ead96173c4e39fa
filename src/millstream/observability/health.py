"""Health: liveness and readiness by progress, and the HTTP server of `/healthz`, `/readyz` and `/metrics`.

A worker that runs but no longer consumes passes every check of its process. So it is healthy only while Redis
answers its reads and the runs of its handlers end.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import Metric as Family

_MARGIN_MS = 30_000.0
_CLIENT_TIMEOUT_S = 5.0


class Progress:
    """The progress of one handler's loop. Any thread may report; see `Health.progress`."""

    def __init__(self, *, read_within_ms: float, run_within_ms: float, clock: Clock) -> None:
        self._read_within_ms = read_within_ms
        self._run_within_ms = run_within_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._ever_read = False
        # Before the first event, time counts from the start.
        self._read_ms = self._ended_ms = clock.monotonic_ms()
        self._error_ms, self._error = 0.0, ""

    def on_read(self) -> None:
        """Redis has answered a read, even if with no entries. A paused loop reports its status queries here."""
        with self._lock:
            self._ever_read = True
            self._read_ms = self._clock.monotonic_ms()

    def on_run_started(self, n: int = 1) -> None:
        """`n` runs of the handler have started. Messages that wait for their key or for a retry do not count."""
        with self._lock:
            if not self._running:
                self._ended_ms = self._clock.monotonic_ms()
            self._running += n

    def on_run_ended(self, n: int = 1) -> None:
        """`n` runs have ended, successfully or not, and their results are committed or given up."""
        with self._lock:
            self._running = max(0, self._running - n)
            self._ended_ms = self._clock.monotonic_ms()

    def on_redis_error(self, error: Exception) -> None:
        """Redis cannot answer a read, or store the results of runs, for now."""
        with self._lock:
            self._error_ms, self._error = self._clock.monotonic_ms(), str(error)

    @contextmanager
    def running(self, n: int = 1) -> Iterator[None]:
        """`on_run_started` and `on_run_ended` around a block."""
        self.on_run_started(n)
        try:
            yield
        finally:
            self.on_run_ended(n)

    def failures(self, *, stopping: bool) -> Iterator[str]:
        """The reasons why it is not healthy; empty if it is. While stopping, reads are not required."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            silent_ms, stuck_ms, running = now_ms - self._read_ms, now_ms - self._ended_ms, self._running
            cause = f"; the last error of Redis: {self._error}" if self._error else ""
            cause_ms = now_ms - self._error_ms
        if silent_ms > self._read_within_ms and not stopping:
            yield f"Redis has not answered a read for {silent_ms / 1000:.1f} s{cause if cause_ms <= silent_ms else ''}"
        if running and stuck_ms > self._run_within_ms:
            yield (
                f"no run has ended for {stuck_ms / 1000:.1f} s, with {running} in progress"
                f"{cause if cause_ms <= stuck_ms else ''}"
            )

    @property
    def ever_read(self) -> bool:
        """True once Redis has answered a read."""
        return self._ever_read

    def figures(self) -> dict[str, float]:
        """The figures of the health page: running messages, and seconds since the last read and end of a run."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            return {
                "running": self._running,
                "seconds_since_read": round((now_ms - self._read_ms) / 1000, 1),
                "seconds_since_run_ended": round((now_ms - self._ended_ms) / 1000, 1),
            }


class Health:
    """The health of a process: each of its handlers is checked separately, so no busy handler hides a stuck one.

    * `read_within_ms`: maximum age of a healthy handler's last answered read, in milliseconds

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
        """The progress of `handler` (`app.name`), to which its loop reports.

        `run_within_ms` is the handler's time limit, in milliseconds. While messages are running, the handler is not
        healthy if no run has ended for 30 s longer than that.
        """
        found = Progress(
            read_within_ms=self._read_within_ms, run_within_ms=run_within_ms + _MARGIN_MS, clock=self._clock
        )
        self._handlers = {**self._handlers, handler: found}
        return found

    def on_stopping(self) -> None:
        """Mark the process as stopping: it is not ready, and needs no reads to be healthy."""
        self._stopping = True

    def failures(self) -> list[str]:
        """The reasons why the process is not healthy; empty if it is."""
        return [
            f"{name}: {failure}"
            for name, progress in self._handlers.items()
            for failure in progress.failures(stopping=self._stopping)
        ]

    def readiness_failures(self) -> list[str]:
        """The reasons why the process is not ready; empty if it is."""
        reasons = self.failures()
        reasons += [f"{name}: no read yet" for name, progress in self._handlers.items() if not progress.ever_read]
        if not self._handlers:
            reasons.append("no handler has started")
        if self._stopping:
            reasons.append("it is stopping")
        return reasons

    def page(self, reasons: list[str]) -> bytes:
        """The health page in JSON: the status, its reasons and the figures of each handler."""
        figures = {name: progress.figures() for name, progress in self._handlers.items()}
        status = "failing" if reasons else "ok"
        return msgspec.json.encode({"status": status, "reasons": reasons, "handlers": figures})


class HealthSource(Protocol):
    """The source of `/healthz` and `/readyz`: `Health`, or the health of several processes."""

    def failures(self) -> list[str]:
        """The reasons why it is not healthy; empty if it is."""

    def readiness_failures(self) -> list[str]:
        """The reasons why it is not ready; empty if it is."""

    def page(self, reasons: list[str]) -> bytes:
        """The page in JSON."""


class Collector(Protocol):
    """The source of `/metrics`: a `Recorder`, or any other collector of prometheus_client."""

    def collect(self) -> "Iterable[Family]":
        """The metric families."""


Page = Callable[[Mapping[str, str]], tuple[int, bytes]]
"""A page by its query parameters: the status and the body, which is JSON."""

_STATUS_TEXTS = {200: "200 OK", 400: "400 Bad Request", 404: "404 Not Found", 503: "503 Service Unavailable"}


class HealthServer:
    """Serves `/healthz` and `/readyz` for a health, and `/metrics` for collectors, on a thread, until `close`.

    A context manager.

    * `recorder`: the metrics, or several collectors: families of the same name are merged. Those of this process (CPU,
      memory, open files) are added
    * `host`, `port`: where it listens; port 0 finds a free port. The pages need no password, so be careful with
      addresses other than 127.0.0.1
    * `pages`: further pages by path

    Raises ServerError if it cannot listen there.
    """

    def __init__(
        self,
        health: HealthSource | None,
        recorder: Collector | Sequence[Collector] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        collectors = recorder if isinstance(recorder, Sequence) else () if recorder is None else (recorder,)
        app = _pages(health, collectors, pages or {})
        try:
            self._server = _listen(host, port, app)
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"cannot serve health or metrics on {host}:{port} ({error}); choose another port"
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="millstream-health", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "HealthServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening. Requests in progress are dropped."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listen(host: str, port: int, pages: "WSGIApplication") -> "WSGIServer":
    # Imported here: most processes track their progress but serve no pages.
    from socketserver import TCPServer, ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    class Server(ThreadingMixIn, WSGIServer):
        """One thread per request: a slow client delays no other."""

        daemon_threads = True
        block_on_close = False
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            """Bind without asking DNS for the name of the host, which may take seconds."""
            TCPServer.server_bind(self)
            self.server_name, self.server_port = host, self.server_address[1]
            self.setup_environ()

    class Requests(WSGIRequestHandler):
        """Logs nothing, and times out slow clients."""

        timeout = _CLIENT_TIMEOUT_S

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Do not log: a probe comes every few seconds."""

    return make_server(host, port, pages, Server, Requests)


def _pages(health: HealthSource | None, collectors: Sequence[Collector], more: Mapping[str, Page]) -> "WSGIApplication":
    metrics = _metrics_page(collectors) if collectors else None
    checks = {} if health is None else {"/healthz": health.failures, "/readyz": health.readiness_failures}
    known = [*checks, *(("/metrics",) if metrics else ()), *more]
    unknown = msgspec.json.encode({"error": f"try {' or '.join(known)}"})

    def serve(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            return _answer(start_response, "405 Method Not Allowed", b'{"error":"only GET"}')
        if path == "/metrics" and metrics is not None:
            return metrics(environ, start_response)
        if path in more:
            query = parse_qs(environ.get("QUERY_STRING", ""))
            status, body = more[path]({name: values[-1] for name, values in query.items()})
            return _answer(start_response, _STATUS_TEXTS[status], body)
        if health is None or path not in checks:
            return _answer(start_response, _STATUS_TEXTS[404], unknown)
        reasons = checks[path]()
        return _answer(start_response, _STATUS_TEXTS[503 if reasons else 200], health.page(reasons))

    return serve


class _Merged:
    """Several collectors as one that yields each family once."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> "Iterator[Family]":
        found: dict[str, Family] = {}
        for collector in self._collectors:
            for family in collector.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        return iter(found.values())


def _metrics_page(collectors: Sequence[Collector]) -> "WSGIApplication":
    from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

    registry = CollectorRegistry()
    registry.register(_Merged([*collectors, ProcessCollector(registry=None)]))
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
