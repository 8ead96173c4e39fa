"""`millstream drain`: lets one worker process finish its running messages and end for good."""

import time
from typing import Annotated

import typer

from millstream.admin.worker_drains import find_worker, request_drain
from millstream.cli.options import DryRun, Json, Url, Yes
from millstream.cli.recorded_action import recorded
from millstream.cli.terminal import confirm, print_json, print_line
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age

WorkerName = Annotated[str, typer.Argument(help="The worker, such as till-0.", metavar="WORKER")]
OfApp = Annotated[str | None, typer.Option("--app", help="Its app, if workers of several apps have its name.")]


def drain(
    worker: WorkerName,
    app: OfApp = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Let a worker finish its running messages and end. Its supervisor does not restart it."""
    with Client(url) as client:
        found = find_worker(client, worker, app)
        since_ms = found.drained_since_ms
        if not dry_run and since_ms is None:
            confirm(
                f"Drain {worker} of {found.app}? Its process ends, and a new start of millstream worker replaces it.",
                yes=yes,
            )
            with recorded(client, "drain", app=found.app, worker=found.name) as action:
                found = request_drain(client, found)
                action.result = "requested"
    if as_json:
        print_json(
            {
                "app": found.app,
                "worker": found.name,
                "at_ms": found.drained_since_ms,
                "repeated": since_ms is not None,
                "dry_run": dry_run,
            }
        )
    elif since_ms is not None:
        age = format_age(max(0.0, time.time() * 1000 - since_ms))
        print_line(f"the drain of {worker} of {found.app} was requested {age} ago, and it has not ended yet")
    elif dry_run:
        print_line(f"{worker} of {found.app} would be drained")
    else:
        print_line(f"{worker} of {found.app} is drained: it takes nothing new within some seconds, and then ends")
