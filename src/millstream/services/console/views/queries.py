"""The page of Spark: its queries, one for each handler and stage that runs there, as far as Redis shows them."""

from starlette.responses import Response

from millstream.admin.consumption_summary import ReaderReport
from millstream.admin.liveness import read_epochs
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.overview import overview_of


def queries(page: PageRequest) -> Response:
    """The handlers and stages that run on Spark, or ran there last: since when, and how far they are."""
    found = overview_of(page)
    readers = {_pipeline(one): one for one in found.readers if _is_on_spark(one)}
    epochs = read_epochs(page.client, readers)
    return page.render(
        "queries.html", found=found, queries=[(one, epochs.get(pipeline)) for pipeline, one in readers.items()]
    )


def _is_on_spark(reader: ReaderReport) -> bool:
    return reader.kind == "stage" or (reader.kind == "handler" and any(one.startswith("spark") for one in reader.modes))


def _pipeline(reader: ReaderReport) -> tuple[str, str]:
    app, _, name = reader.name.partition(".")
    return app, name
