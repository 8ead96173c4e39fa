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

DEFAULT_URL = "redis://127.0.0.1:6379/0"
"""The URL that commands, producers, and the source and the sink of Spark use, if neither an argument nor MILLSTREAM_URL
gives one.
"""

__all__ = ["DEFAULT_URL", "Client", "EmbeddedServer"]
