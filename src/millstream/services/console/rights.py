"""Rights: the four levels of the console, and the tokens that have them."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from millstream.errors import ConfigError
from millstream.services.web.bearer_tokens import TokenStore


class Level(IntEnum):
    """What a viewer may see and do. A level includes those below it.

    * `FIGURES`: figures and names of handlers and streams; nothing that messages contain
    * `PAYLOADS`: messages, keys, states, errors, and what operators did
    * `OPERATE`: actions that another action reverses: pause, resume, set a rate, park, unpark, skip, redrive, stop
      a redrive
    * `ADMIN`: actions that no action reverses: reset, purge, cancel, drain
    """

    FIGURES = 1
    PAYLOADS = 2
    OPERATE = 3
    ADMIN = 4

    @property
    def word(self) -> str:
        """Its name in a token file."""
        return self.name.lower()


_LEVELS = ", ".join(one.word for one in Level)
_NAME = "name="
_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Viewer:
    """The person or program that sends a request.

    * `name`: recorded with each action, and shown to other operators
    * `level`: what they may do
    """

    name: str
    level: Level

    def may(self, level: Level) -> bool:
        """Whether this viewer has the level, or one above it."""
        return self.level >= level


class ConsoleTokens(TokenStore):
    """The tokens that a console accepts, each with a level, and with the name of its owner, written `name=ann`.

    Several tokens may have the same name. An empty store requires no token.
    """

    def __init__(self) -> None:
        super().__init__(_check_word, f"its level: {_LEVELS}")

    def add(self, token: str, scopes: Iterable[str]) -> None:
        """Accept a token with these levels, of which the highest counts, and at most one name. Raises ConfigError."""
        super().add(token, scopes)
        _, words = self.find(token) or (b"", frozenset())
        if len(names := _names_in(words)) > 1:
            raise ConfigError(f"the token has several names: {', '.join(names)}; keep one")
        if not _levels_in(words):
            raise ConfigError(f"the token has no level; add after it one of {_LEVELS}")

    def viewer_of(self, token: str | None) -> tuple[bytes, Viewer] | None:
        """The hash of a token and its viewer; None if the token is unknown."""
        found = self.find(token)
        return None if found is None else (found[0], to_viewer(*found))


def to_viewer(digest: bytes, words: frozenset[str]) -> Viewer:
    """The viewer of a token, by its hash, its levels, of which the highest counts, and its name, if it has one."""
    return Viewer(name=next(iter(_names_in(words)), token_label(digest)), level=max(_levels_in(words)))


def token_label(digest: bytes) -> str:
    """What a token without a name is called: a hash of its hash, the same at each login, and useless as a token."""
    return f"token {hashlib.sha256(digest).hexdigest()[:8]}"


def _levels_in(words: Collection[str]) -> list[Level]:
    return [one for one in Level if one.word in words]


def _names_in(words: Iterable[str]) -> list[str]:
    return sorted(one.removeprefix(_NAME) for one in words if one.startswith(_NAME))


def _check_word(word: str) -> None:
    """Check that a word is a level or a name."""
    name = word.removeprefix(_NAME)
    if name == word:
        if not _levels_in([word]):
            raise ConfigError(f"unknown level {word!r}: use {_LEVELS}; a name is written {_NAME}ann")
    elif not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"the name {name!r} must have 1 to {_LONGEST_NAME} printable characters, without spaces")
