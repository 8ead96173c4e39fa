"""What a request asks for: which streams, from where on, and by which right."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.router import BEGINNING, END
from millstream.services.gateway.auth import MOST_STREAMS
from millstream.services.web.errors import Refused
from millstream.services.web.headers import header

if TYPE_CHECKING:
    from starlette.types import Scope

_PARAMETERS = ("after", "stream", "ticket", "lastEventId")
_WORDS = {"latest": END, "$": END, "earliest": BEGINNING, "0": BEGINNING}


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowRequest:
    """A request to follow streams. `places`: each stream, and after which id; `token`, `ticket`: as they were sent."""

    places: tuple[tuple[str, str], ...]
    token: str | None = field(repr=False)
    ticket: str | None = field(repr=False)

    @property
    def streams(self) -> list[str]:
        """The streams' names."""
        return [stream for stream, _ in self.places]


def parse_follow_request(scope: "Scope", prefix: bytes) -> FollowRequest:
    """Read a request whose path is `prefix` and a stream, or `prefix` alone, with ?stream=, up to 100 times. Raises Refused."""
    query = _query(scope)
    path: bytes = scope["raw_path"]
    if "token" in query:
        raise Refused(400, "a token must not stand in a URL, which is logged and kept: use a ticket (POST /tickets)")
    if unknown := [name for name in query if name not in _PARAMETERS]:
        raise Refused(400, f"there is no parameter {unknown[0]!r}: use {', '.join(_PARAMETERS)}")
    named = query.get("stream", [])
    rest = path.removeprefix(prefix).removeprefix(b"/")
    streams = [unquote(rest.decode("ascii"), errors="surrogateescape")] if rest else list(dict.fromkeys(named))
    if bool(rest) == bool(named) or len(streams) > MOST_STREAMS:
        raise Refused(400, f"name one stream in the path, or 1 to {MOST_STREAMS} as ?stream=NAME")
    # What a browser sends when it comes back is newer than what its page wrote into the URL.
    # Where a browser cannot set the header, those who do its work say it as a parameter.
    came_back = header(scope, b"last-event-id") or query.get("lastEventId", [""])[-1]
    after = came_back or (query.get("after") or ["latest"])[-1]
    return FollowRequest(
        places=tuple(zip(streams, _positions(after, len(streams)), strict=True)),
        token=bearer(scope),
        ticket=query["ticket"][-1] if "ticket" in query else None,
    )


def bearer(scope: "Scope") -> str | None:
    """The token in the header, if there is one."""
    kind, _, token = (header(scope, b"authorization") or "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def _query(scope: "Scope") -> dict[str, list[str]]:
    text = scope["query_string"].decode("ascii", "replace")
    try:
        return parse_qs(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=2 * MOST_STREAMS)
    except ValueError as error:
        raise Refused(400, f"the query cannot be read: {error}") from error


def _positions(after: str, count: int) -> list[str]:
    """One place for each stream: as many as there are streams, or one for all of them."""
    parts = after.split(",")
    if len(parts) not in (1, count):
        raise Refused(400, f"give one place to begin at, or {count}, with commas: the ids of events are of this kind")
    return [_place(part) for part in parts] * (count if len(parts) == 1 else 1)


def _place(text: str) -> str:
    if (word := _WORDS.get(text)) is not None:
        return word
    try:
        return str(EntryId.parse(text))
    except ConfigError as error:
        raise Refused(400, f"{error}; or latest, or earliest") from error
