"""Authorization: tokens with stream patterns, and tickets for browsers.

A browser can set no header on an EventSource or a WebSocket, and URLs end up in logs and histories. So a URL never
contains a token: a client exchanges its token for a ticket, which names its streams and soon expires (as presigned URLs
do). A ticket is signed with a key derived from the token: it needs no storage, every process with the same token file
accepts it, and removing the token, or its pattern for the streams, revokes it.
"""

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path

import msgspec

from millstream.errors import ConfigError
from millstream.redis_client.key_names import to_wire
from millstream.services.web.bearer_tokens import TokenStore
from millstream.services.web.errors import Refused

MOST_STREAMS = 100
"""The most streams in one connection, or in one ticket."""

ANONYMOUS = b""
"""The principal of all connections where no token is required."""

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket, and how many seconds it is valid for new connections."""

    text: str
    seconds: float


class _Claims(msgspec.Struct, array_like=True):
    """The claims of a ticket: the label of its token, its expiry (Unix seconds), its streams."""

    token: bytes
    until: float
    streams: list[bytes]


class Authorizer:
    """Authorizes tokens and tickets.

    * `ticket_s`: how long a ticket is valid, in seconds
    * `wall`: Unix seconds; tickets of other processes are compared with it, so the clocks of the machines must agree
    """

    def __init__(self, tokens: TokenStore, *, ticket_s: float = 60.0, wall: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._ticket_s = ticket_s
        self._wall = wall
        self._patterns: dict[frozenset[str], re.Pattern[str]] = {}

    def reload(self, path: Path) -> None:
        """Reload the token file. Raises ConfigError, and keeps the previous tokens, if that fails."""
        self._tokens.replace(path)

    @property
    def open(self) -> bool:
        """Whether every client may follow every stream, without a token."""
        return not self._tokens

    def authorize(self, streams: Sequence[str], *, token: str | None, ticket: str | None) -> bytes:
        """Authorize a connection to `streams`; returns its principal, a hash of the token. Raises Refused."""
        if self.open:
            return ANONYMOUS
        if ticket is not None:
            return self._authorize_ticket(ticket, streams)
        digest, patterns = self._find_token(token)
        self._check(patterns, streams)
        return digest

    def issue_ticket(self, token: str | None, streams: Sequence[str]) -> Ticket:
        """Issue a ticket for `streams`, which the token must cover. Raises Refused."""
        if not 1 <= len(streams) <= MOST_STREAMS:
            raise Refused(422, f"a ticket covers 1 to {MOST_STREAMS} streams; name so many")
        if self.open:
            raise Refused(404, "this server requires no token and issues no tickets; connect without one")
        digest, patterns = self._find_token(token)
        self._check(patterns, streams)
        claims = _Claims(_label(digest), self._wall() + self._ticket_s, [to_wire(name) for name in streams])
        body = msgspec.msgpack.encode(claims)
        return Ticket(base64.urlsafe_b64encode(body + _signature(digest, body)).decode().rstrip("="), self._ticket_s)

    def _find_token(self, token: str | None) -> tuple[bytes, frozenset[str]]:
        found = self._tokens.find(token)
        if found is None:
            raise Refused(401, "no valid token; send `Authorization: Bearer TOKEN`, or ?ticket= (POST /tickets)")
        return found

    def _check(self, patterns: frozenset[str], streams: Iterable[str]) -> None:
        if (compiled := self._patterns.get(patterns)) is None:
            compiled = self._patterns[patterns] = re.compile("|".join(map(translate, sorted(patterns))))
        for name in streams:
            if not compiled.match(name):
                raise Refused(403, f"this token does not cover the stream {name!r}")

    def _authorize_ticket(self, text: str, streams: Sequence[str]) -> bytes:
        invalid = Refused(401, "the ticket is invalid or has expired; get another one (POST /tickets)")
        try:
            signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            body, signature = signed[: -hashlib.sha256().digest_size], signed[-hashlib.sha256().digest_size :]
            claims = msgspec.msgpack.decode(body, type=_Claims)
        except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
            raise invalid from error
        for digest, patterns in self._tokens.items():
            if _label(digest) == claims.token and hmac.compare_digest(signature, _signature(digest, body)):
                if claims.until < self._wall():
                    raise invalid
                if not set(map(to_wire, streams)) <= set(claims.streams):
                    raise Refused(403, "this ticket does not cover these streams; get one for them (POST /tickets)")
                self._check(patterns, streams)
                return digest
        raise invalid


def new_stream_tokens() -> TokenStore:
    """An empty `TokenStore` whose scopes are glob patterns of streams."""
    return TokenStore(_check_pattern, "streams, or patterns like orders:*")


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(translate(pattern))
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a glob pattern: {error}") from error


def _label(digest: bytes) -> bytes:
    """The label of a token in its tickets: useless for signing."""
    return hashlib.sha256(digest).digest()[:_ID_BYTES]


def _signature(digest: bytes, body: bytes) -> bytes:
    return hmac.digest(digest, b"millstream ticket\0" + body, "sha256")
