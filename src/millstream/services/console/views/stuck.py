"""What is stuck, of all handlers: stuck keys, and dead letters by handler; unpark several keys at once."""

from collections.abc import Sequence
from urllib.parse import parse_qs, urlencode

from starlette.responses import Response

from millstream.admin.stuck_keys import StuckKey, StuckOverview, read_stuck_overview
from millstream.errors import ConfigError
from millstream.redis_client.escaping import escape, unescape
from millstream.redis_client.key_names import HandlerKeys, from_wire
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.keys import unpark_key

_KEEP_MS = 2_000.0


def stuck(page: PageRequest) -> Response:
    """The stuck keys, and how many dead letters each handler has."""
    read: tuple[StuckOverview, float] = page.shared.get(
        "stuck",
        page.now_ms,
        lambda: (read_stuck_overview(page.client, page.stuck), page.now_ms),
        keep_ms=_KEEP_MS,
    )
    found, read_ms = read
    return page.render(
        "stuck.html",
        found=found,
        since_ms=None if found.age_ms is None else read_ms - found.age_ms,
        stuck=rows_of(page, found.keys.found),
    )


def unpark_selected(page: PageRequest) -> Response:
    """Unpark the keys that are ticked. Raises ConfigError if none is."""
    ticked = [parse_qs(one, errors="surrogateescape") for one in page.form.get("stuck", ())]
    if not ticked:
        raise ConfigError("no key is selected: go back and tick some")
    selected = []
    for one in ticked:  # before the first action, after which the names of handlers are read again
        name, stream, key = (one.get(part, [""])[0] for part in ("handler", "stream", "key"))
        selected.append((page.places_of(name, from_wire(unescape(stream)))[0], unescape(key)))
    is_done = [_unpark(page, keys, data) for keys, data in selected]
    return page.redirect("/stuck", done="unparked" if all(is_done) else "some-unparked" if any(is_done) else "none")


def _unpark(page: PageRequest, keys: HandlerKeys, data: bytes) -> bool:
    """Unpark one key; False if it was not parked, or its handler cannot unpark it now, which the audit says."""
    try:
        return unpark_key(page, keys, data)
    except ConfigError:
        return False


def rows_of(page: PageRequest, found: Sequence[StuckKey]) -> list[dict[str, object]]:
    """The rows of a table of stuck keys, as this viewer may see them."""
    return [
        {
            "one": one,
            "key": page.display.key(one.queue.key),
            "link": place and page.url("/key", **place),
            "packed": place and urlencode(place, errors="surrogateescape"),
            "why": page.display.text(one.why(page.display.value_of)),
            "error": page.display.text(one.last.error, "error"),
        }
        for one, place in ((one, _place_of(page, one)) for one in found)
    ]


def _place_of(page: PageRequest, one: StuckKey) -> dict[str, str] | None:
    """The names of a key in an address; None for one that is hidden, as its address would show it."""
    key = one.queue.key
    if key is None or not page.display.is_shown(key):
        return None
    return {"handler": one.keys.label, "stream": escape(one.keys.stream), "key": escape(key)}
