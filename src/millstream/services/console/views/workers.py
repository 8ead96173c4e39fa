"""The page of workers: what each has, its code, its drain; restarts, long runs, and leases of whole streams."""

from collections.abc import Sequence
from contextlib import suppress

from starlette.responses import Response

from millstream.admin.lease_overview import read_service, read_services
from millstream.admin.worker_drains import SupervisedWorker, find_supervised, find_worker, request_drain
from millstream.admin.worker_reports import WorkerReport, read_workers
from millstream.delivery.running_code import read_code
from millstream.errors import AccessDenied, MillstreamError
from millstream.redis_client.key_names import is_identifier, is_service
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.overview import overview_of

_MOST_SERVICES = 20
_PAGE = 100
_MOST_WORKERS = 500


def workers(page: PageRequest) -> Response:
    """The workers, the code of each handler, restarts, long runs, and who has leased which streams."""
    inspection = overview_of(page).diagnosis.inspection
    handlers = inspection.handlers if inspection else ()
    labels = {one.label: one.engine for one in handlers}
    codes = {
        f"{app}.{handler}": sorted({f"{one.source} (millstream {one.version})" for one in found})
        for (app, handler), found in read_code(page.client, {(one.app, one.handler) for one in handlers}).items()
    }
    asked = page.query.get("service")
    found = read_service(page.client, asked) if asked else None
    if asked and found is None:
        raise MillstreamError(f"unknown service {asked!r}: no stream was added to it")
    # a handler of another name is not millstream's, and shares no streams
    services = read_services(page.client, [label for label in labels if is_service(label)][:_MOST_SERVICES])
    reports = read_workers(page.client, handlers, services)
    shown = reports.workers[:_MOST_WORKERS]
    supervised = {(one.app, one.name): one for one in _supervised(page, shown)}
    return page.render(
        "workers.html",
        workers=[(one, _codes_of(one), supervised.get((one.app, one.name))) for one in shown],
        reports=reports,
        more=len(reports.workers) - len(shown),
        labels=labels,
        codes=codes,
        restarts=[page.display.text(one.describe(), "error") for one in inspection.restarts] if inspection else [],
        long_runs=[page.display.text(one.describe(page.now_ms)) for one in inspection.long_runs] if inspection else [],
        services=[found] if found else services,
        asked=asked,
        most_services=_MOST_SERVICES,
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


def _supervised(page: PageRequest, found: Sequence[WorkerReport]) -> list[SupervisedWorker]:
    """Those under a supervisor, as far as the console may read their names."""
    names = [(one.app, one.name) for one in found if one.is_alive and is_identifier(one.name)]
    with suppress(AccessDenied):
        return find_supervised(page.client, names)
    return []


def _codes_of(worker: WorkerReport) -> list[str]:
    """The code that a worker runs, as text; several while its handlers are in several files."""
    return sorted({f"{one.source} (millstream {one.version})" for one in worker.code})
