"""Metrics, traces, health endpoints and dead-letter alerts."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.observability.dead_letter_alerts import DeadLetterAlerts
    from millstream.observability.health import Health
    from millstream.observability.metrics import Metrics, Recorder
    from millstream.observability.metrics_and_health_server import HealthServer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.observability.dead_letter_alerts": ("DeadLetterAlerts",),
            "millstream.observability.health": ("Health",),
            "millstream.observability.metrics": (
                "Metrics",
                "Recorder",
            ),
            "millstream.observability.metrics_and_health_server": ("HealthServer",),
        },
    )

__all__ = ["DeadLetterAlerts", "Health", "HealthServer", "Metrics", "Recorder"]
