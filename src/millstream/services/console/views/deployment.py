"""Pages about the deployment: workers and leases, delayed messages, Redis, and what operators did."""

from collections.abc import Sequence
from contextlib import suppress
from shlex import quote

from starlette.responses import Response

from millstream.admin.attention import sentence_of
from millstream.admin.audit_log import AuditFilter, AuditLog
from millstream.admin.delayed_streams import find_delayed_streams
from millstream.admin.findings import merge_unchecked
from millstream.admin.lease_overview import read_service, read_services
from millstream.admin.reports import HandlerReport
from millstream.admin.worker_drains import SupervisedWorker, find_supervised, find_worker, request_drain
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.delivery.running_code import read_code
from millstream.errors import AccessDenied, MillstreamError
from millstream.model import EntryId
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import is_identifier, is_service
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.overview import overview_of

_MOST_SERVICES = 20
_PAGE = 100
_MOST_WORKERS = 500


def workers(page: PageRequest) -> Response:
    """The live workers of each handler, restarts, long runs, and who has leased which streams."""
    inspection = overview_of(page).diagnosis.inspection
    handlers = inspection.handlers if inspection else ()
    alive = {
        one.label: (one.engine, sorted({name for each in handlers if each.label == one.label for name in each.workers}))
        for one in handlers
    }
    codes = {
        f"{app}.{handler}": sorted({f"{one.source} (millstream {one.version})" for one in found})
        for (app, handler), found in read_code(page.client, {(one.app, one.handler) for one in handlers}).items()
    }
    supervised, is_partial = _supervised(page, handlers)
    asked = page.query.get("service")
    found = read_service(page.client, asked) if asked else None
    if asked and found is None:
        raise MillstreamError(f"unknown service {asked!r}: no stream was added to it")
    # a handler of another name is not millstream's, and shares no streams
    shared = [label for label in alive if is_service(label)][:_MOST_SERVICES]
    services = [found] if found else read_services(page.client, shared)
    return page.render(
        "workers.html",
        alive=alive,
        codes=codes,
        restarts=[page.display.text(one.describe(), "error") for one in inspection.restarts] if inspection else [],
        long_runs=[page.display.text(one.describe(page.now_ms)) for one in inspection.long_runs] if inspection else [],
        supervised=supervised,
        most_workers=_MOST_WORKERS if is_partial else None,
        services=services,
        asked=asked,
        most=_PAGE,
    )


def drain(page: PageRequest) -> Response:
    """Let a worker finish its running messages and end, once its name is typed."""
    found = find_worker(page.client, page.wanted("worker"), page.wanted("app"))
    fields = {"app": found.app, "worker": found.name}
    if found.drained_since_ms is not None:
        return page.redirect("/workers", done="repeated")
    if page.field("confirm") != found.name:
        return page.render(
            "confirm.html",
            question=f"Drain worker {found.name} of {found.app}",
            sentences=[
                *(["This is not its name."] if page.field("confirm") else []),
                "The worker takes nothing new, finishes its running messages, and releases the others.",
                "Then its process ends, and its supervisor does not restart it.",
                "A supervisor without a worker ends, too; what has started it may start it again.",
            ],
            path="/workers/drain",
            fields=fields,
            typed=f"the name {found.name}",
            command=f"millstream drain {found.name} --app {found.app}",
            back=page.url("/workers"),
        )
    with page.audit("drain", **fields) as action:
        request_drain(page.client, found)
        action.result = "requested"
    return page.redirect("/workers", done="drained")


def _supervised(page: PageRequest, handlers: Sequence[HandlerReport]) -> tuple[list[SupervisedWorker], bool]:
    """The workers under a supervisor, as far as the console may read their names; and whether there are more."""
    names = sorted({(one.app, name) for one in handlers for name in one.workers if is_identifier(name)})
    with suppress(AccessDenied):
        return find_supervised(page.client, names[:_MOST_WORKERS]), len(names) > _MOST_WORKERS
    return [], False


def delayed(page: PageRequest) -> Response:
    """The streams that have delayed messages; of one of them, the first messages."""
    name = page.name("stream")
    if name is None:
        found, is_partial = find_delayed_streams(page.client)
        return page.render("delayed.html", found=found, is_partial=is_partial)
    messages = DelayedMessages(page.client)
    first = messages.find(name, limit=_PAGE) if page.may("payloads") else []
    return page.render(
        "delayed_stream.html",
        name=name,
        count=messages.count(name),
        found=[(one, page.display.fields(one.pairs)) for one in first],
    )


def cancel(page: PageRequest) -> Response:
    """Cancel one delayed message, once that is confirmed."""
    name, message_id = page.wanted_name("stream"), page.wanted_name("id")
    fields = {"stream": escape(name), "id": escape(message_id)}
    if page.field("confirm") != "cancel":
        return page.render(
            "confirm.html",
            question=f"Cancel the delayed message {escape(message_id)} of {escape(name)}",
            sentences=["The message is deleted for good: it is never added to its stream."],
            path="/delayed/cancel",
            fields={**fields, "confirm": "cancel"},
            typed=None,
            command=f"millstream delayed cancel {quote(escape(name))} {quote(escape(message_id))}",
            back=page.url("/delayed", stream=escape(name)),
        )
    with page.audit("delayed cancel", **fields) as action:
        cancelled = DelayedMessages(page.client).cancel(name, [message_id])
        action.result = "cancelled" if cancelled else "was moved or cancelled before"
    return page.redirect("/delayed", stream=escape(name), done="cancelled" if cancelled else "gone")


def redis(page: PageRequest) -> Response:
    """All findings of `millstream doctor` on Redis and on the data."""
    found = overview_of(page).diagnosis
    order = ("problem", "warning", "ok")
    findings = sorted(merge_unchecked(found.findings), key=lambda one: order.index(one.severity))
    with_content = page.may("payloads")
    return page.render(
        "redis.html",
        found=found,
        findings=[(one, page.display.text(sentence_of(one, with_content=with_content))) for one in findings],
    )


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
