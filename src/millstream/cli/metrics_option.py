"""The option --metrics-address of long-running commands: metrics, health and the numbers for autoscalers."""

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from millstream import __version__
from millstream.admin.redis_metrics import Places, RedisMetrics
from millstream.cli.options import parse_address
from millstream.cli.terminal import print_json, print_message
from millstream.observability import metrics as m
from millstream.observability.health import Progress
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import Collector, HealthServer, HealthSource
from millstream.redis_client.client import Client

_TIMEOUT_MS = 15_000
_STOP_S = 5.0


def new_recorder(engine: str) -> Recorder:
    """A recorder that says which millstream this is, and what runs."""
    metrics = Recorder()
    metrics.set(m.BUILD_INFO, 1, version=__version__, python=platform.python_version(), engine=engine)
    return metrics


def print_started(text: str, metrics_url: str | None, *, as_json: bool, **fields: str | int) -> None:
    """Print that a command has started, and where its metrics are served: `text`, or `fields` as JSON."""
    if as_json:
        print_json({"event": "started", **fields, **({"metrics": metrics_url} if metrics_url else {})}, flush=True)
        return
    if metrics_url:
        print_message(f"metrics: {metrics_url}")
    print_message(text)


@contextmanager
def serve_metrics(
    address: str,
    url: str,
    discover: Callable[[Client], Places],
    recorder: Recorder,
    *,
    health: HealthSource,
    progress: Progress | None = None,
    more: Sequence[Collector] = (),
) -> Iterator[str | None]:
    """Serve the metrics at `address` within the block, with those that are read from Redis; yields the URL of /metrics.

    Does nothing, and yields None, if `address` is "". Raises ConfigError and ServerError for an address that cannot be
    used.

    * `discover`: finds the handlers whose figures are read from Redis at `url`
    * `progress`: notified of each answer of Redis, where that is what health means
    * `more`: collectors to serve beside `recorder`
    """
    if (place := parse_address(address)) is None:
        yield None
        return
    stopping = threading.Event()
    with Client(url, timeout_ms=_TIMEOUT_MS) as client:
        figures = RedisMetrics(client, discover, recorder, progress=progress)
        pages = {"/scale": figures.scale_page}
        with HealthServer(health, [recorder, *more], host=place[0], port=place[1], pages=pages) as server:
            thread = threading.Thread(target=figures.run, args=(stopping,), name="millstream-figures", daemon=True)
            thread.start()
            try:
                yield f"{server.url}/metrics"
            finally:
                stopping.set()
                thread.join(_STOP_S)
