"""A run on Spark as one of the consumers of the service that its streams are announced to.

It reads every announced stream, whoever has it: workers of the handler end when the run begins. What it is a consumer for
is that announcements are read, and that people see whose the streams are.
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
from millstream.redis_client.key_names import ServiceKeys, from_wire, host_name

logger = logging.getLogger(__name__)

_LEASE_MS = 10_000
_HOST_CHARS = 40


def announced_streams(client: Client, service: str) -> list[str]:
    """The streams that were announced to `service` and read there, and are not done. Raises RedisError."""
    return sorted(from_wire(name) for name in client.execute("HKEYS", ServiceKeys(service).streams))


class ServiceMembership:
    """The part that a run of `handler` takes in its service, from `join` to `close`.

    `on_ended` is told, in another thread, of what has ended it before: no announcement is read any more.
    """

    def __init__(self, client: Client, handler: Handler, *, on_ended: Callable[[Exception], None]) -> None:
        assert handler.announced is not None
        self._client = client
        self._handler = handler
        self._on_ended = on_ended
        self._service = handler.announced
        self._balancer = Balancer(
            client.url, self._service, consumer=f"spark-{host_name(_HOST_CHARS)}-{os.getpid()}",
            policy=BalancerPolicy(lease_ms=_LEASE_MS),
        )  # fmt: skip

    def join(self) -> None:
        """Take part. Raises ConfigError if the service is another handler's, RedisError."""
        claim_service(self._client, self._service, self._handler.label)
        self._balancer.start()
        threading.Thread(target=self._attend, name="millstream-leases", daemon=True).start()

    def _attend(self) -> None:
        """Give back what others are to have: they take over by beginning."""
        for notice in self._balancer:
            try:
                if isinstance(notice, StreamDisowned) and notice.why == "rebalanced":
                    self._balancer.release(notice.lease)
                elif isinstance(notice, Terminated) and notice.error is not None:
                    self._on_ended(notice.error)
            except MillstreamError as error:
                logger.debug("a lease was not released: %s", error)

    def close(self) -> None:
        """Leave."""
        self._balancer.close()
