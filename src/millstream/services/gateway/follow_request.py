"""FollowRequest: parses a request: its streams, where to start, its token or ticket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.router import BEGINNING, END
from millstream.services.gateway.auth import MOST_STREAMS
from millstream.services.web.errors import Refused
from millstream.services.web.headers import bearer_token, header

if TYPE_CHECKING:
    from starlette.types import Scope

_PARAMETERS = ("after", "stream", "ticket", "lastEventId")
_NAMED_STARTS = {"latest": END, "$": END, "earliest": BEGINNING, "0": BEGINNING}


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowRequest:
    """A request to follow streams. `starts`: each stream, and the id to start after; `token`, `ticket`: as received."""

    starts: tuple[tuple[str, str], ...]
    token: str | None = field(repr=False)
    ticket: str | None = field(repr=False)

    @property
    def streams(self) -> list[str]:
        """The streams' names."""
        return [stream for stream, _ in self.starts]


def parse_follow_request(scope: "Scope", prefix: bytes) -> FollowRequest:
    """Parse a request to follow streams. Raises Refused.

    Its path is `prefix` and one stream, or `prefix` alone, with ?stream= up to 100 times.
    """
    query = _query(scope)
    path: bytes = scope["raw_path"]
    if "token" in query:
        raise Refused(400, "a URL must not contain a token, as URLs are logged; use a ticket (POST /tickets)")
    if unknown := [name for name in query if name not in _PARAMETERS]:
        raise Refused(400, f"unknown parameter {unknown[0]!r}; use {', '.join(_PARAMETERS)}")
    stream_parameters = query.get("stream", [])
    rest = path.removeprefix(prefix).removeprefix(b"/")
    streams = (
        [unquote(rest.decode("ascii"), errors="surrogateescape")] if rest else list(dict.fromkeys(stream_parameters))
    )
    if bool(rest) == bool(stream_parameters) or len(streams) > MOST_STREAMS:
        raise Refused(400, f"name one stream in the path, or 1 to {MOST_STREAMS} with ?stream=NAME")
    return FollowRequest(
        starts=_starts_of(scope, query, streams, "latest"),
        token=bearer_token(scope),
        ticket=query["ticket"][-1] if "ticket" in query else None,
    )


def parse_starts(scope: "Scope", streams: Sequence[str], default: str) -> tuple[tuple[str, str], ...]:
    """Return each stream and the id to start after, for a request whose streams the application names.

    `default`: where to start without an id in the request. Raises Refused.
    """
    return _starts_of(scope, _query(scope), streams, default)


def _starts_of(
    scope: "Scope", query: Mapping[str, Sequence[str]], streams: Sequence[str], default: str
) -> tuple[tuple[str, str], ...]:
    # The id that a browser sends when it reconnects is newer than the one its page wrote into the URL.
    # An EventSource polyfill cannot set the header, and sends it as a parameter.
    last_event_id = header(scope, b"last-event-id") or query.get("lastEventId", [""])[-1]
    after = last_event_id or (query.get("after") or [default])[-1]
    return tuple(zip(streams, _start_ids(after, len(streams)), strict=True))


def _query(scope: "Scope") -> dict[str, list[str]]:
    text = scope["query_string"].decode("ascii", "replace")
    try:
        return parse_qs(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=2 * MOST_STREAMS)
    except ValueError as error:
        raise Refused(400, f"the query cannot be parsed: {error}") from error


def _start_ids(after: str, count: int) -> list[str]:
    """One start id for each stream: as many as there are streams, or one for all of them."""
    parts = after.split(",")
    if len(parts) not in (1, count):
        raise Refused(400, f"give one start id, or {count} separated by commas, like the ids of events")
    return [_start_id(part) for part in parts] * (count if len(parts) == 1 else 1)


def _start_id(text: str) -> str:
    if (word := _NAMED_STARTS.get(text)) is not None:
        return word
    try:
        return str(EntryId.parse(text))
    except ConfigError as error:
        raise Refused(400, f"{error}; or use latest or earliest") from error
