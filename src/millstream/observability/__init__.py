"""Metrics, traces, health endpoints and dead-letter alerts."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.observability.dead_letter_alerts import DeadLetterAlerts
    from millstream.observability.health import Health, HealthServer
    from millstream.observability.metrics import Metrics, Recorder
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.observability.dead_letter_alerts": ("DeadLetterAlerts",),
            "millstream.observability.health": (
                "Health",
                "HealthServer",
            ),
            "millstream.observability.metrics": (
                "Metrics",
                "Recorder",
            ),
        },
    )

__all__ = ["DeadLetterAlerts", "Health", "HealthServer", "Metrics", "Recorder"]
