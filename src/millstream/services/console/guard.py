"""Guard: identifies the viewer who sends a request, and checks that a form comes from the console itself."""

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.requests import Request

from millstream.errors import Unavailable
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.ended_sessions import EndedSessions
from millstream.services.console.login_limits import LoginLimits, TooManyGuesses, address_of
from millstream.services.console.rights import ConsoleTokens, Level, Viewer
from millstream.services.console.sessions import FORM_COOKIE, KNOWN_COOKIE, SESSION_COOKIE, Sessions, is_form_token
from millstream.services.web.errors import Refused
from millstream.services.web.headers import bearer_token
from millstream.services.web.token_reload import WatchedTokens

Authorize = Callable[[Request], Viewer | Level | Awaitable[Viewer | Level | None] | None]
"""Answers which level a request of the application around the console has; None: none at all."""

ANYONE = Viewer(name="anyone on this machine", level=Level.PAYLOADS)
"""The viewer where no token is required: they may read, and change nothing."""

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="millstream console"'}
"""What a response of status 401 says (RFC 9110, 11.6.1): programs send a bearer token."""

_OWN_SITE = ("same-origin", "none")


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Decides over requests. `authorize` comes first; without it and without tokens, all may read.

    `watched`: the token file.
    """

    tokens: ConsoleTokens
    sessions: Sessions
    ended: EndedSessions
    limits: LoginLimits = field(default_factory=LoginLimits)
    authorize: Authorize | None = None
    watched: WatchedTokens | None = None

    @property
    def has_login(self) -> bool:
        """Whether viewers log in with a token."""
        return self.authorize is None and bool(self.tokens)

    async def viewer_of(self, request: Request, *, is_live: bool = False) -> Viewer | None:
        """The viewer of a request; None if they have to log in. `is_live`: a page that is open renews its figures.

        While Redis does not answer, a session has the level `figures`: it may have ended, and may see that.
        Raises Refused for an unknown bearer token, and after too many of them, and RedisError.
        """
        if self.authorize is not None:
            answer = self.authorize(request)
            found = await answer if inspect.isawaitable(answer) else answer
            return Viewer(name="the application", level=Level(found)) if isinstance(found, int) else found
        self.reload_tokens()
        if not self.tokens:
            return ANYONE
        if (token := bearer_token(request.scope)) is not None:
            known = self.find_token(request, token)
            if known is None:
                raise Refused(401, "this token is unknown", CHALLENGE)
            return known[1]
        session = self.sessions.find(request.cookies.get(SESSION_COOKIE))
        if session is None:
            return None
        try:
            has_ended = self.ended.had if is_live else self.ended.has
            return None if await has_ended(session) else session.viewer
        except Unavailable:
            return replace(session.viewer, level=Level.FIGURES)

    def find_token(self, request: Request, token: str) -> tuple[bytes, Viewer] | None:
        """The hash of a token and its viewer; None if it is unknown. Raises Refused after too many unknown ones."""
        address = address_of(request)
        try:
            client = self.limits.admit(token, address, self.sessions.browsers_of(request.cookies.get(KNOWN_COOKIE)))
        except TooManyGuesses as error:
            wait_s = math.ceil(error.wait_s)
            text = f"too many unknown tokens were sent: try again in {wait_s} s"
            raise Refused(429, text, {"Retry-After": str(wait_s)}) from error
        known = self.tokens.viewer_of(token)
        if known is None:
            self.limits.count_unknown(token, client)
        else:
            self.limits.count_valid(address)
        return known

    async def end_session(self, request: Request) -> None:
        """End the session of a request, and with it all copies of its cookie. Raises RedisError if that fails."""
        if session := self.sessions.find(request.cookies.get(SESSION_COOKIE)):
            await self.ended.add(session)

    def reload_tokens(self) -> None:
        """Reload the token file if it has changed, at most once in a second."""
        if self.watched is not None:
            self.watched.check()

    def check_form(self, request: Request, found: str) -> None:
        """Refuse a form that another site has sent. `found`: the token that it carries. Raises Refused.

        A request with a bearer token is exempt: no browser sends one by itself.
        """
        site = request.headers.get("sec-fetch-site")
        if site is not None and site not in _OWN_SITE:
            raise Refused(403, "this form was sent by another site")
        if self.authorize is None and self.tokens and bearer_token(request.scope) is not None:
            return
        secret, session = request.cookies.get(FORM_COOKIE, ""), request.cookies.get(SESSION_COOKIE, "")
        if not is_form_token(found, secret, session):
            raise Refused(403, "this form is too old, or was not sent by this console: go back, reload, and try again")


def make_guard(
    clients: ClientPool, tokens: ConsoleTokens, token_file: Path | None, authorize: Authorize | None = None
) -> Guard:
    """The guard of a console with these tokens, which are reloaded when their file changes."""
    return Guard(
        tokens=tokens,
        sessions=Sessions(tokens),
        ended=EndedSessions(clients),
        authorize=authorize,
        watched=None if token_file is None else WatchedTokens(tokens.replace, token_file),
    )
