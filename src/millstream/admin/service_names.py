"""Services as operators name them: by their own name, or by that of the handler whose workers share the streams."""

from millstream.balancer.protocol import service_of
from millstream.errors import AccessDenied, MillstreamError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys


def resolve_service(client: Client, service: str) -> str:
    """The service of this name, or of the handler of this name. Raises MillstreamError if neither exists."""
    name = find_service(client, service)
    if name is None:
        raise MillstreamError(f"unknown service {service!r}: no stream was added to it; check the name and --url")
    return name


def find_service(client: Client, service: str) -> str | None:
    """The service of this name, or of the handler of this name; None if there is neither. Raises RedisError."""
    refusal: AccessDenied | None = None
    try:
        found = service_of(client, service)
    except AccessDenied as error:  # a user may have rights to only one of the two keys
        found, refusal = None, error
    if found is not None:
        return found
    if client.execute("EXISTS", ServiceKeys(service).input):
        return service
    if refusal is not None:
        raise refusal
    return None
