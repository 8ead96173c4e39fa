"""Who may follow which streams: tokens with patterns, and tickets for browsers.

A browser can set no header on an EventSource or a WebSocket, and URLs end up in logs and histories. So no token ever
stands in a URL: whoever has one exchanges it for a ticket, which names its streams and soon expires (as presigned URLs
do). A ticket is signed with a key made of the token: it needs no storage, every process with the same token file
accepts it, and it ends with its token.
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
from millstream.services.web.bearer_tokens import TokenBook
from millstream.services.web.errors import Refused

MOST_STREAMS = 100
"""Streams in one connection, or in one ticket."""

ANYBODY = b""
"""Whom all connections belong to where no token is asked for."""

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket, and for how many seconds connections can begin with it."""

    text: str
    seconds: float


class _Claims(msgspec.Struct, array_like=True):
    """What a ticket says: which token it came from, until when it counts (Unix seconds), which streams."""

    token: bytes
    until: float
    streams: list[bytes]


class Access:
    """Judges tokens and tickets.

    * `ticket_s`: how long a ticket counts, in seconds
    * `wall`: Unix seconds; other processes' too, so the clocks of the machines must agree
    """

    def __init__(self, tokens: TokenBook, *, ticket_s: float = 60.0, wall: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._ticket_s = ticket_s
        self._wall = wall
        self._patterns: dict[frozenset[str], re.Pattern[str]] = {}

    def renew(self, path: Path) -> None:
        """Go by what the token file holds now. Raises ConfigError, and goes on as before, if that cannot be."""
        self._tokens.replace(path)

    @property
    def open(self) -> bool:
        """Whether anybody may follow anything."""
        return not self._tokens

    def admit(self, streams: Sequence[str], *, token: str | None, ticket: str | None) -> bytes:
        """Whose connection it is that follows `streams`: a hash of the token. Raises Refused."""
        if self.open:
            return ANYBODY
        if ticket is not None:
            return self._admit_ticket(ticket, streams)
        digest, patterns = self._known(token)
        self._check(patterns, streams)
        return digest

    def issue(self, token: str | None, streams: Sequence[str]) -> Ticket:
        """A ticket for `streams`, which the token must be for. Raises Refused."""
        if not 1 <= len(streams) <= MOST_STREAMS:
            raise Refused(422, f"a ticket is for 1 to {MOST_STREAMS} streams")
        if self.open:
            raise Refused(404, "no token is asked for here, so there are no tickets")
        digest, patterns = self._known(token)
        self._check(patterns, streams)
        claims = _Claims(_label(digest), self._wall() + self._ticket_s, [to_wire(name) for name in streams])
        body = msgspec.msgpack.encode(claims)
        return Ticket(base64.urlsafe_b64encode(body + _signature(digest, body)).decode().rstrip("="), self._ticket_s)

    def _known(self, token: str | None) -> tuple[bytes, frozenset[str]]:
        found = self._tokens.find(token)
        if found is None:
            raise Refused(
                401, "a valid token is missing: send `Authorization: Bearer TOKEN`, or ?ticket= (POST /tickets)"
            )
        return found

    def _check(self, patterns: frozenset[str], streams: Iterable[str]) -> None:
        if (compiled := self._patterns.get(patterns)) is None:
            compiled = self._patterns[patterns] = re.compile("|".join(map(translate, sorted(patterns))))
        for name in streams:
            if not compiled.match(name):
                raise Refused(403, f"this token is not for the stream {name!r}")

    def _admit_ticket(self, text: str, streams: Sequence[str]) -> bytes:
        spoilt = Refused(401, "the ticket is not valid, or has expired: get another one (POST /tickets)")
        try:
            whole = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            body, signature = whole[: -hashlib.sha256().digest_size], whole[-hashlib.sha256().digest_size :]
            claims = msgspec.msgpack.decode(body, type=_Claims)
        except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
            raise spoilt from error
        for digest in self._tokens.hashes():
            if _label(digest) == claims.token and hmac.compare_digest(signature, _signature(digest, body)):
                if claims.until < self._wall():
                    raise spoilt
                if not set(map(to_wire, streams)) <= set(claims.streams):
                    raise Refused(403, "this ticket is for other streams")
                return digest
        raise spoilt


def stream_tokens() -> TokenBook:
    """A book of tokens whose words are glob patterns of streams."""
    return TokenBook(_check_pattern, "streams, or patterns like orders:*")


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(translate(pattern))
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no pattern: {error}") from error


def _label(digest: bytes) -> bytes:
    """What a ticket calls its token: nothing that could be used to sign."""
    return hashlib.sha256(digest).digest()[:_ID_BYTES]


def _signature(digest: bytes, body: bytes) -> bytes:
    return hmac.digest(digest, b"millstream ticket\0" + body, "sha256")
