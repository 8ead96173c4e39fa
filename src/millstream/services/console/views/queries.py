"""The page of Spark: its queries, one for each handler and stage that runs there, as far as Redis shows them."""

from urllib.parse import urlsplit

from starlette.responses import Response

from millstream.admin.consumption_summary import ReaderReport
from millstream.admin.liveness import read_epochs
from millstream.delivery.query_progress import QueryProgress, read_progress
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.overview import overview_of


def queries(page: PageRequest) -> Response:
    """The handlers and stages that run on Spark, or ran there last: since when, and how far they are."""
    found = overview_of(page)
    readers = {_query(one): one for one in found.readers if _is_on_spark(one)}
    epochs = read_epochs(page.client, readers)
    progress = read_progress(page.client, readers)
    batches = [(one, progress[query]) for query, one in readers.items() if query in progress]
    return page.render(
        "queries.html",
        found=found,
        queries=[(one, epochs.get(query)) for query, one in readers.items()],
        batches=[(one, batch, _failure_of(page, batch), _ui_of(batch)) for one, batch in batches],
    )


def _failure_of(page: PageRequest, batch: QueryProgress) -> str:
    """Why the query failed last; the number of failures alone where the viewer may not read messages."""
    shown = page.display.text(batch.last_failure, "error") if page.may("payloads") else "failed"
    return shown if batch.last_failure else ""


def _ui_of(batch: QueryProgress) -> str | None:
    """The address of Spark's page, if it is one: another program may have written it."""
    return batch.ui if batch.ui and urlsplit(batch.ui).scheme in ("http", "https") else None


def _is_on_spark(reader: ReaderReport) -> bool:
    return reader.kind == "stage" or (reader.kind == "handler" and any(one.startswith("spark") for one in reader.modes))


def _query(reader: ReaderReport) -> tuple[str, str]:
    app, _, name = reader.name.partition(".")
    return app, name
