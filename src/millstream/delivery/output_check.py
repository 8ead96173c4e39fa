"""Check of a handler's output stream, before anything is read that could not be committed."""

from contextlib import suppress

from millstream.errors import CommandFailed, ConfigError, OutOfMemory, WrongType
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client


def check_output(client: Client, handler: Handler) -> None:
    """Return if `handler` has no output stream, or can write to it. Writes nothing.

    Raises ConfigError if its key holds something else, AccessDenied if this user may not write there, and RedisError.
    """
    if handler.into is None:
        return
    with suppress(CommandFailed, OutOfMemory, WrongType):
        client.execute("XADD", handler.into, "0-0", "f", "v")  # the id 0-0 is always refused (Redis XADD)
    found = client.execute("TYPE", handler.into).decode()
    if found not in ("none", "stream"):
        raise ConfigError(
            f"{handler.label} cannot write its outputs to {handler.into!r}, which holds a {found}: name another stream "
            "with into="
        )
