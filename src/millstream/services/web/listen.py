"""Sockets to listen at."""

import resource
import socket

from millstream.errors import ConfigError, ServerError

_SENT_BYTES = 65_536
_FILES_BESIDE = 200


def listen(host: str, port: int, *, connections: int, stall_s: float = 20.0) -> socket.socket:
    """A socket that listens for so many connections; port 0 finds a free one. Raises ServerError and ConfigError.

    They end when their client has taken nothing for `stall_s` seconds, where the system can see to that.
    """
    _allow_files(connections)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, the protocol tells asyncio to send at once: answers would wait for 40 ms otherwise (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # What connections inherit: not much is sent ahead, and who has vanished is noticed (tcp(7), socket(7)).
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1000))
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


def _allow_files(connections: int) -> None:
    """Allow as many open files as connections need. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _FILES_BESIDE
    if soft < needed and hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(f"{connections:,} connections need more open files than the {hard:,} allowed: --connections")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
