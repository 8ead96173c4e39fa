"""URLs of Redis deployments: validation, their hosts, and the URLs of their other nodes."""

import re
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit, urlunsplit

from millstream.errors import ConfigError
from millstream.redis_client.redaction import redact_url
from millstream.redis_client.resp import Node

_ENCODE = (
    "percent-encode special characters in user and password: %40 for @, %3A for :, %2F for /, %3F for ?, %23 for #, "
    "%25 for %, %5B and %5D for [ and ]"
)
_HOST = re.compile(r"(?:\[(?P<address>[^]]+)\]|(?P<name>[^][:]*))(?::(?P<port>[0-9]*))?")


class Shard(NamedTuple):
    """A primary and its replicas, as a cluster reports them.

    None where there is one primary only, which has to be queried for its replicas.
    """

    primary: Node | None = None
    replicas: tuple[Node, ...] | None = None


def split_url(url: str) -> SplitResult:
    """The parts of `url`. Raises ConfigError where a password that is not encoded would be parsed as another part.

    The error of Python for such a URL is not passed on: it quotes pieces of the password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or any("@" in part for part in (parts.path, parts.query, parts.fragment)):
        raise ConfigError(f"{redact_url(url)!r} is not a Redis URL: {_ENCODE}")
    return parts


def hosts(netloc: str, default_port: int) -> list[Node]:
    """The hosts of `user:pw@h1:p1,[h2]:p2`, brackets around an address of IPv6. Raises ValueError for a bad one."""
    pairs = []
    for host in netloc.rpartition("@")[2].split(","):
        found = _HOST.fullmatch(host)
        if not found:
            raise ValueError("the port of a host is not a number (brackets enclose an IPv6 address, as in [::1]:6379)")
        pairs.append((found["address"] or found["name"] or "", int(found["port"] or default_port)))
    return pairs


def url_of_node(url: str, node: Node) -> str:
    """The URL of one server of the deployment at `url`: with its credentials, database and connection options."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    credentials, at, _ = parts.netloc.rpartition("@")
    path = parts.path
    if kind == "sentinel":
        path = "/" + path.strip("/").partition("/")[2]  # after the name of the service
    elif kind == "cluster" or scheme == "unix":
        path = ""  # the path of a socket is not a database
    host = f"[{node[0]}]" if ":" in node[0] else node[0]
    scheme = "redis" if scheme == "unix" else scheme
    return urlunsplit((scheme, f"{credentials}{at}{host}:{node[1]}", path, parts.query, ""))


def explain_refusal(text: str, where: str) -> str | None:
    """The mistake in the URL, if the server's refusal of the connection points to one."""
    if "Cluster mode is not enabled" in text or "cluster support disabled" in text:
        return f"{where} is a single server, not a Redis Cluster; connect with redis://HOST:PORT/DB"
    if "unknown command 'SENTINEL'" in text:
        return f"{where} is not a Sentinel; connect with redis://HOST:PORT/DB, or give the addresses of the Sentinels"
    if "DB index is out of range" in text:
        return f"{where} has no database of this number; Redis has 16, 0 to 15, unless it is configured otherwise"
    return None
