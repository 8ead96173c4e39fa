"""Rights: the four levels of the console, and the tokens that have them."""

import hashlib
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
    """The tokens that a console accepts, each with a level. An empty store requires no token."""

    def __init__(self) -> None:
        super().__init__(_level, f"its level: {', '.join(one.word for one in Level)}")

    def viewer_of(self, token: str | None) -> tuple[bytes, Viewer] | None:
        """The hash of a token and its viewer; None if the token is unknown."""
        found = self.find(token)
        return None if found is None else (found[0], to_viewer(*found))


def to_viewer(digest: bytes, words: frozenset[str]) -> Viewer:
    """The viewer of a token, by its hash and its levels, of which the highest counts.

    The name is a hash of the hash: the same at each login, and useless as a token.
    """
    name = f"token {hashlib.sha256(digest).hexdigest()[:8]}"
    return Viewer(name=name, level=max(map(_level, words)))


def _level(word: str) -> Level:
    found = [one for one in Level if one.word == word]
    if not found:
        raise ConfigError(f"unknown level {word!r}: use {', '.join(one.word for one in Level)}")
    return found[0]
