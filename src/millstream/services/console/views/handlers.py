"""The page of a handler: figures, streams, stuck keys; pause, resume and the rate."""

from collections import Counter

from starlette.responses import Response

from millstream.admin.handler_details import read_handler
from millstream.admin.total_readers import newest_totals
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.rate_override import format_rate, parse_rate
from millstream.delivery.run_times import read_run_times
from millstream.delivery.running_code import read_code
from millstream.redis_client.formats import pluralize
from millstream.services.console.pages import PageRequest
from millstream.services.console.views.history import history_of
from millstream.services.console.views.stuck import rows_of


def handler(page: PageRequest) -> Response:
    """Figures, streams and stuck keys of one handler."""
    name = page.wanted("name")
    places = page.places_of(name)
    found = read_handler(page.client, places, most_keys=100 if page.may("payloads") else 0)
    asked = places[0].app, places[0].handler
    totals = None if found.is_complete else newest_totals(page.client)
    pauses = {one.pause for one in found.reports if one.pause}
    return page.render(
        "handler.html",
        name=name,
        found=found,
        totals=totals,
        total=totals.handlers.get(name) if totals else None,
        stuck=rows_of(page, found.stuck.found),
        shown=history_of(page, name),
        codes=read_code(page.client, [asked])[asked],
        run_times=read_run_times(page.client, [asked])[asked],
        rates=sorted(Counter(one.rate_override.source for one in found.reports if one.rate_override).items()),
        format_rate=format_rate,
        pauses=[page.display.text(one.reason) if page.may("payloads") else f"paused by {one.by}" for one in pauses],
    )


def pause(page: PageRequest) -> Response:
    """Stop the handler from reading new messages."""
    return _set_paused(page, paused=True)


def resume(page: PageRequest) -> Response:
    """Resume the handler."""
    return _set_paused(page, paused=False)


def _set_paused(page: PageRequest, *, paused: bool) -> Response:
    name = page.wanted("name")
    places = page.places_of(name)
    with page.audit("pause" if paused else "resume", handler=name) as action:
        store = CommitStore(page.client, app=places[0].app, handler=places[0].handler)
        store.set_paused([one.stream for one in places], paused=paused)
        action.result = f"{'paused' if paused else 'resumed'} on {pluralize(len(places), 'stream')}"
    return page.redirect("/handler", name=name, done="paused" if paused else "resumed")


def rate(page: PageRequest) -> Response:
    """Set the rate of the handler."""
    return _set_rate(page, parse_rate(page.field("rate")))


def clear_rate(page: PageRequest) -> Response:
    """Go back to the rate in code."""
    return _set_rate(page, None)


def _set_rate(page: PageRequest, wanted: float | None) -> Response:
    name = page.wanted("name")
    places = page.places_of(name)
    about = {} if wanted is None else {"rate": format_rate(wanted)}
    with page.audit("rate clear" if wanted is None else "rate set", handler=name, **about) as action:
        store = CommitStore(page.client, app=places[0].app, handler=places[0].handler)
        store.set_rate([one.stream for one in places], wanted)
        action.result = f"{'cleared' if wanted is None else 'set'} on {pluralize(len(places), 'stream')}"
    return page.redirect("/handler", name=name, done="rate cleared" if wanted is None else "rate set")
