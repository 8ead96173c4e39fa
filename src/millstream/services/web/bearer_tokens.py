"""Bearer tokens, each with its scopes."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path

from millstream.errors import ConfigError

_SHORTEST = 16


class TokenStore:
    """The tokens that a service accepts. An empty store means that the service requires no token.

    It stores hashes and compares them in constant time, so that responses do not reveal how much of a guess was right.

    * `check`: raises ConfigError for an unknown scope
    * `wanted`: describes the scopes, for people
    """

    def __init__(self, check: Callable[[str], object], wanted: str) -> None:
        self._check = check
        self._scope_help = wanted
        self._scopes: dict[bytes, frozenset[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._scopes)

    def add(self, token: str, scopes: Iterable[str]) -> None:
        """Accept a token with these scopes. Raises ConfigError."""
        granted = frozenset(scopes)
        for scope in granted:
            self._check(scope)
        if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"a token must have {_SHORTEST} or more ASCII characters, without spaces")
        digest = _digest(token)
        self._scopes[digest] = self._scopes.get(digest, frozenset()) | granted

    def read(self, path: Path) -> None:
        """Accept the tokens of a file: on each line a token and its scopes, separated by spaces; # begins a comment.

        Raises ConfigError.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"the token file {str(path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the token file {str(path)!r} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            token, *scopes = line.partition("#")[0].split() or [""]
            if not token:
                continue
            if not scopes:
                raise ConfigError(f"{path}:{number}: the token has no scope; add after it {self._scope_help}")
            try:
                self.add(token, scopes)
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error

    def replace(self, path: Path) -> None:
        """Accept the tokens of a file and no others. Raises ConfigError, and keeps the previous tokens.

        It does so for a file without tokens too, which would let every client in.
        """
        fresh = copy(self)
        fresh._scopes = {}
        fresh.read(path)
        if not fresh:
            raise ConfigError(f"the token file {str(path)!r} contains no token; add one")
        self._scopes = fresh._scopes

    def find(self, token: str | None) -> tuple[bytes, frozenset[str]] | None:
        """A token's hash and its scopes; None if the token is unknown."""
        digest = _digest(token or "")
        found = [entry for entry in self._scopes.items() if hmac.compare_digest(entry[0], digest)]
        return found[0] if found else None

    def items(self) -> list[tuple[bytes, frozenset[str]]]:
        """The hash of each token, and its scopes."""
        return list(self._scopes.items())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
