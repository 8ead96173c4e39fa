"""Redrives of dead letters at a rate: begin one, show those that are under way, stop one."""

from collections.abc import Mapping, Sequence

from starlette.responses import Response

from millstream.delivery.dead_letter_queue import DeadLetterRef
from millstream.delivery.redrive_reports import RedriveReport, read_redrives, read_stops, request_stop
from millstream.errors import MillstreamError
from millstream.services.console.pages import PageRequest


def start(page: PageRequest, refs: Sequence[DeadLetterRef], *, rate: float, about: Mapping[str, str]) -> Response:
    """Begin a redrive of these dead letters, which goes on when this is answered. Raises Refused and RedisError."""
    page.shared.clear()
    page.redrives.start(page.client, refs, rate=rate, by=page.viewer.name, about=about)
    return page.redirect("/letters", handler=page.wanted("handler"), done="redrive begun")


def under_way(page: PageRequest, app: str, handler: str) -> Sequence[tuple[RedriveReport, bool]]:
    """The redrives of a handler that any console does, and whether the stop of each was requested."""
    found = read_redrives(page.client, app, handler)
    return list(zip(found, read_stops(page.client, app, found), strict=True))


def stop(page: PageRequest) -> Response:
    """Request that a redrive stops, whichever console does it."""
    name, wanted = page.wanted("handler"), page.wanted("id")
    place = page.places_of(name)[0]
    found = [one for one in read_redrives(page.client, place.app, place.handler) if one.id == wanted]
    if not found:
        raise MillstreamError("this redrive has ended: see the dead letters and the audit")
    with page.audit("dlq stop", handler=name, redrive=wanted) as action:
        request_stop(page.client, place.app, found)
        action.result = "requested"
    return page.redirect("/letters", handler=name, done="stop requested")
