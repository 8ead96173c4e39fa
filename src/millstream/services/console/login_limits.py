"""LoginLimits: how many unknown tokens clients may send, so that no token can be guessed.

An address may send a few; each further one has to wait, twice as long each time. All addresses together have a limit,
too, but for those that have sent a valid token. Browsers that have logged in before have limits of their own: a
stranger who guesses keeps none of them out, even behind the same proxy.
"""

import hashlib
import ipaddress
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

logger = logging.getLogger(__name__)

_FREE, _LONGEST_S, _FORGET_S = 5, 60.0, 900.0
_TOTAL, _TOTAL_PER_S = 50.0, 1.0
_MOST_CLIENTS, _MOST_VALID, _MOST_GUESSES = 4_096, 1_000, 8
_IPV6_SITE_BITS = 64


class TooManyGuesses(Exception):
    """A token is not looked at before `wait_s` seconds have passed."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


@dataclass(slots=True)
class _Client:
    """Unknown tokens of a client: how many, when the last one came, and hashes of the last ones."""

    count: int = 0
    last_s: float = 0.0
    guesses: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MOST_GUESSES))


class LoginLimits:
    """Limits the unknown tokens of clients, in this process; a client is an address, or the browsers of a token.

    `monotonic`: seconds
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._valid: OrderedDict[str, None] = OrderedDict()
        self._left, self._left_at_s = _TOTAL, monotonic()

    def admit(self, token: str, address: str, browsers: str | None = None) -> str:
        """The client for which to count this token, if it is unknown. Raises TooManyGuesses.

        A token that was unknown before is no guess: a program that goes on sending an old one delays no other.

        * `address`: where it comes from; `browsers`: those that it comes from, if they have logged in before
        """
        waits_s = {one: self._wait_s(one, token) for one in (browsers, address) if one is not None}
        if address not in self._valid and not self._is_known(address, token):
            waits_s[address] = max(waits_s[address], (1 - self._refill()) / _TOTAL_PER_S)
        client = min(waits_s, key=lambda one: waits_s[one])
        if waits_s[client] > 0:
            raise TooManyGuesses(waits_s[client])
        return client

    def count_valid(self, address: str) -> None:
        """A valid token came from this address."""
        self._valid[address] = None
        self._valid.move_to_end(address)
        if len(self._valid) > _MOST_VALID:
            self._valid.popitem(last=False)

    def count_unknown(self, token: str, client: str) -> None:
        """An unknown token came from this client."""
        if self._is_known(client, token):
            return
        self._left = max(0.0, self._refill() - 1)
        known = self._clients.setdefault(client, _Client())
        known.count, known.last_s = known.count + 1, self._monotonic()
        known.guesses.append(_hash(token))
        self._clients.move_to_end(client)
        self._forget()
        if known.count == _FREE:
            logger.warning("login: %d unknown tokens came from %s; further ones have to wait", _FREE, client)

    def _is_known(self, client: str, token: str) -> bool:
        """Whether this token was counted for the client already."""
        known = self._clients.get(client)
        return known is not None and _hash(token) in known.guesses

    def _wait_s(self, client: str, token: str) -> float:
        self._forget()
        known = self._clients.get(client)
        if known is None or known.count < _FREE or _hash(token) in known.guesses:
            return 0.0
        wait_s = min(_LONGEST_S, 2.0 ** min(known.count - _FREE, 30))
        return known.last_s + wait_s - self._monotonic()

    def _refill(self) -> float:
        """How many unknown tokens all addresses may send now."""
        now_s = self._monotonic()
        self._left = min(_TOTAL, self._left + (now_s - self._left_at_s) * _TOTAL_PER_S)
        self._left_at_s = now_s
        return self._left

    def _forget(self) -> None:
        """Forget clients that have sent no unknown token for long, and the oldest if there are too many."""
        while self._clients:
            oldest = next(iter(self._clients.values()))
            if len(self._clients) <= _MOST_CLIENTS and self._monotonic() - oldest.last_s < _FORGET_S:
                return
            self._clients.popitem(last=False)


def address_of(request: Request) -> str:
    """The address that a request comes from: of a proxy in a private network the one that it names last, too.

    An IPv6 site is one address: it has as many as it likes.
    """
    peer = request.client.host if request.client else ""
    named = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    return f"{peer} for {_site_of(named)}" if named and _is_private(peer) else _site_of(peer)


def _is_private(address: str) -> bool:
    try:
        return _parsed(address).is_private
    except ValueError:
        return True  # a Unix socket


def _site_of(address: str) -> str:
    try:
        found = _parsed(address)
    except ValueError:
        return address[:64]
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, _IPV6_SITE_BITS), strict=False))


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address; that of IPv4 for a client that has reached a socket of IPv6 by IPv4. Raises ValueError."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()[:16]
