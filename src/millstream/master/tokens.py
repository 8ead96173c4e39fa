"""Who may ask a master what: bearer tokens and their scopes."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeGuard, get_args

from millstream.errors import ConfigError

Scope = Literal["register", "acknowledge", "read", "admin"]
"""To join and leave as a consumer; to say what became of messages; to look; everything."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
_SHORTEST = 16


class Tokens:
    """The tokens that a master accepts. None at all means that nobody is asked for one.

    Their hashes are kept and compared in constant time, so that answers do not tell how much of a guess was right.
    """

    def __init__(self) -> None:
        self._scopes: dict[bytes, frozenset[Scope]] = {}

    def __bool__(self) -> bool:
        return bool(self._scopes)

    def add(self, token: str, scopes: Iterable[str] = ("admin",)) -> None:
        """Accept a token for these scopes. Raises ConfigError."""
        wanted = [_scope(name) for name in scopes]
        if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"a token must have {_SHORTEST} or more ASCII characters, without spaces")
        digest = _digest(token)
        self._scopes[digest] = self._scopes.get(digest, frozenset()) | frozenset(wanted)

    def read(self, path: Path) -> None:
        """Accept the tokens of a file: on each line a token and its scopes, with spaces in between; # begins a comment.

        Raises ConfigError.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {str(path)!r} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            token, *scopes = line.partition("#")[0].split() or [""]
            if not token:
                continue
            if not scopes:
                raise ConfigError(f"{path}:{number}: say after the token what it is for: {', '.join(SCOPES)}")
            try:
                self.add(token, scopes)
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error

    def allows(self, token: str | None, scope: Scope) -> bool | None:
        """Whether `token` may do what `scope` is about; None if it is not known at all."""
        if not self._scopes:
            return True
        digest = _digest(token or "")
        found = [scopes for known, scopes in self._scopes.items() if hmac.compare_digest(known, digest)]
        return scope in found[0] or "admin" in found[0] if found else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _scope(name: str) -> Scope:
    if not _is_scope(name):
        raise ConfigError(f"{name!r} is no scope: use {', '.join(SCOPES)}")
    return name


def _is_scope(name: str) -> TypeGuard[Scope]:
    return name in SCOPES
