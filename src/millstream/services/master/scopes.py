"""Who may ask a master what: bearer tokens and their scopes."""

from collections.abc import Iterable
from typing import Literal, get_args

from millstream.errors import ConfigError
from millstream.services.web.bearer_tokens import TokenStore

Scope = Literal["register", "acknowledge", "read", "admin"]
"""To join and leave as a consumer; to say what became of messages; to look; everything."""

SCOPES: tuple[Scope, ...] = get_args(Scope)


class Tokens(TokenStore):
    """The tokens that a master accepts, each for some scopes. None at all means that nobody is asked for one."""

    def __init__(self) -> None:
        super().__init__(_check_scope, ", ".join(SCOPES))

    def add(self, token: str, words: Iterable[str] = ("admin",)) -> None:
        """Accept a token for these scopes. Raises ConfigError."""
        super().add(token, words)

    def allows(self, token: str | None, scope: Scope) -> bool | None:
        """Whether `token` may do what `scope` is about; None if it is not known at all."""
        if not self:
            return True
        found = self.find(token)
        return None if found is None else not found[1].isdisjoint((scope, "admin"))


def _check_scope(name: str) -> None:
    if name not in SCOPES:
        raise ConfigError(f"{name!r} is no scope: use {', '.join(SCOPES)}")
