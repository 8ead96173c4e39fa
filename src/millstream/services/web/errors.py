"""Error responses of HTTP services: a status, and one line of JSON with the cause."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from millstream.errors import MillstreamError, Unavailable


class Refused(MillstreamError):
    """A request is refused, with the HTTP status `status`, the cause, and `headers` of the response."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


def install_error_handlers(app: Starlette, name: str) -> None:
    """Answer every error with one line of JSON. `name`: of the service, for internal errors."""
    app.add_exception_handler(Refused, json_handler(lambda error: int(error.status), str))
    app.add_exception_handler(
        Unavailable, json_handler(lambda error: 503, lambda error: f"Redis is unavailable: {error}")
    )
    app.add_exception_handler(MillstreamError, json_handler(lambda error: 500, str))
    app.add_exception_handler(
        HTTPException, json_handler(lambda error: int(error.status_code), lambda error: str(error.detail))
    )
    app.add_exception_handler(
        Exception, json_handler(lambda error: 500, lambda error: f"internal error of {name}; see its log")
    )


def json_handler(status: Callable[[Any], int], text: Callable[[Any], str]) -> Callable[[Request, Any], Response]:
    """An exception handler that responds with the status and the text of an error."""
    return lambda request, error: JSONResponse(
        {"error": text(error)},
        status(error),
        headers=getattr(error, "headers", None),  # Allow, of a wrong method
    )
