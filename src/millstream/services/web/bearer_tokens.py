"""Bearer tokens, each with words that say what it is for."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from pathlib import Path

from millstream.errors import ConfigError

_SHORTEST = 16


class TokenBook:
    """The tokens that a service accepts. None at all means that nobody is asked for one.

    Their hashes are kept and compared in constant time, so that answers do not tell how much of a guess was right.

    * `check`: raises ConfigError for a word that means nothing
    * `wanted`: which words there are, for people
    """

    def __init__(self, check: Callable[[str], object], wanted: str) -> None:
        self._check = check
        self._wanted = wanted
        self._words: dict[bytes, frozenset[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._words)

    def add(self, token: str, words: Iterable[str]) -> None:
        """Accept a token for these words. Raises ConfigError."""
        wanted = frozenset(words)
        for word in wanted:
            self._check(word)
        if len(token) < _SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"a token must have {_SHORTEST} or more ASCII characters, without spaces")
        digest = _digest(token)
        self._words[digest] = self._words.get(digest, frozenset()) | wanted

    def read(self, path: Path) -> None:
        """Accept the tokens of a file: on each line a token and its words, with spaces in between; # begins a comment.

        Raises ConfigError.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {str(path)!r} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            token, *words = line.partition("#")[0].split() or [""]
            if not token:
                continue
            if not words:
                raise ConfigError(f"{path}:{number}: say after the token what it is for: {self._wanted}")
            try:
                self.add(token, words)
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error

    def replace(self, path: Path) -> None:
        """Accept the tokens of a file and no others. Raises ConfigError; then those of before still count.

        So it is for a file without any, which must not open the doors to everybody.
        """
        fresh = TokenBook(self._check, self._wanted)
        fresh.read(path)
        if not fresh:
            raise ConfigError(f"the token file {str(path)!r} holds no token")
        self._words = fresh._words

    def find(self, token: str | None) -> tuple[bytes, frozenset[str]] | None:
        """A token's hash and its words; None if it is not known."""
        digest = _digest(token or "")
        found = [entry for entry in self._words.items() if hmac.compare_digest(entry[0], digest)]
        return found[0] if found else None

    def hashes(self) -> list[bytes]:
        """The hashes of all tokens."""
        return list(self._words)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
