"""The only access to Redis: connections, scripts, error translation, key names, and an embedded server."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.redis_client.client import Client
    from millstream.redis_client.embedded_server import EmbeddedServer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.redis_client.client": ("Client",),
            "millstream.redis_client.embedded_server": ("EmbeddedServer",),
        },
    )

__all__ = ["Client", "EmbeddedServer"]
