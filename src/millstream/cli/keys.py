"""`millstream keys`, `park`, `unpark` and `skip`: shows and controls the queued keys of a handler on workers."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from millstream.admin.inspection import existing_handlers, find_handlers
from millstream.cli.options import DEFAULT_URL, Json, Url, Yes
from millstream.cli.pause import Name, resolve_handler
from millstream.cli.terminal import confirm, pluralize, print_json, print_line, print_message, print_table, truncate
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.key_queues import KeyQueue, list_queues, queue_usage
from millstream.delivery.key_queues import park as park_queue
from millstream.delivery.key_queues import skip as skip_first
from millstream.delivery.key_queues import unpark as unpark_queue
from millstream.delivery.keyed_stream import queue_of_key
from millstream.delivery.pause import Pause
from millstream.errors import AccessDenied, ConfigError, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_value, unescape
from millstream.redis_client.key_names import HandlerKeys

Stream = Annotated[str | None, typer.Option(help="Only on this stream; default: all on which it has run.")]
Key = Annotated[str, typer.Argument(help="The key; write bytes that are not text as \\xNN.", metavar="KEY")]
State = Annotated[
    Literal["leased", "ready", "backing-off", "parked", "unreadable"] | None,
    typer.Option(help="Only keys in this state."),
]
One = Annotated[str | None, typer.Option("--key", help="Only this key.")]
Count = Annotated[int, typer.Option(min=1, help="Maximum number of keys to show, those with most messages first.")]
Reason = Annotated[str, typer.Option(help="The reason, shown to operators.")]

_MOST = 100_000
_CROWDED = 0.8
_KEY_CHARS, _WHY_CHARS = 40, 200


def keys(
    handler: Name, state: State = None, key: One = None, count: Count = 20, stream: Stream = None,
    url: Url = DEFAULT_URL, as_json: Json = False,
) -> None:  # fmt: skip
    """Show the keys of a handler that are in progress, queued or parked, why they wait, and their numbers of messages."""
    wanted = None if key is None else unescape(key)
    found: list[tuple[HandlerKeys, KeyQueue]] = []
    refusals: list[AccessDenied] = []
    used: dict[str, tuple[int, int]] = {}
    pauses: dict[str, Pause] = {}
    label = handler
    seen = False
    with Client(url) as client:
        for handler_keys in existing_handlers(client, resolve_handler(find_handlers(client), handler, stream)):
            try:
                queues = list_queues(client, handler_keys, most=_MOST)
            except AccessDenied as error:
                refusals.append(error)
            except WrongType as error:
                print_message(
                    f"{handler_keys.app}.{handler_keys.handler} on {escape(handler_keys.stream)} is unreadable: {error}"
                )
            else:
                seen = True
                label = f"{handler_keys.app}.{handler_keys.handler}"
                pauses |= CommitStore(client, app=handler_keys.app, handler=handler_keys.handler).paused_streams(
                    [handler_keys.stream]
                )
                if (of := queue_usage(client, handler_keys)) is not None:
                    used[handler_keys.stream] = of
                found += [(handler_keys, queue) for queue in queues if wanted is None or queue.key == wanted]
    if refusals and not seen:
        raise refusals[0]
    counts = Counter(str(queue.state) for _, queue in found)
    shown = [one for one in found if state is None or one[1].state == state.replace("-", " ")]
    shown.sort(key=lambda one: -one[1].length)
    if as_json:
        rows = [_row(handler_keys, queue) for handler_keys, queue in shown[:count]]
        crowded = {name: {"queued": queued, "look_ahead": most} for name, (queued, most) in used.items()}
        messages = sum(queue.length for _, queue in found)
        paused = {name: asdict(pause) for name, pause in pauses.items()}
        print_json(
            {"keys": len(found), "messages": messages, "states": counts, "streams": crowded, "paused": paused, "shown": rows}
        )  # fmt: skip
        return
    for name, pause in pauses.items():
        print_message(f"on {escape(name)} {label} is {pause.describe(label)}")
    _show(found, counts, shown[:count])
    for name, (queued, most) in used.items():
        if queued >= _CROWDED * most:
            print_message(
                f"{queued:,} messages of {escape(name)} are in key queues, of at most {most:,}: at the limit no new "
                "key is read. Resolve the keys with most messages, or give the workers a greater --look-ahead"
            )
    if len(shown) > count:
        print_message(f"{len(shown) - count:,} more; use --count to show them")


def _row(handler_keys: HandlerKeys, queue: KeyQueue) -> dict[str, Any]:
    return {
        "stream": handler_keys.stream, "key": json_value(queue.key), "state": queue.state, "messages": queue.length,
        "first": queue.first_id, "worker": queue.worker, "since_ms": queue.since_ms, "until_ms": queue.until_ms,
        "failed_attempts": queue.failed_attempts, "lost_leases": queue.expired_leases, "parked": queue.parked_reason, "why": queue.why,
    }  # fmt: skip


def _show(
    found: Sequence[tuple[HandlerKeys, KeyQueue]], counts: Counter[str], shown: Sequence[tuple[HandlerKeys, KeyQueue]]
) -> None:
    if not found:
        print_message("no key is in progress, queued or parked")
        return
    messages = sum(queue.length for _, queue in found)
    states = ", ".join(f"{number:,} {state}" for state, number in counts.most_common())
    print_line(f"{pluralize(len(found), 'key')} with {pluralize(messages, 'message')}: {states}")
    rows = [
        (
            _name(queue),
            escape(handler_keys.stream),
            queue.state,
            f"{queue.length:,}",
            queue.first_id,
            truncate(queue.why, _WHY_CHARS),
        )
        for handler_keys, queue in shown
    ]
    print_table(("key", "stream", "state", ">messages", "first", "why"), rows)


def _name(queue: KeyQueue) -> str:
    return "(no key)" if queue.key is None else truncate(escape(queue.key), _KEY_CHARS)


def park(
    handler: Name,
    key: Key,
    reason: Reason = "by an operator",
    stream: Stream = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Park a key after its message in progress, until `unpark`. Other keys go on."""
    _act(
        handler,
        key,
        stream,
        url,
        "parked",
        lambda client, handler_keys, queue: park_queue(client, handler_keys, queue, reason),
        as_json=as_json,
    )


