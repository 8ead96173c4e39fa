"""Sessions: how a browser stays logged in, and how a form proves that the console itself has sent it.

A session is a signed cookie: every process with the same token file accepts it, and it ends with its token. One that is
logged out before its time is in EndedSessions.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millstream.services.console.rights import ConsoleTokens, Viewer, to_viewer, token_label

SESSION_COOKIE = "millstream_console"
FORM_COOKIE = "millstream_console_form"
KNOWN_COOKIE = "millstream_console_known"

_ID_BYTES, _SIGNATURE_BYTES = 8, 32


class _Claims(msgspec.Struct, array_like=True):
    """The claims of a session: the label of its token, its expiry (Unix seconds), a random part."""

    token: bytes
    until: float
    random: bytes


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session that a console has issued: its id, its viewer, and its expiry in Unix seconds."""

    id: bytes
    viewer: Viewer
    until_s: float


class Sessions:
    """Issues and reads the session cookies of the tokens of `tokens`.

    * `session_s`: how long a session lasts, in seconds
    * `wall`: Unix seconds
    """

    def __init__(
        self, tokens: ConsoleTokens, *, session_s: float = 43_200.0, wall: Callable[[], float] = time.time
    ) -> None:
        self._tokens = tokens
        self._wall = wall
        self.session_s = session_s

    def issue(self, digest: bytes) -> str:
        """A session of the token with this hash."""
        claims = _Claims(_label(digest), self._wall() + self.session_s, secrets.token_bytes(_ID_BYTES))
        body = msgspec.msgpack.encode(claims)
        return base64.urlsafe_b64encode(body + _signature(digest, body)).decode().rstrip("=")

    def find(self, cookie: str | None) -> Session | None:
        """The session of a cookie; None if it is forged, has expired, or its token was removed."""
        try:
            signed = base64.urlsafe_b64decode((cookie or "") + "=" * (-len(cookie or "") % 4))
            body, signature = signed[:-_SIGNATURE_BYTES], signed[-_SIGNATURE_BYTES:]
            claims = msgspec.msgpack.decode(body, type=_Claims)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            return None
        for digest, words in self._tokens.items():
            if _label(digest) == claims.token and hmac.compare_digest(signature, _signature(digest, body)):
                if claims.until < self._wall():
                    return None
                return Session(id=claims.random, viewer=to_viewer(digest, words), until_s=claims.until)
        return None

    def browsers_of(self, cookie: str | None) -> str | None:
        """The browsers that have logged in with the token of this cookie, as one name; None for any other cookie."""
        for digest in (one for one, _ in self._tokens.items()):
            if hmac.compare_digest((cookie or "").encode("utf-8", "replace"), known_browser(digest).encode()):
                return f"browsers of {token_label(digest)}"
        return None


def known_browser(digest: bytes) -> str:
    """What a browser keeps that has logged in with the token of this hash. It opens no page: see LoginLimits."""
    return hmac.digest(digest, b"millstream browser", "sha256").hex()


def new_form_secret() -> str:
    """The secret of a browser for its forms: a cookie that no script can read."""
    return secrets.token_urlsafe(32)


def form_token(secret: str, session: str) -> str:
    """The token of each form of a browser: made of both its cookies, so a page of another origin cannot know it."""
    return hmac.digest(secret.encode(), b"millstream form\0" + session.encode(), "sha256").hex()


def is_form_token(found: str, secret: str, session: str) -> bool:
    """Whether a form carries the token of these cookies."""
    return bool(secret) and hmac.compare_digest(
        found.encode("utf-8", "surrogateescape"), form_token(secret, session).encode()
    )


def address_signature(token: str, address: str) -> str:
    """What an address carries to show that the console itself has made it, for the browser with this form token."""
    return hmac.digest(
        token.encode(), b"millstream address\0" + address.encode("utf-8", "surrogateescape"), "sha256"
    ).hex()[:32]


def _label(digest: bytes) -> bytes:
    """The label of a token in its sessions: useless for signing."""
    return hashlib.sha256(digest).digest()[:_ID_BYTES]


def _signature(digest: bytes, body: bytes) -> bytes:
    return hmac.digest(digest, b"millstream session\0" + body, "sha256")
