"""Streams for browsers and other clients, as server-sent events and WebSockets, over one router ([docs/serve.md])."""
