"""`millstream state`: shows, lists and resets the state of keys."""

import json
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

import typer

from millstream.admin.handler_names import handler_on
from millstream.admin.inspection import (
    count_states,
    decode_state,
    list_states,
    read_state,
    reset_states,
    state_expiries,
)
from millstream.cli.handler_names import HandlerName
from millstream.cli.options import DryRun, Json, JsonLines, Url, Yes, command_group
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table, print_text, truncate
from millstream.errors import DecodeError, MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_value, unescape
from millstream.redis_client.formats import format_size, format_time, pluralize

Stream = Annotated[
    str | None,
    typer.Option("--stream", help="The stream; each has its own state. Default: the only one.", metavar="NAME"),
]

state = command_group("Show, list and reset the state of keys. Write keys as in `list`.")

_SHOWN_CHARS = 100


@state.command()
def show(
    handler: HandlerName,
    key: Annotated[str, typer.Argument(help="The key.", metavar="KEY")],
    stream: Stream = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show the state of one key."""
    with Client(url) as client:
        keys = handler_on(client, handler, stream)
        found = read_state(client, keys, unescape(key))
        (expires_ms,) = state_expiries(client, keys, [unescape(key)])
    if found is None:
        raise MillstreamError(
            f"{handler} has no state for {key} on {keys.stream}; see: millstream state list {handler}"
        )
    if as_json:
        print_json(json_value(found))
    else:
        print_text(json.dumps(json_value(found), indent=2))
    if expires_ms is not None:
        print_message(f"the state expires at {format_time(expires_ms)} unless a message changes it")


@state.command("list")
def list_(
    handler: HandlerName,
    stream: Stream = None,
    match: Annotated[str, typer.Option(help="Only keys that match this pattern, like N1*.")] = "*",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of keys to list.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List keys with their state, in no order."""
    with Client(url) as client:
        keys = handler_on(client, handler, stream)
        found = dict(islice(list_states(client, keys, match), limit + 1))
        shown = sorted(found.items())[:limit]
        expiries = state_expiries(client, keys, [key for key, _ in shown])
    if as_json:
        for (key, blob), expires_ms in zip(shown, expiries, strict=True):
            expiry = {} if expires_ms is None else {"expires_ms": expires_ms}
            print_json({"key": json_value(key), **_state_json(key, blob), **expiry})
    else:
        _print_states(shown, expiries)
    if len(found) > limit:
        print_message("there are more keys; use --limit or --match to show them")


@state.command()
def reset(
    handler: HandlerName,
    keys: Annotated[list[str], typer.Argument(help="The keys.", metavar="KEY...")],
    stream: Stream = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Delete the state of keys: the next message of each starts without one.

    A live run sees the change from its next batch on. If its current batch processes the key, it writes the old state
    back: stop the run to be sure.
    """
    wanted = list(dict.fromkeys(unescape(key) for key in keys))
    with Client(url) as client:
        of = handler_on(client, handler, stream)
        if dry_run:
            changed = count_states(client, of, wanted)
        else:
            print_message(
                "a live run sees this from its next batch on, "
                "and may write back the state of a key in its current batch"
            )
            confirm(f"Delete the state of {pluralize(len(wanted), 'key')} of {handler} on {of.stream}?", yes=yes)
            changed = reset_states(client, of, wanted)
    if as_json:
        print_json({"keys": len(wanted), "reset": changed, "dry_run": dry_run})
    else:
        without = f", {len(wanted) - changed:,} had no state" if changed < len(wanted) else ""
        print_line(f"{pluralize(changed, 'key')} {'would be reset' if dry_run else 'reset'}{without}")


def _print_states(shown: Sequence[tuple[bytes, bytes]], expiries: Sequence[int | None]) -> None:
    """Print a row for each state; when it expires only where one of them does."""
    expires = any(one is not None for one in expiries)
    rows = []
    for (key, blob), expires_ms in zip(shown, expiries, strict=True):
        text = truncate(json.dumps(_state_json(key, blob)["state"]), _SHOWN_CHARS)
        expiry = ("never" if expires_ms is None else format_time(expires_ms) or "-",) if expires else ()
        rows.append((escape(key), format_size(len(blob)), *expiry, text))
    print_table(("key", ">size", *(("expires",) if expires else ()), "+state"), rows)


def _state_json(key: bytes, blob: bytes) -> dict[str, Any]:
    try:
        return {"state": json_value(decode_state(key, blob))}
    except DecodeError:
        return {"state": None, "damaged": blob.hex()}
