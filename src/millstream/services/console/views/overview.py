"""Overview: what needs attention, and a table of all readers."""

from starlette.responses import Response

from millstream.admin.attention import QUOTING_ERRORS, Overview, read_overview, sentence_of
from millstream.admin.findings import Finding
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.history import history_of

_KEEP_MS = 2_000.0
_PAGES = {
    "overdue": "/delayed",
    "growth": "/streams",
    "restarts": "/workers",
    "long-runs": "/workers",
    "stages": "/queries",
    "failed-queries": "/queries",
}


def overview(page: PageRequest) -> Response:
    """The first page."""
    found = overview_of(page)
    attention = [(one, shown_sentence(page, one), _link_of(page, one)) for one in found.attention]
    return page.render("overview.html", found=found, attention=attention, shown=history_of(page))


def overview_of(page: PageRequest) -> Overview:
    """The overview, at most two seconds old: more viewers read no more from Redis.

    A page that renews its figures reads groups for which nothing waits less often (`TrackedClient`).
    """

    def read() -> Overview:
        with page.clients.tracked_client() as client:
            client.begin_collection(anew=not page.is_renewal)
            return read_overview(client)

    name = "renewed overview" if page.is_renewal else "overview"
    found: Overview = page.shared.get(name, page.now_ms, read, keep_ms=_KEEP_MS)
    return found


def shown_sentence(page: PageRequest, found: Finding) -> str:
    """A finding as this viewer may read it: without what it quotes if errors are hidden."""
    whole = sentence_of(found, with_content=page.may("payloads"))
    shown = page.display.text(whole)
    if found.check in QUOTING_ERRORS and page.display.text(whole, "error") != shown:
        return page.display.text(sentence_of(found, with_content=False))
    return shown


def _link_of(page: PageRequest, found: Finding) -> str | None:
    """The page that shows more of a finding."""
    if found.check == "dead-letters" and found.handler is not None and page.may("payloads"):
        return page.url("/letters", handler=found.handler)
    if found.handler is not None and found.check not in _PAGES:
        return page.url("/handler", name=found.handler)
    return page.url(_PAGES.get(found.check, "/redis"))
