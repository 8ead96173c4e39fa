"""Tokens: the bearer tokens of a master and their scopes."""

from collections.abc import Iterable
from typing import Literal, get_args

from millstream.errors import ConfigError
from millstream.services.web.bearer_tokens import TokenStore

Scope = Literal["register", "acknowledge", "read", "admin"]
"""register: register and send heartbeats; acknowledge: report results and release; read: query; admin: everything."""

SCOPES: tuple[Scope, ...] = get_args(Scope)


class Tokens(TokenStore):
    """The tokens that a master accepts, each with its scopes. An empty store requires no token."""

    def __init__(self) -> None:
        super().__init__(_check_scope, ", ".join(SCOPES))

    def add(self, token: str, words: Iterable[str] = ("admin",)) -> None:
        """Accept a token for these scopes. Raises ConfigError."""
        super().add(token, words)

    def allows(self, token: str | None, scope: Scope) -> bool | None:
        """Whether `token` has `scope`; None if the token is unknown."""
        if not self:
            return True
        found = self.find(token)
        return None if found is None else not found[1].isdisjoint((scope, "admin"))


def _check_scope(name: str) -> None:
    if name not in SCOPES:
        raise ConfigError(f"unknown scope {name!r}: use {', '.join(SCOPES)}")
