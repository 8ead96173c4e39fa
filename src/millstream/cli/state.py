"""`millstream state`: shows, lists and resets the state of keys."""

import json
from itertools import islice
from typing import Annotated, Any

import typer

from millstream.admin.inspection import decode_state, list_states, read_state, reset_states
from millstream.cli.options import DEFAULT_URL, Json, Url, Yes, command_group
from millstream.cli.terminal import (
    confirm,
    format_size,
    pluralize,
    print_json,
    print_line,
    print_message,
    print_table,
    print_text,
    truncate,
)
from millstream.errors import DecodeError, MillstreamError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_value, unescape
from millstream.redis_client.key_names import HandlerKeys

App = Annotated[str, typer.Argument(help="The app's name.")]
Handler = Annotated[str, typer.Argument(help="The handler's name.")]
Stream = Annotated[str, typer.Argument(help="The stream; each has its own state.")]

state = command_group("Show, list and reset the state of keys. Write keys as in `list`.")

_SHOWN_CHARS = 100


@state.command()
def show(
    app: App,
    handler: Handler,
    stream: Stream,
    key: Annotated[str, typer.Argument(help="The key.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show the state of one key."""
    with Client(url) as client:
        found = read_state(client, HandlerKeys(app, handler, stream), unescape(key))
    if found is None:
        raise MillstreamError(f"{app}.{handler} has no state for {key} on {stream}; see: millstream state list")
    if as_json:
        print_json(json_value(found))
    else:
        print_text(json.dumps(json_value(found), indent=2))


@state.command("list")
def list_(
    app: App,
    handler: Handler,
    stream: Stream,
    match: Annotated[str, typer.Option(help="Only keys that match this pattern, like N1*.")] = "*",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of keys to list.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object per key, on a line of its own.")] = False,
) -> None:
    """List keys with their state, in no order."""
    with Client(url) as client:
        found = dict(islice(list_states(client, HandlerKeys(app, handler, stream), match), limit + 1))
    shown = sorted(found.items())[:limit]
    if as_json:
        for key, blob in shown:
            print_json({"key": json_value(key), **_state_json(key, blob)})
    else:
        rows = [
            (escape(key), format_size(len(blob)), truncate(json.dumps(_state_json(key, blob)["state"]), _SHOWN_CHARS))
            for key, blob in shown
        ]
        print_table(("key", ">size", "state"), rows)
    if len(found) > limit:
        print_message("there are more keys; use --limit or --match to show them")


@state.command()
def reset(
    app: App,
    handler: Handler,
    stream: Stream,
    keys: Annotated[list[str], typer.Argument(help="The keys.", metavar="KEY...")],
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Delete the state of keys: the next message of each starts without one.

    A live run sees the change from its next batch on. If its current batch processes the key, it writes the old state
    back: stop the run to be sure.
    """
    wanted = [unescape(key) for key in keys]
    print_message(
        "a live run sees this from its next batch on, and may write back the state of a key in its current batch"
    )
    confirm(f"Delete the state of {pluralize(len(wanted), 'key')} of {app}.{handler} on {stream}?", yes=yes)
    with Client(url) as client:
        removed = reset_states(client, HandlerKeys(app, handler, stream), wanted)
    if as_json:
        print_json({"keys": len(wanted), "reset": removed})
    else:
        without = len(wanted) - removed
        print_line(f"{pluralize(removed, 'key')} reset" + (f", {without:,} had no state" if without else ""))


def _state_json(key: bytes, blob: bytes) -> dict[str, Any]:
    try:
        return {"state": json_value(decode_state(key, blob))}
    except DecodeError:
        return {"state": None, "damaged": blob.hex()}
