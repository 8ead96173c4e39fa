"""`millstream state`: shows, lists, exports and resets the state of keys."""

import json
import sys
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Annotated, Any

import typer

from millstream.admin.handler_names import handler_on, split_name
from millstream.admin.inspection import (
    count_states,
    decode_version_and_state,
    list_states,
    read_version_and_state,
    reset_states,
    state_expiries,
    state_expiry,
)
from millstream.admin.state_scan import scan_states, state_hashes
from millstream.cli.handler_names import HandlerName
from millstream.cli.options import DryRun, Json, JsonLines, Url, Yes, command_group
from millstream.cli.recorded_action import named, recorded
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table, print_text, truncate
from millstream.errors import ConfigError, DecodeError, MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_value, unescape
from millstream.redis_client.formats import format_size, format_time, pluralize
from millstream.redis_client.key_names import HandlerKeys

Stream = Annotated[
    str | None,
    typer.Option("--stream", help="The stream; each has its own state. Default: the only one.", metavar="NAME"),
]

state = command_group("Show, list, export and reset the state of keys. Write keys as in `list`.")

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
        found = read_version_and_state(client, keys, unescape(key))
        expires_ms = state_expiry(client, keys, unescape(key))
    if found is None:
        raise MillstreamError(
            f"{handler} has no state for {key} on {keys.stream}; see: millstream state list {handler}"
        )
    version, values = found
    if as_json:
        print_json(json_value(values))
    else:
        print_text(json.dumps(json_value(values), indent=2))
    if version > 1:
        print_message(f"the state is stored in version {version}")
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
        first = sorted(found.items())[:limit]
        expiries = state_expiries(client, keys, [(key, stored) for key, (_, stored) in first])
    shown = [(key, blob) for key, (blob, _) in first]
    if as_json:
        for (key, blob), expires_ms in zip(shown, expiries, strict=True):
            print_json(_json_line(key, blob, expires_ms))
    else:
        _print_states(shown, expiries)
    if len(found) > limit:
        print_message("there are more keys; use --limit or --match to show them")


@state.command()
def export(
    handler: HandlerName,
    stream: Annotated[
        str | None,
        typer.Option("--stream", help="Only on this stream; default: all on which it has run.", metavar="NAME"),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = True,  # noqa: ARG001 - it prints nothing else
) -> None:
    """Print all states of a handler as JSON, an object per line, in no order.

    Memory does not grow with their number. A state is one that was committed; a run may go on meanwhile.
    """
    app, name = split_name(handler)
    if name is None:
        raise ConfigError(f"{handler!r} is not APP.HANDLER: write both names")
    with Client(url) as client:
        places = [one.keys for one in state_hashes(client, app, name, () if stream is None else (stream,))]
        by_stream = {one.stream: one for one in places}
        for page in scan_states(client, places):
            for of, some in groupby(page, lambda one: one.stream):
                states = list(some)
                expiries = state_expiries(client, by_stream[of], [(one.key, one.expires_ms) for one in states])
                for one, expires_ms in zip(states, expiries, strict=True):
                    print_json({"stream": escape(of), **_json_line(one.key, one.blob, expires_ms)})
            sys.stdout.flush()


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
            changed = _reset(client, of, wanted)
    if as_json:
        print_json({"keys": len(wanted), "reset": changed, "dry_run": dry_run})
    else:
        without = f", {len(wanted) - changed:,} had no state" if changed < len(wanted) else ""
        print_line(f"{pluralize(changed, 'key')} {'would be reset' if dry_run else 'reset'}{without}")


def _reset(client: Client, of: HandlerKeys, wanted: Sequence[bytes]) -> int:
    with recorded(client, "state reset", handler=of.label, stream=escape(of.stream), key=named(wanted)) as action:
        changed = reset_states(client, of, wanted)
        action.result = f"{changed:,} of {len(wanted):,} reset"
        if len(wanted) == 1:
            action.result = "reset" if changed else "had no state"
    return changed


def _print_states(shown: Sequence[tuple[bytes, bytes]], expiries: Sequence[int | None]) -> None:
    """Print a row for each state; its version, and when it expires, only where one of them has that."""
    expires = any(one is not None for one in expiries)
    found = [_state_json(key, blob) for key, blob in shown]
    versioned = any("version" in one for one in found)
    rows = []
    for (key, blob), one, expires_ms in zip(shown, found, expiries, strict=True):
        text = truncate(json.dumps(one["state"]), _SHOWN_CHARS)
        version = (str(one.get("version", "-" if "damaged" in one else 1)),) if versioned else ()
        expiry = ("never" if expires_ms is None else format_time(expires_ms) or "-",) if expires else ()
        rows.append((escape(key), format_size(len(blob)), *version, *expiry, text))
    columns = (*((">version",) if versioned else ()), *(("expires",) if expires else ()))
    print_table(("key", ">size", *columns, "+state"), rows)


def _json_line(key: bytes, blob: bytes, expires_ms: int | None) -> dict[str, Any]:
    expiry = {} if expires_ms is None else {"expires_ms": expires_ms}
    return {"key": json_value(key), **_state_json(key, blob), **expiry}


def _state_json(key: bytes, blob: bytes) -> dict[str, Any]:
    try:
        version, values = decode_version_and_state(key, blob)
        return {"state": json_value(values), **({"version": version} if version > 1 else {})}
    except DecodeError:
        return {"state": None, "damaged": blob.hex()}
