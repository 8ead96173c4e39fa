"""Headers of a request."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def header(scope: "Scope", name: bytes) -> str | None:
    """The value of a header by its name in lower case; None if it is missing."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value.decode("latin-1"))
    return None


def bearer_token(scope: "Scope") -> str | None:
    """The token in the header, if there is one."""
    kind, _, token = (header(scope, b"authorization") or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None
