"""Headers of a request."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def header(scope: "Scope", name: bytes) -> str | None:
    """A header of a request, by its name in lower case."""
    for one, value in scope["headers"]:
        if one == name:
            return str(value.decode("latin-1"))
    return None
