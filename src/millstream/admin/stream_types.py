"""Names that handlers read as streams, but whose key holds another type of value."""

from collections.abc import Iterable

from millstream.errors import WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire
from millstream.redis_client.pipelining import send_all


def types_of_others(client: Client, names: Iterable[str]) -> dict[str, str]:
    """The type of each of these keys that holds something else than a stream. Raises RedisError."""
    wanted = sorted(set(names))
    replies = zip(wanted, send_all(client, [("XINFO", "STREAM", to_wire(name)) for name in wanted]), strict=True)
    others = [name for name, reply in replies if isinstance(reply, WrongType)]
    types = send_all(client, [("TYPE", to_wire(name)) for name in others])
    return {
        name: found.decode() if isinstance(found, bytes) else "value of another type"  # this user may not ask
        for name, found in zip(others, types, strict=True)
    }
