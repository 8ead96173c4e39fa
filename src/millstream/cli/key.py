"""`millstream key`: shows and controls the queued keys of handlers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from msgspec.structs import asdict

from millstream.admin.handler_names import find_handler, select_handlers, split_name
from millstream.admin.inspection import existing_handlers
from millstream.admin.key_listing import HandlerOnStream, is_running, read_key_queues, read_pauses
from millstream.admin.key_queues import (
    KeyQueue,
    is_blocked,
    is_stuck,
    last_errors,
    parked_queues,
    read_queues,
)
from millstream.admin.key_queues import park as park_queue
from millstream.admin.key_queues import skip as skip_first
from millstream.admin.key_queues import unpark as unpark_queue
from millstream.admin.limit_waits import LimitWait, explain_wait, find_limit_waits
from millstream.cli.handler_names import KEY_HELP, HandlerName, HandlerNames, Key, OnStream
from millstream.cli.key_outputs import outputs
from millstream.cli.options import DryRun, Json, JsonLines, OnlyCount, Url, Yes, command_group
from millstream.cli.recorded_action import on_stream, recorded
from millstream.cli.terminal import (
    confirm,
    print_details,
    print_json,
    print_line,
    print_message,
    print_table,
    print_text,
    truncate_on_screen,
)
from millstream.delivery.keyed_stream import NEARLY_FULL, queue_of_key
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import read_long_runs
from millstream.delivery.pause import Pause
from millstream.errors import ConfigError, MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_value, unescape
from millstream.redis_client.formats import format_time, pluralize
from millstream.redis_client.key_names import HandlerKeys

OneKey = Annotated[str | None, typer.Argument(help=KEY_HELP, metavar="[KEY]", show_default=False)]
AllParked = Annotated[bool, typer.Option("--all", help="All parked keys of the handler.")]
State = Annotated[
    Literal["leased", "ready", "backing-off", "parked", "unreadable"] | None,
    typer.Option(
        help="Only keys in this state; default: with a handler all, else those that are stuck: parked or backing off."
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of keys to list; parked ones come first.")]
Reason = Annotated[str, typer.Option(help="The reason, shown to operators.")]

key = command_group("List the keys that wait, and why; park, unpark and skip.")


@dataclass(frozen=True, kw_only=True)
class _Verb:
    """What a command does to a key.

    * `name`: its name; `done`: what a key is that it has changed
    * `hint`: why it has changed none; `refusal`: the same as the result of its action
    """

    name: str
    done: str
    hint: str
    refusal: str

    def result(self, changed: Mapping[str, object], streams: int) -> str:
        """The result of its action on so many streams, of which it has changed some."""
        if not changed:
            return self.refusal
        if streams > 1:
            return f"{self.done} on {len(changed):,} of {streams:,} streams"
        (found,) = changed.values()
        return f"{self.done}: message {found}" if isinstance(found, str) else self.done


_PARK = _Verb(name="park", done="parked", hint="it is parked already", refusal="was parked already")
_UNPARK = _Verb(name="unpark", done="unparked", hint="it is not parked", refusal="was not parked")
_SKIP = _Verb(
    name="skip",
    done="skipped",
    hint="none of its messages is queued",
    refusal="not skipped: none of its messages was queued",
)
_WHY_CHARS, _ERROR_CHARS = 200, 120


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A key of a handler on a stream, with the last error of its first message, and the limit that this waits for."""

    keys: HandlerKeys
    queue: KeyQueue
    last: LastError
    limit: LimitWait | None

    @property
    def why(self) -> str:
        """Why the key waits, in words."""
        return explain_wait(self.keys, self.queue, self.last, self.limit)


