"""HealthServer: the HTTP server of `/metrics`, `/healthz` and `/readyz`."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs

import msgspec

from millstream.errors import ServerError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import Metric as Family

_CLIENT_TIMEOUT_S = 5.0


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
