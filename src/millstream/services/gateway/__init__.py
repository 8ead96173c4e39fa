"""Streams for browsers and other clients, as server-sent events and WebSockets, over one router ([docs/serve.md])."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.services.gateway.client_connection import FlowControl
    from millstream.services.gateway.connection_manager import ConnectionLimits
    from millstream.services.gateway.embedded_gateway import EmbeddedGateway
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.services.gateway.client_connection": ("FlowControl",),
            "millstream.services.gateway.connection_manager": ("ConnectionLimits",),
            "millstream.services.gateway.embedded_gateway": ("EmbeddedGateway",),
        },
    )

__all__ = ["ConnectionLimits", "EmbeddedGateway", "FlowControl"]
