"""`millstream keys`, `park`, `unpark` and `skip`: which keys of a handler wait on workers, why, and what to do about it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import typer

from millstream.admin.inspection import find_handlers, there
from millstream.cli.options import DEFAULT_URL, Json, Url, Yes
from millstream.cli.pause import Name, meant
from millstream.cli.terminal import clip, confirm, counted, say, say_json, table, talk
from millstream.delivery.key_queues import KeyQueue, list_queues, look_ahead_used
from millstream.delivery.key_queues import park as park_line
from millstream.delivery.key_queues import skip as skip_first
from millstream.delivery.key_queues import unpark as unpark_line
from millstream.delivery.keyed_stream import queue_of_key
from millstream.errors import AccessDenied, ConfigError, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import json_value, unescape, visible
from millstream.redis_client.key_names import HandlerKeys

Stream = Annotated[str | None, typer.Option(help="Only on this stream; default: all on which it has run.")]
Key = Annotated[str, typer.Argument(help="The key; bytes that are not text as \\xNN.", metavar="KEY")]
State = Annotated[
    Literal["leased", "ready", "backing-off", "parked", "unreadable"] | None,
    typer.Option(help="Only keys in this state."),
]
One = Annotated[str | None, typer.Option("--key", help="Only this key.")]
Count = Annotated[int, typer.Option(min=1, help="Most keys to show, those with most entries first.")]
Reason = Annotated[str, typer.Option(help="Why, for whoever looks at it.")]

_MOST = 100_000
_CROWDED = 0.8
_KEY_CHARS, _WHY_CHARS = 40, 200


def keys(
    handler: Name, state: State = None, key: One = None, count: Count = 20, stream: Stream = None,
    url: Url = DEFAULT_URL, as_json: Json = False,
) -> None:  # fmt: skip
    """Show the keys of a handler that are worked on, wait or are parked, why they wait, and how many messages each has."""
    wanted = None if key is None else unescape(key)
    found: list[tuple[HandlerKeys, KeyQueue]] = []
    refusals: list[AccessDenied] = []
    used: dict[str, tuple[int, int]] = {}
    seen = False
    with Client(url) as client:
        for place in there(client, meant(find_handlers(client), handler, stream)):
            try:
                lines = list_queues(client, place, most=_MOST)
            except AccessDenied as error:
                refusals.append(error)
            except WrongType as error:
                talk(f"{place.app}.{place.handler} on {visible(place.stream)} is unreadable: {error}")
            else:
                seen = True
                if (of := look_ahead_used(client, place)) is not None:
                    used[place.stream] = of
                found += [(place, line) for line in lines if wanted is None or line.key == wanted]
    if refusals and not seen:
        raise refusals[0]
    counts = Counter(str(line.state) for _, line in found)
    shown = [one for one in found if state is None or one[1].state == state.replace("-", " ")]
    shown.sort(key=lambda one: -one[1].length)
    if as_json:
        rows = [_row(place, line) for place, line in shown[:count]]
        crowded = {name: {"waiting": waiting, "look_ahead": most} for name, (waiting, most) in used.items()}
        messages = sum(line.length for _, line in found)
        say_json({"keys": len(found), "messages": messages, "states": counts, "streams": crowded, "shown": rows})
        return
    _show(found, counts, shown[:count])
    for name, (waiting, most) in used.items():
        if waiting >= _CROWDED * most:
            talk(
                f"{waiting:,} messages of {visible(name)} wait in the lines of its keys, of at most {most:,}: with so many no "
                "other key goes on. See to the first of these, or give the workers a greater --look-ahead"
            )
    if len(shown) > count:
        talk(f"{len(shown) - count:,} more; --count shows them")


def _row(place: HandlerKeys, line: KeyQueue) -> dict[str, Any]:
    return {
        "stream": place.stream, "key": json_value(line.key), "state": line.state, "messages": line.length,
        "first": line.first, "worker": line.worker, "since_ms": line.since_ms, "until_ms": line.until_ms,
        "failed_attempts": line.failed, "lost_leases": line.lost, "parked": line.parked, "why": line.why,
    }  # fmt: skip


def _show(
    found: Sequence[tuple[HandlerKeys, KeyQueue]], counts: Counter[str], shown: Sequence[tuple[HandlerKeys, KeyQueue]]
) -> None:
    if not found:
        talk("no key is worked on, waits or is parked")
        return
    messages = sum(line.length for _, line in found)
    states = ", ".join(f"{number:,} {state}" for state, number in counts.most_common())
    say(f"{counted(len(found), 'key')} with {counted(messages, 'message')}: {states}")
    rows = [
        (_name(line), visible(place.stream), line.state, f"{line.length:,}", line.first, clip(line.why, _WHY_CHARS))
        for place, line in shown
    ]
    table(("key", "stream", "state", ">messages", "first", "why"), rows)


def _name(line: KeyQueue) -> str:
    return "(no key)" if line.key is None else clip(visible(line.key), _KEY_CHARS)


def park(
    handler: Name,
    key: Key,
    reason: Reason = "by hand",
    stream: Stream = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Have a key's messages wait, from its next turn on, until `unpark`. Other keys go on."""
    _act(
        handler,
        key,
        stream,
        url,
        "parked",
        lambda client, place, line: park_line(client, place, line, reason),
        as_json=as_json,
    )


def unpark(handler: Name, key: Key, stream: Stream = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Have a parked key go on. Its first message gets all its attempts anew."""
    _act(handler, key, stream, url, "unparked", unpark_line, as_json=as_json)


def skip(
    handler: Name, key: Key, reason: Reason = "skipped by hand", stream: Stream = None, yes: Yes = False,
    url: Url = DEFAULT_URL, as_json: Json = False,
) -> None:  # fmt: skip
    """Make the first message of a key a dead letter, so that the next one can run; a parked key stays parked."""
    confirm(f"The first message of {key} becomes a dead letter. Go on?", yes=yes)
    _act(
        handler,
        key,
        stream,
        url,
        "skipped",
        lambda client, place, line: skip_first(client, place, line, error=reason),
        as_json=as_json,
    )


def _act(
    handler: str, key: str, stream: str | None, url: str, done: str,
    action: Callable[[Client, HandlerKeys, bytes], object], *, as_json: bool,
) -> None:  # fmt: skip
    """Act on the line of `key` on each of the handler's streams on which that has an effect."""
    line = queue_of_key(unescape(key), b"")
    with Client(url) as client:
        places = meant(find_handlers(client), handler, stream)
        results = {place.stream: action(client, place, line) for place in places}
    changed = {name: result for name, result in results.items() if result}
    if as_json:
        say_json({"key": key, done: {name: json_value(result) for name, result in changed.items()}})
    elif not changed:
        raise ConfigError(
            f"the key {key!r} could not be {done}: {_HINTS[done]}; millstream keys shows what it waits for"
        )
    else:
        for name, result in changed.items():
            what = f"message {result} of " if isinstance(result, str) else ""
            say(f"{what}{visible(unescape(key))} on {visible(name)} is {done}")


_HINTS = {"parked": "it is parked already", "unparked": "it is not parked", "skipped": "none of its messages waits"}
