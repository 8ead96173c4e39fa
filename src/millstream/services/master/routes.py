"""Calls of the API with a JSON body, without the injection of FastAPI, which costs more than the rest of such a call."""

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
    """A dependency that lets in who has a token with `scope`. Raises Refused."""

    def __init__(self, tokens: Tokens, scope: Scope) -> None:
        self.model = HTTPBearer(description=f"A token with the scope `{scope}`.")
        self.scheme_name = scope
        self._tokens = tokens
        self._scope: Scope = scope

    async def __call__(self, request: Request) -> None:
        """Let the request pass, or refuse it."""
        scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
        allowed = self._tokens.allows(token if scheme.lower() == "bearer" else None, self._scope)
        if allowed is None:
            raise Refused(401, "a valid token is missing: send the header `Authorization: Bearer TOKEN`")
        if not allowed:
            raise Refused(403, f"this token has not the scope {self._scope!r}")


class BodyRoute(APIRoute):
    """A route whose function has one parameter, the body, and whose dependencies are of `Permission`.

    It is documented as FastAPI does for its own. Other methods than POST go FastAPI's way.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request. Raises Refused for a body that is not what is wanted."""
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


def first_mistake(error: Any, *within: str) -> str:
    """What pydantic finds wrong first, and where, in one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, (*within, *first['loc'])))}: {first['msg']}"


def _body(body_type: type[BaseModel], text: bytes) -> BaseModel:
    try:
        return body_type.model_validate_json(text)
    except ValidationError as error:
        raise Refused(422, first_mistake(error, "body")) from error


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(
            415, f"the body is {kind or 'of no type that it names'}: send JSON, and `Content-Type: application/json`"
        )


def _in_thread(function: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    return lambda body: run_in_threadpool(function, body)
