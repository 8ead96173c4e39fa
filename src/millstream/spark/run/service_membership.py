"""ServiceMembership: a run on Spark as a consumer of the service that its streams are announced to.

The run reads every announced stream, regardless of its lease: the handler's workers stop when the run begins. It joins
so that announcements are read, and so that operators see the owner of each stream.
"""

import logging
import os
import threading
from collections.abc import Callable

from millstream.balancer import Balancer, BalancerPolicy, StreamDisowned, Terminated
from millstream.balancer.protocol import claim_service
from millstream.errors import MillstreamError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import host_name

logger = logging.getLogger(__name__)

_LEASE_MS = 10_000
_HOST_CHARS = 40


class ServiceMembership:
    """The membership of a run of `handler` in its service, from `join` to `close`.

    `on_ended` is called, in another thread, with the error that ended it early: announcements are no longer read.
    """

    def __init__(self, client: Client, handler: Handler, *, on_ended: Callable[[Exception], None]) -> None:
        assert handler.announced is not None
        self._client = client
        self._handler = handler
        self._on_ended = on_ended
        self._service = handler.announced
        self._balancer = Balancer(
            client.url,
            self._service,
            consumer=f"spark-{host_name(_HOST_CHARS)}-{os.getpid()}",
            policy=BalancerPolicy(lease_ms=_LEASE_MS),
        )

    def join(self) -> None:
        """Join the service. Raises ConfigError if it belongs to another handler, RedisError."""
        claim_service(self._client, self._service, self._handler.label)
        self._balancer.start()
        threading.Thread(target=self._handle_notifications, name="millstream-stream-leases", daemon=True).start()

    def _handle_notifications(self) -> None:
        """Release leases that are rebalanced to other consumers."""
        for notification in self._balancer:
            try:
                if isinstance(notification, StreamDisowned) and notification.why == "rebalanced":
                    self._balancer.release(notification.lease)
                elif isinstance(notification, Terminated) and notification.error is not None:
                    self._on_ended(notification.error)
            except MillstreamError as error:
                logger.debug("cannot release a lease: %s", error)

    def close(self) -> None:
        """Leave the service."""
        self._balancer.close()
