"""`millstream dlq stop`: stops redrives at a rate that consoles do."""

from typing import Annotated

import typer

from millstream.admin.handler_names import find_handler
from millstream.cli.handler_names import HandlerName
from millstream.cli.options import Json, Url
from millstream.cli.recorded_action import named, recorded
from millstream.cli.terminal import print_json, print_line
from millstream.delivery.rate_override import format_rate
from millstream.delivery.redrive_reports import read_redrives, request_stop
from millstream.errors import MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client

RedriveId = Annotated[
    str | None,
    typer.Argument(help="One redrive: the id of its record in the audit; default: all.", metavar="[REDRIVE_ID]"),
]


def stop(handler: HandlerName, redrive: RedriveId = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Stop the redrives of a handler that consoles do at a rate. What they have not come to stays a dead letter."""
    with Client(url) as client:
        place = find_handler(client, handler, None)[0]
        found = [one for one in read_redrives(client, place.app, place.handler) if redrive in (None, one.id)]
        if redrive is not None and not found:
            raise MillstreamError(f"there is no redrive {redrive} of {handler} under way: see `millstream audit`")
        if found:
            with recorded(client, "dlq stop", handler=handler, redrive=named([one.id for one in found])) as action:
                request_stop(client, place.app, found)
                action.result = "requested"
    if as_json:
        print_json({"handler": handler, "redrives": [one.id for one in found]})
        return
    for one in found:
        rate = format_rate(one.rate)
        print_line(f"redrive {one.id} by {one.by} at {rate} stops within some seconds: {one.figures} so far")
    if not found:
        print_line(f"no console redrives dead letters of {handler} at a rate")
