"""The page of all handlers: what each does now, and what waits for it."""

from collections.abc import Collection
from contextlib import suppress

from starlette.responses import Response

from millstream.admin.attention import Overview
from millstream.admin.figure_history import STEP_MS, FigureHistory, Sample
from millstream.admin.figure_points import points_of
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
    names = [one.name.partition(".") for one in shown]
    rates = _rates_on_all(page, found.totals) if found.totals else _rates_of(page, found, {one.name for one in shown})
    runs = read_run_times(page.client, {(app, handler) for app, _, handler in names})
    summaries = {f"{app}.{handler}": summarize_runs(some) for (app, handler), some in runs.items()}
    return page.render(
        "handlers.html",
        found=found,
        handlers=[(one, rates.get(one.name), summaries.get(one.name, summarize_runs([]))) for one in shown],
        has_rates=all(rates.get(one.name) is not None for one in shown),
        more=len(readers) - len(shown),
    )


def _rates_of(page: PageRequest, found: Overview, labels: Collection[str]) -> dict[str, float | None]:
    """Messages a second that each of these handlers has committed since the console read them before."""
    inspection = found.diagnosis.inspection
    places: list[HandlerKeys] = []
    for one in inspection.handlers if inspection else ():
        if one.label in labels:
            with suppress(ConfigError):  # no handler can read this stream
                places.append(HandlerKeys(one.app, one.handler, one.stream))
    return page.handler_rates.update(page.client, places)


def _rates_on_all(page: PageRequest, totals: Sample) -> dict[str, float | None]:
    """Messages a second that each handler has committed on all its streams between the last two samples."""
    start_ms = totals.at_ms - 2 * totals.step_ms
    samples = FigureHistory(page.client).read(start_ms)
    rates: dict[str, float | None] = {}
    for label in totals.handlers:
        found = points_of(samples, label, start_ms=start_ms, end_ms=totals.at_ms, bucket_ms=STEP_MS)
        rates[label] = found.newest.done if found.newest else None
    return rates
