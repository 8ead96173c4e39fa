"""`millstream exporter`: serves what Redis shows of all handlers to Prometheus and to autoscalers."""

from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from millstream.admin.redis_metrics import all_places
from millstream.cli.metrics_option import new_recorder, print_started, serve_metrics
from millstream.cli.options import Json, Url
from millstream.cli.signals import orderly_stop
from millstream.cli.terminal import print_json
from millstream.errors import ConfigError, Unavailable
from millstream.observability.health import Health
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import server_time_ms

Address = Annotated[
    str,
    typer.Option("--metrics-address", metavar="[HOST:]PORT", help="Serve /metrics, /healthz, /readyz and /scale here."),
]

_NAME = "exporter"
_READ_WITHIN_MS = 120_000.0


def exporter(url: Url = DEFAULT_URL, metrics_address: Address = "9464", as_json: Json = False) -> None:
    """Serve the figures of all handlers that are read from Redis, where no worker runs. Only reads; run one of it."""
    if not metrics_address:
        raise ConfigError("give --metrics-address a port, such as 9464: an exporter does nothing else")
    recorder, health = new_recorder(_NAME), Health(read_within_ms=_READ_WITHIN_MS)
    progress = health.progress(_NAME, run_within_ms=_READ_WITHIN_MS)
    with (
        orderly_stop() as stopping,
        Client(url) as client,
        serve_metrics(metrics_address, url, all_places, recorder, health=health, progress=progress) as where,
    ):
        print_started("it serves the figures of all handlers; Ctrl-C stops", where, as_json=as_json)
        with suppress(Unavailable):  # it is to stop before Redis has answered
            client.retry_while_unavailable(partial(server_time_ms, client), what=_NAME, give_up=stopping.is_set)
        stopping.wait()
    if as_json:
        print_json({"event": "stopped"}, flush=True)
