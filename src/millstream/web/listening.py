"""Sockets to listen at."""

import socket

from millstream.errors import ServerError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 finds a free one. Raises ServerError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, the protocol tells asyncio to send at once: answers would wait for 40 ms otherwise (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServerError(f"cannot listen on {host}:{port} ({error}); choose another address") from error
    return listener


def address(listener: socket.socket) -> str:
    """Where a socket listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
