"""Login: a form that exchanges a token for a session, and the logout."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from millstream.services.console.guard import CHALLENGE, Guard
from millstream.services.console.rendering import render
from millstream.services.console.sessions import (
    FORM_COOKIE,
    KNOWN_COOKIE,
    SESSION_COOKIE,
    form_token,
    known_browser,
    new_form_secret,
)
from millstream.services.web.errors import Refused

MOST_FIELDS = 2_000
_MOST_BYTES = 65_536
_KNOWN_S = 90 * 86_400
_SAME_SITE: Literal["lax"] = "lax"
_FORM_TYPE = "application/x-www-form-urlencoded"


def root_of(request: Request) -> str:
    """The path under which the console is mounted."""
    return str(request.scope.get("root_path", ""))


async def form_of(request: Request) -> Mapping[str, Sequence[str]]:
    """All values of each field of a form. Raises Refused for what is no form, is too large, or has too many fields."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
        raise Refused(415, f"send a form ({_FORM_TYPE})")
    body = (await _body_of(request)).decode("ascii", "replace")
    try:
        return parse_qs(body, keep_blank_values=True, errors="surrogateescape", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise Refused(400, f"the form cannot be read: {error}") from error


async def _body_of(request: Request) -> bytes:
    """The body: an application around the console may not limit its size."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise Refused(413, f"this form is larger than {_MOST_BYTES:,} bytes")
    return bytes(body)


def token_of(form: Mapping[str, Sequence[str]]) -> str:
    """The token in a form, which proves that the console has sent the form."""
    return next(iter(form.get("form_token", ())), "")


class FormSecret:
    """The secret of a browser for its forms, and what they have to carry."""

    def __init__(self, request: Request) -> None:
        known = request.cookies.get(FORM_COOKIE)
        self._secret = known or new_form_secret()
        self._is_new = not known
        self.form_token = form_token(self._secret, request.cookies.get(SESSION_COOKIE, ""))

    def keep(self, request: Request, response: Response) -> None:
        """Set the cookie of a browser that has none."""
        if self._is_new:
            set_cookie(request, response, FORM_COOKIE, self._secret)


def set_cookie(request: Request, response: Response, name: str, value: str, max_age_s: int | None = None) -> None:
    """Set a cookie that no script can read, and that the browser sends with no request of another site but a link.

    With `Strict` a link from elsewhere would lead to the login form, and a new secret would invalidate the forms of all
    open pages. No GET changes anything, and a form of another site gets neither cookie.
    """
    # of several proxies each appends its own: the first is the one that the browser speaks to
    proxied = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    is_secure = "https" in (request.scope["scheme"], proxied)
    response.set_cookie(
        name,
        value,
        max_age=max_age_s,
        path=root_of(request) or "/",
        httponly=True,
        samesite=_SAME_SITE,
        secure=is_secure,
    )


def login_routes(guard: Guard) -> list[Route]:
    """The routes of the login form and of the logout."""

    def show(
        request: Request, status: int = 200, problem: str = "", headers: Mapping[str, str] | None = None
    ) -> Response:
        secret = FormSecret(request)
        html = render("login.html", root=root_of(request), form_token=secret.form_token, problem=problem)
        response = HTMLResponse(html, status, headers)
        secret.keep(request, response)
        return response

    async def login(request: Request) -> Response:
        form = await form_of(request)
        guard.check_form(request, token_of(form))
        guard.reload_tokens()
        try:
            known = guard.find_token(request, next(iter(form.get("token", ())), "").strip())
        except Refused as error:
            return show(request, error.status, f"{error}.", error.headers)
        if known is None:
            return show(request, 401, "This token is unknown.", CHALLENGE)
        response = RedirectResponse(f"{root_of(request)}/", 303)
        session = guard.sessions.issue(known[0])
        set_cookie(request, response, SESSION_COOKIE, session, int(guard.sessions.session_s))
        set_cookie(request, response, KNOWN_COOKIE, known_browser(known[0]), _KNOWN_S)
        return response

    async def logout(request: Request) -> Response:
        guard.check_form(request, token_of(await form_of(request)))
        await guard.end_session(request)
        response = RedirectResponse(f"{root_of(request)}/login", 303)
        response.delete_cookie(SESSION_COOKIE, path=root_of(request) or "/", httponly=True, samesite=_SAME_SITE)
        return response

    async def form(request: Request) -> Response:
        return show(request)

    routes: list[tuple[str, Any, str]] = [
        ("/login", form, "GET"),
        ("/login", login, "POST"),
        ("/logout", logout, "POST"),
    ]
    return [Route(path, endpoint, methods=[method]) for path, endpoint, method in routes]
