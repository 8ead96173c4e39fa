"""Leases of whole streams: the services of handlers, and how their streams are shared."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from millstream.admin.service_names import find_service
from millstream.balancer.service_status import ServiceState, fetch_service_state
from millstream.errors import AccessDenied
from millstream.redis_client.client import Client


@dataclass(frozen=True, kw_only=True)
class ServiceLeases:
    """A service: the requested name, its own name, and its state."""

    asked: str
    service: str
    state: ServiceState

    @property
    def owned(self) -> int:
        """How many of its streams have an owner."""
        return sum(one.consumer is not None for one in self.state.streams)


def read_service(client: Client, name: str) -> ServiceLeases | None:
    """The service of this name, or of the handler of this name; None if there is neither.

    Raises RedisError, and ConfigError for what can name none.
    """
    service = find_service(client, name)
    if service is None:
        return None
    return ServiceLeases(asked=name, service=service, state=fetch_service_state(client, service))


def read_services(client: Client, names: Iterable[str]) -> list[ServiceLeases]:
    """Those of these handlers whose workers share streams, as far as this user may read them. Raises RedisError."""
    found = []
    for name in names:
        with suppress(AccessDenied):
            found.append(read_service(client, name))
    return [one for one in found if one is not None]
