"""Options of dead-letter alerts, and the alerts of `millstream worker` from the figures of its processes."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from millstream.observability.dead_letter_alerts import DeadLetterAlerts

AlertUrl = Annotated[str, typer.Option(help="POST a JSON summary to this URL when messages are dead-lettered.")]
AlertCommand = Annotated[str, typer.Option(help="Run this command, with the summary on its stdin.")]


class FigureAlerts:
    """Sends an alert when the figures of a worker process of `app` show more dead letters than its last ones did."""

    def __init__(self, app: str, alerts: DeadLetterAlerts) -> None:
        self._app = app
        self._alerts = alerts
        self._pids: dict[str, int] = {}
        self._dead: dict[tuple[str, str], int] = {}

    def add(self, worker: str, pid: int, handlers: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the figures of one process. Each worker reports in a thread of its own."""
        if self._pids.get(worker) != pid:  # the process was restarted, and counts from 0
            self._pids[worker] = pid
            self._dead.update(dict.fromkeys(((worker, handler) for handler in handlers), 0))
        for handler, figures in handlers.items():
            more = figures["dead"] - self._dead[worker, handler]
            if more > 0:
                self._dead[worker, handler] = figures["dead"]
                self._alerts.send({"app": self._app, "handler": handler, "dead": more})
