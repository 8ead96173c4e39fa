"""LeaseMetrics: the metrics of redis-stream-client-go's recorder, by service and never by stream."""

from typing import TYPE_CHECKING, get_args

from millstream.balancer.notifications import DisownCause, Notice
from millstream.errors import AlreadyOwned, LeaseLost, StreamNotFound, Unavailable
from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics, init_series

if TYPE_CHECKING:
    from millstream.balancer.protocol import HeartbeatReply

_OF_SERVICES = (
    m.LEASES_ASSIGNED,
    m.LEASE_EXPIRATIONS,
    m.LEASE_HELD_SECONDS,
    m.LEASE_HEARTBEAT_SECONDS,
    m.LEASE_RECOVERY_SECONDS,
    m.LEASE_CLAIM_SECONDS,
)
_CLAIM_ERRORS = (StreamNotFound, AlreadyOwned, LeaseLost, Unavailable)


class LeaseMetrics:
    """Reports the metrics of one consumer of `service`."""

    def __init__(self, metrics: Metrics, service: str) -> None:
        self._metrics = metrics
        self._service = service
        init_series(metrics, *_OF_SERVICES, service=service)
        for how in (*get_args(DisownCause), "released", "done", "refused", "closed"):
            init_series(metrics, m.LEASES_ENDED, service=service, how=how)
        for outcome in ("ok", *(one.__name__ for one in _CLAIM_ERRORS)):
            init_series(metrics, m.LEASE_CLAIMS, service=service, outcome=outcome)
        for notice in get_args(Notice):
            init_series(metrics, m.LEASE_NOTIFICATIONS, service=service, notice=notice.__name__)

    def heartbeat(self, reply: "HeartbeatReply", took_ms: float) -> None:
        """Report one heartbeat, and its reply."""
        metrics, service = self._metrics, self._service
        metrics.observe(m.LEASE_HEARTBEAT_SECONDS, took_ms / 1000, service=service)
        for state, count in (("total", reply.total), ("share", reply.share), ("held", reply.held)):
            metrics.set(m.LEASE_STREAMS, count, service=service, state=state)
        if reply.added:
            metrics.count(m.LEASES_ASSIGNED, len(reply.added), service=service)
        if reply.owner_losses:
            metrics.count(m.LEASE_EXPIRATIONS, reply.owner_losses, service=service)
        if reply.recovery_ms is not None:
            metrics.observe(m.LEASE_RECOVERY_SECONDS, reply.recovery_ms / 1000, service=service)

    def claimed(self, outcome: str, took_ms: float) -> None:
        """Report one claim by the program; `outcome`: "ok", or the name of the error."""
        self._metrics.count(m.LEASE_CLAIMS, service=self._service, outcome=outcome)
        self._metrics.observe(m.LEASE_CLAIM_SECONDS, took_ms / 1000, service=self._service)

    def ended(self, how: str, lasted_ms: float) -> None:
        """Report one ended lease of this consumer, and how long it lasted."""
        self._metrics.count(m.LEASES_ENDED, service=self._service, how=how)
        self._metrics.observe(m.LEASE_HELD_SECONDS, lasted_ms / 1000, service=self._service)

    def notified(self, notice: str) -> None:
        """Report one notification."""
        self._metrics.count(m.LEASE_NOTIFICATIONS, service=self._service, notice=notice)