@key.command("list")
def list_(
    handlers: HandlerNames = None,
    stream: OnStream = None,
    state: State = None,
    limit: Limit = 20,
    count: OnlyCount = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List the keys of handlers that are in progress, queued or parked, why they wait, and their numbers of messages.

    Without a handler it lists the stuck keys of all handlers: those that are parked, or whose first message has failed
    or has been running for over a minute.
    """
    one_handler = handlers is not None and split_name(handlers)[1] is not None
    with Client(url) as client:
        selected = (
            find_handler(client, handlers, stream)
            if handlers and one_handler
            else select_handlers(client, handlers, stream)
        )
        stuck_only = state is None and not one_handler
        existing = existing_handlers(client, selected) if selected else []
        pauses = read_pauses(client, existing)
        long_runs = read_long_runs(client, {keys.app for keys in existing}) if stuck_only else ()
        running = {(one.handler, one.stream, one.id) for one in long_runs}

        def is_wanted(keys: HandlerKeys, one: KeyQueue) -> bool:
            if stuck_only:
                return is_stuck(one) or (keys.label, escape(keys.stream), one.first_id) in running
            return state is None or one.state == state.replace("-", " ")

        places = read_key_queues(
            client, existing, pauses, is_wanted, running=running, stuck_only=stuck_only, report=print_message
        )
        found = [(place.keys, one) for place in places for one in place.queues]
        found.sort(key=lambda one: (one[1].state != "parked", -one[1].length))
        is_left = bool(found) and one_handler and not as_json and not is_running(client, existing)
        rows = [] if count else _read_rows(client, found[:limit])
    if count:
        _print_counts(places, as_json=as_json)
    elif as_json:
        for row in rows:
            print_json(_as_json(row))
    else:
        _print_keys(found, rows, with_handler=not one_handler)
    if not as_json:
        _print_pauses(pauses)
        _print_nearly_full(places)
        if is_left:
            print_message(f"no worker and no run of {existing[0].label} is alive: its keys wait until one starts")
    if len(found) > limit and not count:
        print_message(f"{len(found) - limit:,} more; use --limit to show them")


@key.command()
def show(
    handler: HandlerName, key: Key, stream: OnStream = None, url: Url = DEFAULT_URL, as_json: JsonLines = False
) -> None:
    """Show one key in full, on each stream where it is in progress, queued or parked."""
    queue = queue_of_key(unescape(key), b"")
    with Client(url) as client:
        found = [
            (keys, one) for keys in find_handler(client, handler, stream) for one in read_queues(client, keys, [queue])
        ]
        rows = _read_rows(client, found)
    if not found:
        raise MillstreamError(
            f"the key {key!r} of {handler} is not in progress, queued or parked; see: millstream key list {handler}"
        )
    for row in rows:
        shown = _as_json(row)
        if as_json:
            print_json(shown)
        else:
            print_details(_details_of(shown, _name(row.queue)))
            if row.last.traceback:
                print_text(row.last.traceback.rstrip("\n"))


key.command("outputs")(outputs)


def _read_rows(client: Client, found: Sequence[tuple[HandlerKeys, KeyQueue]]) -> list[_Row]:
    known = zip(found, last_errors(client, found), find_limit_waits(client, found), strict=True)
    return [_Row(keys=keys, queue=queue, last=last, limit=limit) for (keys, queue), last, limit in known]


def _details_of(shown: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    for field_name, value in {**shown, "key": name}.items():
        if field_name == "traceback":
            continue
        if field_name in ("since_ms", "until_ms", "failing_since_ms"):
            yield field_name.removesuffix("_ms"), "-" if value is None else format_time(value) or "-"
        elif isinstance(value, bool):
            yield field_name, "yes" if value else "no"
        else:
            yield field_name.replace("_", " "), "-" if value is None else f"{value}"


def _as_json(row: _Row) -> dict[str, Any]:
    queue, last = row.queue, row.last
    return {
        "handler": row.keys.label,
        "stream": row.keys.stream,
        "key": json_value(queue.key),
        "state": queue.state,
        "messages": queue.length,
        "first": queue.first_id or None,
        "worker": queue.worker,
        "since_ms": queue.since_ms,
        "until_ms": queue.until_ms,
        "failed_attempts": queue.failed_attempts,
        "failing_since_ms": queue.failing_since_ms,
        "attempts": last.attempts or None,
        "blocked": is_blocked(queue, last),
        "lost_leases": queue.expired_leases,
        "limit": None if row.limit is None else json_value(row.limit.value),
        "parked": queue.parked_reason,
        "why": row.why,
        "error": last.error or None,
        "traceback": last.traceback or None,
    }


def _print_counts(places: Sequence[HandlerOnStream], *, as_json: bool) -> None:
    for place in places:
        states = Counter(str(one.state) for one in place.queues)
        messages = sum(one.length for one in place.queues)
        name = place.keys.label
        if as_json:
            queued, look_ahead = place.usage or (None, None)
            figures = {
                "keys": len(place.queues),
                "messages": messages,
                "states": states,
                "queued": queued,
                "look_ahead": look_ahead,
                "pause": asdict(place.pause) if place.pause else None,
            }
            print_json({"handler": name, "stream": place.keys.stream, **figures})
        else:
            print_line(f"{name} on {escape(place.keys.stream)}: {_describe(states, messages)}")


def _describe(states: Counter[str], messages: int) -> str:
    listed = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    return f"{pluralize(states.total(), 'key')} with {pluralize(messages, 'message')}" + (
        f": {listed}" if listed else ""
    )


def _print_keys(found: Sequence[tuple[HandlerKeys, KeyQueue]], rows: Sequence[_Row], *, with_handler: bool) -> None:
    """Print the number of all keys, and those that are rows."""
    if not found:
        print_message("there are no such keys")
        return
    print_line(_describe(Counter(str(queue.state) for _, queue in found), sum(queue.length for _, queue in found)))
    cells = [
        (
            *((row.keys.label,) if with_handler else ()),
            _name(row.queue),
            escape(row.keys.stream),
            row.queue.state,
            f"{row.queue.length:,}",
            row.queue.first_id,
            truncate_on_screen(row.why, _WHY_CHARS),
            truncate_on_screen("" if row.last.error in row.queue.why else row.last.error, _ERROR_CHARS) or "-",
        )
        for row in rows
    ]
    columns = ("~key", "~stream", "state", ">messages", "+first", "+why", "+last error")
    print_table((*(("~handler",) if with_handler else ()), *columns), cells)


def _print_pauses(pauses: Mapping[HandlerKeys, Pause]) -> None:
    for keys, pause in pauses.items():
        print_message(f"{keys.label} on {escape(keys.stream)} is {pause.describe(keys.label)}")


def _print_nearly_full(places: Sequence[HandlerOnStream]) -> None:
    for place in places:
        queued, most = place.usage or (0, 1)
        if queued >= NEARLY_FULL * most:
            print_message(
                f"{queued:,} messages of {escape(place.keys.stream)} are in key queues, of at most {most:,}: at the limit "
                "no new key is read. Resolve the keys with most messages, or give the workers a greater --look-ahead"
            )


def _name(queue: KeyQueue) -> str:
    return "(no key)" if queue.key is None else escape(queue.key)


@key.command()
def park(
    handler: HandlerName,
    key: Key,
    reason: Reason = "by an operator",
    stream: OnStream = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Park a key after its message in progress, until `unpark`. Other keys go on."""

    def park_and_list(client: Client, keys: HandlerKeys, queue: bytes) -> bool:
        is_parked = park_queue(client, keys, queue, reason)
        if is_parked and not any(one.length for one in read_queues(client, keys, [queue])):
            print_message(
                f"{key} has no messages on {escape(keys.stream)} now; those to come will wait. If it is misspelt: "
                f"millstream key unpark {handler} {key}"
            )
        return is_parked

    _act(handler, key, stream, url, _PARK, park_and_list, reason=reason, as_json=as_json)


@key.command()
def unpark(
    handler: HandlerName,
    key: OneKey = None,
    all_: AllParked = False,
    stream: OnStream = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Resume a parked key, or all of them. The attempts of its first message are counted from 0 again."""
    if all_ == (key is not None):
        raise ConfigError("name the key to unpark, or give --all for all parked keys of the handler")
    if key is None:
        _unpark_all(handler, stream, url, dry_run=dry_run, yes=yes, as_json=as_json)
    elif dry_run:
        raise ConfigError("--dry-run belongs to --all: millstream key show prints what is known of one key")
    else:
        _act(handler, key, stream, url, _UNPARK, unpark_queue, as_json=as_json)


def _unpark_all(handler: str, stream: str | None, url: str, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    with Client(url) as client:
        places = parked_queues(client, list(find_handler(client, handler, stream)))
        parked = [(keys, name) for keys, names in places.items() for name in names]
        if parked and not dry_run:
            confirm(f"Unpark {pluralize(len(parked), 'key')} of {handler}?", yes=yes)
        done = parked if dry_run or not parked else _unpark_each(client, handler, stream, parked)
    if as_json:
        print_json({"handler": handler, "unparked": len(done), "dry_run": dry_run})
    else:
        print_line(f"{pluralize(len(done), 'key')} of {handler} {'would be ' if dry_run else ''}unparked")


def _unpark_each(
    client: Client, handler: str, stream: str | None, parked: Sequence[tuple[HandlerKeys, bytes]]
) -> Sequence[tuple[HandlerKeys, bytes]]:
    with recorded(client, "key unpark", handler=handler, stream=on_stream(stream), keys=f"{len(parked):,}") as action:
        done = [one for one in parked if unpark_queue(client, *one)]
        action.result = f"{len(done):,} of {len(parked):,} unparked"
    return done


@key.command()
def skip(
    handler: HandlerName,
    key: Key,
    reason: Reason = "skipped by an operator",
    stream: OnStream = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Dead-letter the first message of a key, so that the next one can run. A parked key stays parked."""
    if not dry_run:
        confirm(f"Dead-letter the first message of {key}?", yes=yes)

    def skip_or_show(client: Client, keys: HandlerKeys, queue: bytes) -> str | None:
        if not dry_run:
            return skip_first(client, keys, queue, error=reason)
        return next((one.first_id or None for one in read_queues(client, keys, [queue])), None)

    _act(handler, key, stream, url, _SKIP, skip_or_show, reason=reason, dry_run=dry_run, as_json=as_json)


def _act(
    handler: str,
    key: str,
    stream: str | None,
    url: str,
    verb: _Verb,
    act: Callable[[Client, HandlerKeys, bytes], object],
    *,
    reason: str | None = None,
    dry_run: bool = False,
    as_json: bool,
) -> None:
    """Apply `act` to the queue of `key` on each of the handler's streams; report those that it changed."""
    data = unescape(key)
    with Client(url) as client:
        places = find_handler(client, handler, stream)

        def apply() -> dict[str, object]:
            results = {keys.stream: act(client, keys, queue_of_key(data, b"")) for keys in places}
            return {name: result for name, result in results.items() if result}

        if dry_run:
            changed = apply()
        else:
            only = places[0].stream if len(places) == 1 else None
            about = {"handler": handler, "stream": on_stream(only), "key": escape(data), "reason": reason}
            with recorded(client, f"key {verb.name}", **about) as action:
                changed = apply()
                action.result = verb.result(changed, len(places))
    if as_json:
        streams = {name: json_value(result) for name, result in changed.items()}
        print_json({"handler": handler, "key": key, verb.done: streams, "dry_run": dry_run})
    else:
        how = f"would be {verb.done}" if dry_run else f"is {verb.done}"
        for name, result in changed.items():
            message = f"message {result} of " if isinstance(result, str) else ""
            print_line(f"{message}{escape(data)} on {escape(name)} {how}")
    if not changed:
        raise MillstreamError(
            f"the key {key!r} could not be {verb.done}: {verb.hint}; see: millstream key list {handler}"
        )
