"""Pages: the request that a view gets, and the responses that it can return."""

import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlencode

from starlette.responses import HTMLResponse, RedirectResponse, Response

from millstream.admin.audit_log import AuditLog, RunningAction
from millstream.admin.handler_names import find_handler
from millstream.admin.inspection import find_handlers
from millstream.admin.stuck_places import StuckScan
from millstream.errors import ConfigError, MillstreamError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import unescape
from millstream.redis_client.key_names import HandlerKeys, from_wire
from millstream.services.console.client_pool import ClientPool
from millstream.services.console.display import Display
from millstream.services.console.handler_rates import HandlerRates
from millstream.services.console.redrive_threads import RedriveThreads
from millstream.services.console.rendering import render
from millstream.services.console.rights import Level, Viewer
from millstream.services.console.sessions import address_signature
from millstream.services.console.stream_names import StreamNames
from millstream.services.console.stream_ranking import StreamRanking
from millstream.services.console.stream_rates import StreamRates

REFRESH_S = (5, 15, 60)
"""The intervals, in seconds, at which a page may reload itself."""


_SEARCHED = frozenset(("before", "by", "action", "handler"))
"""Parameters of the audit with which one read may look through thousands of records."""

_MOST_SHARED = 50
_HANDLERS_MS = 10_000.0
"""How long the names of handlers are kept, in milliseconds."""