def unpark(handler: Name, key: Key, stream: Stream = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Resume a parked key. The attempts of its first message are counted from 0 again."""
    _act(handler, key, stream, url, "unparked", unpark_queue, as_json=as_json)


def skip(
    handler: Name, key: Key, reason: Reason = "skipped by an operator", stream: Stream = None, yes: Yes = False,
    url: Url = DEFAULT_URL, as_json: Json = False,
) -> None:  # fmt: skip
    """Dead-letter the first message of a key, so that the next one can run. A parked key stays parked."""
    confirm(f"Dead-letter the first message of {key}?", yes=yes)
    _act(
        handler,
        key,
        stream,
        url,
        "skipped",
        lambda client, handler_keys, queue: skip_first(client, handler_keys, queue, error=reason),
        as_json=as_json,
    )


def _act(
    handler: str, key: str, stream: str | None, url: str, done: str,
    action: Callable[[Client, HandlerKeys, bytes], object], *, as_json: bool,
) -> None:  # fmt: skip
    """Apply `action` to the queue of `key` on each of the handler's streams; report those that it changed."""
    queue = queue_of_key(unescape(key), b"")
    with Client(url) as client:
        matching = resolve_handler(find_handlers(client), handler, stream)
        results = {handler_keys.stream: action(client, handler_keys, queue) for handler_keys in matching}
    changed = {name: result for name, result in results.items() if result}
    if as_json:
        print_json({"key": key, done: {name: json_value(result) for name, result in changed.items()}})
    elif not changed:
        raise ConfigError(f"the key {key!r} could not be {done}: {_HINTS[done]}; see: millstream keys")
    else:
        for name, result in changed.items():
            message = f"message {result} of " if isinstance(result, str) else ""
            print_line(f"{message}{escape(unescape(key))} on {escape(name)} is {done}")


_HINTS = {"parked": "it is parked already", "unparked": "it is not parked", "skipped": "none of its messages is queued"}
