"""Pages about the deployment: Redis, and what operators did."""

from starlette.responses import Response

from millstream.admin.audit_log import AuditFilter, AuditLog
from millstream.admin.findings import merge_unchecked
from millstream.model import EntryId
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.overview import overview_of, shown_sentence

_PAGE = 100


def redis(page: PageRequest) -> Response:
    """All findings of `millstream doctor` on Redis and on the data."""
    found = overview_of(page).diagnosis
    order = ("problem", "warning", "ok")
    findings = sorted(merge_unchecked(found.findings), key=lambda one: order.index(one.severity))
    return page.render("redis.html", found=found, findings=[(one, shown_sentence(page, one)) for one in findings])


def audit(page: PageRequest) -> Response:
    """The actions of operators through the console and by commands, the newest first: all, or those that are wanted."""
    before = page.query.get("before")
    wanted = AuditFilter(
        by=page.query.get("by", ""), action=page.query.get("action", ""), handler=page.query.get("handler", "")
    )
    start = str(EntryId.parse(before)) if before else "+"
    found, rest = AuditLog(page.client).read_page(count=_PAGE, before=start, wanted=wanted)
    return page.render(
        "audit.html",
        wanted=wanted,
        found=[
            (
                one,
                [(name, page.display.text(value, name)) for name, value in one.about.items()],
                page.display.text(one.outcome),
            )
            for one in found
        ],
        before=rest,
        is_partial=rest is not None and len(found) < _PAGE,
    )
