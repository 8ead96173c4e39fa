"""What a service answers when it will not do what it is asked: a status, and one line of JSON that says why."""

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from millstream.errors import MillstreamError, Unavailable


class Refused(MillstreamError):
    """A request is refused: with the HTTP status `status`, and a line that says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def explain(app: Starlette, name: str) -> None:
    """Have every error answered with one line of JSON. `name`: of the service, for its own mistakes."""
    app.add_exception_handler(Refused, in_json(lambda error: int(error.status), str))
    app.add_exception_handler(Unavailable, in_json(lambda error: 503, lambda error: f"Redis is away: {error}"))
    app.add_exception_handler(MillstreamError, in_json(lambda error: 500, str))
    app.add_exception_handler(
        HTTPException, in_json(lambda error: int(error.status_code), lambda error: str(error.detail))
    )
    app.add_exception_handler(
        Exception, in_json(lambda error: 500, lambda error: f"a mistake of {name}'s: see its log")
    )


def in_json(status: Callable[[Any], int], text: Callable[[Any], str]) -> Callable[[Request, Any], Response]:
    """Answers an error with a status and a text, made of it."""
    return lambda request, error: JSONResponse({"error": text(error)}, status(error))
