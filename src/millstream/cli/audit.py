"""`millstream audit`: lists what operators have changed, in the console and by commands."""

from dataclasses import asdict
from typing import Annotated

import typer

from millstream.admin.audit_log import AuditFilter, AuditLog, AuditRecord
from millstream.admin.time_inputs import parse_time_ms
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_message, print_table
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_time

Limit = Annotated[int, typer.Option("--limit", min=1, help="Maximum number of actions.")]
Since = Annotated[
    str | None, typer.Option("--since", help="Only those that began since: 15m (ago), 2h, 3d, or an ISO 8601 time.")
]
By = Annotated[str, typer.Option("--by", help="Only those of operators whose names begin so.", metavar="NAME")]
Action = Annotated[str, typer.Option("--action", help="Only those whose names begin so: key, dlq redrive.")]
Handler = Annotated[str, typer.Option("--handler", help="Only those about this handler.", metavar="APP.HANDLER")]


def audit(
    limit: Limit = 100,
    since: Since = None,
    by: By = "",
    action: Action = "",
    handler: Handler = "",
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List the actions of operators, in the console and by commands, the newest first."""
    since_ms = parse_time_ms(since) if since else 0
    wanted = AuditFilter(by=by, action=action, handler=handler)
    with Client(url) as client:
        found = AuditLog(client).read(count=limit + 1, since_ms=since_ms, wanted=wanted)
    shown = found[:limit]
    if as_json:
        for one in shown:
            print_json(asdict(one))
    elif shown:
        print_table(("when", "~by", "action", "+about", "+result"), [_row(one) for one in shown])
    else:
        what = "such actions" if by or action or handler else "recorded actions"
        print_message(f"there are no {what}" + (" since then" if since else ""))
    if len(found) > limit:
        print_message("there are more: --limit shows them")


def _row(one: AuditRecord) -> tuple[str, ...]:
    about = ", ".join(f"{name} {value}" for name, value in one.about.items())
    return format_time(one.at_ms) or "-", one.by, one.action, about, one.outcome