class Shared:
    """Values that all requests of a console share, so that more viewers read no more from Redis."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Any]] = {}
        self._reading: dict[str, threading.Lock] = {}

    def get(self, name: str, now_ms: float, read: Callable[[], Any], *, keep_ms: float) -> Any:
        """The value of `read`, or what it was less than `keep_ms` milliseconds ago. `now_ms`: Unix milliseconds."""
        if len(self._reading) >= _MOST_SHARED:
            self._known.clear()
            self._reading.clear()
        with self._reading.setdefault(name, threading.Lock()):  # one request reads, and the others wait for it
            known = self._known.get(name)
            if known is None or not 0 <= now_ms - known[0] < keep_ms:
                known = self._known[name] = (now_ms, read())
            return known[1]

    def clear(self) -> None:
        """Forget all values: an action has changed something."""
        self._known.clear()


@dataclass(frozen=True, kw_only=True)
class PageRequest:
    """A request of a viewer who may have its page.

    * `root`: path under which the console is mounted, "" for none; `path`: the rest
    * `query`: the first value of each parameter; `form`: all values of each field of a form
    * `form_token`: the token that each form of the page has to carry
    * `has_login`: whether the viewer can log out
    * `now_ms`: Unix milliseconds
    * `live_ms`: how often the page renews its figures while it is open, in milliseconds; None for never;
      `is_renewal`: that is what this request does
    * `clients`: the clients of the console, for what is read after the view has answered
    * `names`: the names of all streams; `ranking`: which of them have most; `redrives`: the redrives at a rate of this
      console
    * `rates`, `handler_rates`: how many entries a second those streams get, and messages those handlers commit, that
      pages have shown; `stuck`: the search for what is stuck
    """

    client: Client
    clients: ClientPool
    viewer: Viewer
    display: Display
    shared: Shared
    names: StreamNames
    ranking: StreamRanking
    redrives: RedriveThreads
    rates: StreamRates
    handler_rates: HandlerRates
    stuck: StuckScan
    root: str
    path: str
    query: Mapping[str, str]
    form: Mapping[str, Sequence[str]] = field(default_factory=dict)
    form_token: str
    has_login: bool
    now_ms: float
    live_ms: float | None = None
    is_renewal: bool = False

    def wanted(self, name: str) -> str:
        """A parameter, or a field of the form, that the page needs. Raises ConfigError if it is missing."""
        found = self.query.get(name) or self.field(name)
        if not found:
            raise ConfigError(f"the address lacks the parameter {name!r}: follow a link of the console")
        return found

    def name(self, parameter: str) -> str | None:
        """A name or text from Redis, which addresses and forms hold as `escape` writes it; None if it is missing.

        Raises ConfigError for an invalid escape.
        """
        found = self.query.get(parameter) or self.field(parameter)
        return from_wire(unescape(found)) if found else None

    def wanted_name(self, parameter: str) -> str:
        """`name` of a parameter that the page needs. Raises ConfigError if it is missing."""
        return from_wire(unescape(self.wanted(parameter)))

    def wanted_key(self) -> bytes:
        """The key that the page needs, which may be empty. Raises ConfigError if it is missing, or its escapes are wrong."""
        if "key" in self.query:
            return unescape(self.query["key"])
        return unescape(self.field("key") if "key" in self.form else self.wanted("key"))

    def known_handlers(self) -> Sequence[HandlerKeys]:
        """All handlers on their streams, as known within ten seconds. Raises RedisError."""
        found: Sequence[HandlerKeys] = self.shared.get(
            "handlers", self.now_ms, lambda: find_handlers(self.client), keep_ms=_HANDLERS_MS
        )
        return found

    def places_of(self, handler: str, stream: str | None = None) -> list[HandlerKeys]:
        """The handler on each of its streams, or on `stream`, as known within ten seconds, or else as of now.

        Raises ConfigError if the name is none, MillstreamError if it has not run there, and RedisError.
        """
        try:
            return find_handler(self.client, handler, stream, known=self.known_handlers())
        except MillstreamError:
            return find_handler(self.client, handler, stream)

    def field(self, name: str) -> str:
        """The first value of a field of the form; "" without one."""
        return next(iter(self.form.get(name, ())), "")

    def may(self, word: str) -> bool:
        """Whether the viewer has the level with this word."""
        return self.viewer.may(Level[word.upper()])

    def url(self, path: str, /, **parameters: str | None) -> str:
        """The address of a page of this console; parameters that are None are left out. Names are written by `escape`."""
        given = {name: one for name, one in parameters.items() if one is not None}
        query = urlencode(given, errors="surrogateescape")
        return f"{self.root}{path}{'?' if query else ''}{query}"

    def reloading(self, seconds: int) -> str:
        """The address of this page, reloading itself; never, for 0 seconds."""
        rest = {name: one for name, one in self.query.items() if name != "refresh"}
        return self.url(self.path, **rest, refresh=str(seconds) if seconds else None)

    @property
    def refresh_s(self) -> int | None:
        """After how many seconds the page reloads itself; None for never."""
        asked = self.query.get("refresh", "")
        return int(asked) if asked in map(str, REFRESH_S) else None

    @property
    def renew_ms(self) -> float | None:
        """How often the open page renews its figures, in milliseconds; None for never, as for an older part of the audit."""
        is_search = self.path == "/audit" and not _SEARCHED.isdisjoint(self.query)
        return None if is_search or self.refresh_s is not None else self.live_ms

    def audit(self, action: str, **about: str) -> AbstractContextManager[RunningAction]:
        """Record an action while it runs (AuditLog.action)."""
        self.shared.clear()
        return AuditLog(self.client).action(by=self.viewer.name, action=action, about=about)

    def render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """A page made of a template; `status`: that of HTTP."""
        return HTMLResponse(render(template, page=self, intervals_s=REFRESH_S, **values), status)

    def redirect(self, path: str, /, **parameters: str | None) -> Response:
        """Go to another page after an action, so that a reload does not repeat it. It shows `done`, which is signed."""
        signed = self._signature(path, parameters) if parameters.get("done") else None
        return RedirectResponse(self.url(path, **parameters, signature=signed), 303)

    @property
    def done(self) -> str | None:
        """What `redirect` said was done, if it led this browser here: a link from elsewhere says nothing."""
        found = self.query.get("signature", "").encode("utf-8", "surrogateescape")
        is_signed = hmac.compare_digest(found, self._signature(self.path, self.query).encode())
        return self.query.get("done") if is_signed else None

    def _signature(self, path: str, parameters: Mapping[str, str | None]) -> str:
        """The signature of an address for this browser. Whether it reloads itself does not matter."""
        told = {name: one for name, one in sorted(parameters.items()) if one and name not in ("refresh", "signature")}
        return address_signature(self.form_token, self.url(path, **told))


@dataclass(frozen=True, kw_only=True)
class Page:
    """A route of the console: the level that it takes, and the view that answers it, in a thread.

    `is_live`: the page renews its figures while it is open.
    """

    path: str
    method: Literal["GET", "POST"] = "GET"
    level: Level
    view: Callable[[PageRequest], Response]
    is_live: bool = False
