"""BodyRoute: API calls with a JSON body, without FastAPI's dependency injection, which costs more than the call."""

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.openapi.models import HTTPBearer
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, ValidationError

from millstream.services.master.scopes import Scope, Tokens
from millstream.services.web.errors import Refused


class Permission(SecurityBase):
    """A dependency that requires a token with `scope`. Raises Refused."""

    def __init__(self, tokens: Tokens, scope: Scope) -> None:
        self.model = HTTPBearer(description=f"A token with the scope `{scope}`.")
        self.scheme_name = scope
        self._tokens = tokens
        self._scope: Scope = scope

    async def __call__(self, request: Request) -> None:
        """Check the token of a request. Raises Refused."""
        scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
        allowed = self._tokens.allows(token if scheme.lower() == "bearer" else None, self._scope)
        if allowed is None:
            raise Refused(401, "no valid token: send the header `Authorization: Bearer TOKEN`")
        if not allowed:
            raise Refused(403, f"this token does not have the scope {self._scope!r}")


class BodyRoute(APIRoute):
    """A POST route whose function has one parameter, the body, and whose dependencies are `Permission`s.

    FastAPI documents it as it does its own routes. Other methods are handled by FastAPI.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of a request. It raises Refused for an invalid body."""
        if self.methods != {"POST"}:
            return super().get_route_handler()
        (parameter,) = inspect.signature(self.endpoint).parameters.values()
        body_type: type[BaseModel] = parameter.annotation
        checks = [one.dependency for one in self.dependencies if one.dependency is not None]
        call = self.endpoint if inspect.iscoroutinefunction(self.endpoint) else _in_thread(self.endpoint)

        async def answer(request: Request) -> Response:
            for check in checks:
                await check(request)
            _check_content_type(request)
            found = await call(_body(body_type, await request.body()))
            return Response(found.model_dump_json(exclude_unset=True), media_type="application/json")

        return answer


def first_error(error: Any, *within: str) -> str:
    """The first validation error of pydantic and its location, in one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, (*within, *first['loc'])))}: {first['msg']}"


def _body(body_type: type[BaseModel], text: bytes) -> BaseModel:
    try:
        return body_type.model_validate_json(text)
    except ValidationError as error:
        raise Refused(422, first_error(error, "body")) from error


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"the content type is {kind or 'missing'}: send JSON with `Content-Type: application/json`")


def _in_thread(function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    return lambda body: run_in_threadpool(function, body)
