"""AllowList: the health URLs that a master may call.

A consumer that registers chooses a URL, and the master calls it from inside its own network. To prevent server-side
request forgery it calls only allowed hosts, at an address that it resolved and checked itself (OWASP, "Server-Side
Request Forgery Prevention Cheat Sheet").
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from millstream.errors import ConfigError
from millstream.services.web.errors import Refused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK = ("127.0.0.0/8", "[::1]/128", "localhost")
_LONGEST_URL = 2_000
_ENTRY = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F:.]+)\](?P<mask>/\d+)?|(?P<host>(?:\*\.)?[A-Za-z0-9._-]+(?:/\d+)?))(?::(?P<port>\d+))?"
)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL: scheme, host, port, and the path with its query."""

    scheme: str
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class _Rule:
    network: Network | None
    name: str
    port: int | None


class AllowList:
    """The hosts whose health URLs may be called.

    An entry is `HOST`, `*.DOMAIN`, an address or a network, with or without `:PORT`. A host allowed by name may have
    any address except loopback, link-local, multicast and unspecified ones, which have to be allowed as addresses.
    Raises ConfigError for any other entry.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._rules = [_rule(entry) for entry in entries]

    def parse(self, url: str) -> Target:
        """Parse `url`. Raises Refused if it is invalid, or not allowed whatever address its host resolves to."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise Refused(422, f"the health URL is not a URL: {error}") from error
        if parts.scheme not in _PORTS or not parts.hostname or len(url) > _LONGEST_URL or not _is_plain(url):
            raise Refused(422, "the health URL must be http://HOST[:PORT]/PATH, or https")
        if parts.username is not None or parts.password is not None:
            raise Refused(422, "the health URL must be without user and password")
        target = Target(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], _path(parts))
        literal = literal_address(target.host)
        is_possible = self._allows_address(literal, target.port) if literal else self._may_resolve(target)
        if not is_possible:
            raise Refused(403, f"health URLs at {target.host}:{target.port} are not allowed here; see --allow-health")
        return target

    def permits(self, target: Target, address: Address) -> bool:
        """Whether the host of `parse` may be called at `address`, to which it resolved."""
        if self._allows_address(address, target.port):
            return True
        plain = _unmapped(address)
        special = plain.is_loopback or plain.is_link_local or plain.is_multicast or plain.is_unspecified
        return not special and not literal_address(target.host) and self._matches_name(target)

    def _allows_address(self, address: Address, port: int) -> bool:
        plain = _unmapped(address)
        return any(
            rule.network is not None and plain in rule.network and rule.port in (None, port) for rule in self._rules
        )

    def _matches_name(self, target: Target) -> bool:
        return any(
            rule.network is None and _matches(target.host, rule.name) and rule.port in (None, target.port)
            for rule in self._rules
        )

    def _may_resolve(self, target: Target) -> bool:
        # A name that is not in the list is checked by its address later, if the list has networks for its port.
        networks = any(rule.network is not None and rule.port in (None, target.port) for rule in self._rules)
        return networks or self._matches_name(target)


def _rule(entry: str) -> _Rule:
    bare = _network(entry)
    found = _ENTRY.fullmatch(entry)
    if bare is None and found is None:
        raise ConfigError(f"cannot allow health URLs at {entry!r}: use HOST, HOST:PORT, 10.0.0.0/8 or [fd00::]/8")
    if bare is not None or found is None:
        return _Rule(bare, "", None)
    host, port = found["six"] or found["host"], found["port"]
    if port and not 0 < int(port) < 65536:
        raise ConfigError(f"{entry!r}: port {port} is out of range; use 1 to 65535")
    return _Rule(_network(host + (found["mask"] or "")), host.lower().rstrip("."), int(port) if port else None)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def literal_address(host: str) -> Address | None:
    """The address, if the host is written as one and not as a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _unmapped(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _matches(host: str, name: str) -> bool:
    host = host.lower().rstrip(".")
    return host.endswith(name[1:]) and len(host) > len(name) - 1 if name.startswith("*.") else host == name


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and " " not in url and "\\" not in url


def _path(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
