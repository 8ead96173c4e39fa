"""`millstream forget`: removes what a handler, a stage or a whole app has left in Redis."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from millstream.admin.forgetting import Forgetting, Remains
from millstream.admin.handler_names import split_name
from millstream.cli.options import DryRun, Json, Url, Yes
from millstream.cli.recorded_action import recorded
from millstream.cli.terminal import confirm, print_json, print_message, print_table
from millstream.errors import MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize

Name = Annotated[str, typer.Argument(help="The handler or stage, or all of the app.", metavar="APP[.HANDLER]")]
DeadLetters = Annotated[bool, typer.Option("--dead-letters", help="Remove its dead letters, too.")]


def forget(
    name: Name,
    dead_letters: DeadLetters = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Remove progress, state, queues and consumer groups of a handler for good; no stream of messages."""
    app, handler = split_name(name)
    with Client(url) as client:
        forgetting = Forgetting(client, app, handler, dead_letters=dead_letters)
        found = forgetting.find()
        if not any(one.keys or one.groups or (dead_letters and one.dead_letters) for one in found):
            raise MillstreamError(f"{name!r} has left nothing in this Redis" + _kept(found))
        if not as_json:
            _show(found)
            if not dead_letters and any(one.dead_letters for one in found):
                print_message("its dead letters stay; --dead-letters removes them as well")
        if not dry_run:
            confirm(f"Remove this for good? {name} would begin anew.", yes=yes)
            with recorded(client, "forget", **{"app" if handler is None else "handler": name}) as action:
                forgetting.remove()
                action.result = _result(found, dead_letters=dead_letters)
    if as_json:
        print_json({"dry_run": dry_run, "removed": [_row(one, dead_letters=dead_letters) for one in found]})
    elif not dry_run:
        print_message(f"{name} is forgotten")


def _kept(found: Sequence[Remains]) -> str:
    kept = sum(one.dead_letters for one in found)
    return f" but {pluralize(kept, 'dead letter')}; --dead-letters removes them" if kept else ""


def _result(found: Sequence[Remains], *, dead_letters: bool) -> str:
    keys = pluralize(sum(one.keys for one in found), "key")
    groups = pluralize(sum(one.groups for one in found), "group")
    letters = pluralize(sum(one.dead_letters for one in found), "dead letter")
    return f"{keys}, {groups} and {letters} removed" if dead_letters else f"{keys} and {groups} removed"


def _row(one: Remains, *, dead_letters: bool) -> dict[str, Any]:
    return {
        "app": one.app,
        "name": one.name,
        "streams": len(one.streams),
        "groups": one.groups,
        "pending": one.pending,
        "keys": one.keys,
        "states": one.states,
        "dead_letters": one.dead_letters if dead_letters else 0,
    }


def _show(found: Sequence[Remains]) -> None:
    print_table(
        ("~handler or stage", ">streams", ">groups", ">pending", ">keys in Redis", ">states", ">dead letters"),
        [
            (
                one.label,
                f"{len(one.streams):,}",
                f"{one.groups:,}",
                f"{one.pending:,}",
                f"{one.keys:,}",
                f"{one.states:,}",
                f"{one.dead_letters:,}",
            )
            for one in found
        ],
    )
