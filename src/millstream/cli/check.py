"""`millstream check`: runs an app's handlers on real entries and commits nothing."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from millstream.app import load_app
from millstream.cli.options import Json, Url, Yes
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_text
from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize
from millstream.redis_client.redaction import redact_text
from millstream.worker.dry_run import DryRun, dry_run

Target = Annotated[str, typer.Argument(help="The app: module:app or path/to/file.py:app", metavar="APP")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Check only this handler; repeatable.")]
Sample = Annotated[int, typer.Option(min=1, help="Maximum number of entries of each handler.")]
Newest = Annotated[bool, typer.Option("--newest", help="Take the newest entries, not the first uncommitted ones.")]

_UNCHECKED = (
    "not checked: what the handlers do outside Redis (it was done), time limits of plain functions, retries, and "
    "writing the outputs"
)


def check(
    target: Target,
    only: Only = None,
    sample: Sample = 100,
    newest: Newest = False,
    url: Url = DEFAULT_URL,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run the handlers of an app on real entries, and show what would become of them. Commits nothing.

    No entry is read through a group or acknowledged; no state, output or dead letter is written. But the handlers
    themselves run: what they write elsewhere, such as to a database or by mail, is written.

    Exits with 1 if a message would become a dead letter, other than by Reject.
    """
    app = load_app(target).only(only or ())
    if not app.handlers:
        raise ConfigError(f"app {app.name!r} has no handlers to check: stages run on Spark only")
    confirm(
        f"Run {', '.join(app.handlers)} on up to {pluralize(sample, 'entry', 'entries')} each? Nothing is committed, but "
        "what they do outside Redis is done.",
        yes=yes,
    )
    with Client(url) as client:
        found = [dry_run(client, one, sample=sample, newest=newest) for one in app.handlers.values()]
    if as_json:
        print_json({"handlers": [_row(one) for one in found]})
    else:
        _show(found)
    if any(one.failures for one in found):
        raise typer.Exit(1)


def _row(one: DryRun) -> dict[str, Any]:
    row = {**asdict(one), "failed": one.failed}
    for failure in row["failures"]:
        failure |= {name: redact_text(failure[name]) for name in ("error", "traceback")}
    return row


def _show(found: Sequence[DryRun]) -> None:
    for one in found:
        total = one.ok + one.rejected + one.failed
        if not total:
            print_line(f"{one.handler}: its streams have no entries")
            continue
        print_line(
            f"{one.handler}: {one.ok:,} ok with {pluralize(one.outputs, 'output')}, {one.rejected:,} rejected, "
            f"{one.failed:,} would become dead letters, of the {'first' if one.of == 'uncommitted' else 'newest'} "
            f"{total:,} {'uncommitted ' if one.of == 'uncommitted' else ''}entries"
        )
        for failure in sorted(one.failures, key=lambda failure: -failure.count):
            print_line(
                f"  {failure.count:,} {failure.cause}: {redact_text(failure.error)} "
                f"(first: {failure.id} of {escape(failure.stream)})"
            )
            if failure.traceback:
                print_text(redact_text(failure.traceback.rstrip()))
    print_message(_UNCHECKED)
