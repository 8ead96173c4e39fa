"""Listening sockets."""

import resource
import socket

from millstream.errors import ConfigError, ServerError

_SEND_BUFFER_BYTES = 65_536
_OTHER_FILES = 200


def listen(host: str, port: int, *, connections: int, stall_s: float = 20.0) -> socket.socket:
    """A socket that listens for so many connections; port 0 picks a free one. Raises ServerError and ConfigError.

    Where the system supports it, a connection ends when its client has read nothing for `stall_s` seconds.
    """
    _allow_files(connections)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP asyncio sets TCP_NODELAY: otherwise responses would wait for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit these: a small send buffer, and detection of vanished clients (tcp(7), socket(7)).
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1000))
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServerError(f"cannot listen on {host}:{port} ({error}); choose another address") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_files(connections: int) -> None:
    """Raise the limit of open files as far as the connections need. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft < needed and hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{connections:,} connections need more open files than the {hard:,} allowed; lower --connections"
        )
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
