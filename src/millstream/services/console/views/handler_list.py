"""The page of all handlers: what each does now, and what waits for it."""

from collections.abc import Sequence
from contextlib import suppress

from starlette.responses import Response

from millstream.admin.reports import HandlerReport
from millstream.delivery.run_times import read_run_times, summarize_runs
from millstream.errors import ConfigError
from millstream.redis_client.key_names import HandlerKeys
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.overview import overview_of

_MOST_HANDLERS = 500


def handlers(page: PageRequest) -> Response:
    """The handlers by name, with their figures over all their streams."""
    found = overview_of(page)
    readers = [one for one in found.readers if one.kind == "handler"]
    shown = readers[:_MOST_HANDLERS]
    labels = {one.name for one in shown}
    inspection = found.diagnosis.inspection
    places = _places([one for one in inspection.handlers if one.label in labels] if inspection else [])
    rates = page.handler_rates.update(page.client, places)
    runs = read_run_times(page.client, {(one.app, one.handler) for one in places})
    summaries = {f"{app}.{handler}": summarize_runs(some) for (app, handler), some in runs.items()}
    return page.render(
        "handlers.html",
        found=found,
        handlers=[(one, rates.get(one.name), summaries.get(one.name, summarize_runs([]))) for one in shown],
        has_rates=all(rates.get(one.name) is not None for one in shown),
        more=len(readers) - len(shown),
    )


def _places(reports: Sequence[HandlerReport]) -> list[HandlerKeys]:
    found = []
    for one in reports:
        with suppress(ConfigError):  # no handler can read this stream
            found.append(HandlerKeys(one.app, one.handler, one.stream))
    return found
