"""`millstream dlq`: dead letters."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from millstream.cli.options import DEFAULT_URL, DryRun, Json, Url, Yes, family, parse_time_ms
from millstream.cli.terminal import age, clip, confirm, counted, details, say, say_json, say_lines, table, talk
from millstream.delivery.dead_letter_queue import (
    REASONS,
    DeadLetterEntry,
    DeadLetterFilter,
    DeadLetterQueue,
    DeadLetterRef,
)
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import json_fields, json_value, unescape, visible

_ERROR_CHARS = 60
_KEY_CHARS = 40

App = Annotated[str | None, typer.Option("--app", help="Only this app's.")]
Handler = Annotated[str | None, typer.Option("--handler", help="Only this handler's.")]
Stream = Annotated[str | None, typer.Option("--stream", help="Only those from this stream.")]
Reason = Annotated[
    str | None,
    typer.Option(
        "--reason",
        help=f"Only those that died of this: {', '.join(REASONS[:-1])}; or {REASONS[-1]}, for entries that are no dead "
        "letters.",
    ),
]
Key = Annotated[str | None, typer.Option("--key", help="Only those of this key, written as `list` shows it.")]
Since = Annotated[
    str | None, typer.Option("--since", help="Only those that died since: 15m (ago), 2h, 3d, or an ISO 8601 time.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Letter ids.", metavar="[LETTER_ID]...")]
All = Annotated[bool, typer.Option("--all", help="All of them: needed where nothing else is given.")]

dlq = family("List, show, redrive and purge dead letters: messages that their handler could not process.")


@dlq.command("list")
def list_(
    app: App = None,
    handler: Handler = None,
    stream: Stream = None,
    reason: Reason = None,
    key: Key = None,
    since: Since = None,
    limit: Limit = 100,
    count: Annotated[bool, typer.Option("--count", help="Only count them, by handler and reason.")] = False,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object per line.")] = False,
) -> None:
    """List dead letters, handler by handler, in the order in which they died."""
    wanted = _filter(app, handler, stream, reason, key, since)
    with _box(url) as box:
        if count:
            _list_counts(box.find(wanted), as_json=as_json)
            return
        found = list(islice(box.find(wanted), (limit or 0) + 1))
    shown = found[:limit]
    if as_json:
        for filed in shown:
            say_json(_as_json(filed))
    else:
        _list_table(shown)
    if len(found) > len(shown):
        talk("there are more; --limit shows them, --count counts them")


@dlq.command()
def show(
    letter_id: Annotated[str, typer.Argument(help="The letter's id, as `list` shows it.", metavar="LETTER_ID")],
    app: App = None,
    handler: Handler = None,
    stream: Stream = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show all of a dead letter: its fields byte for byte, the error and the traceback.

    What is not printable is escaped. --json loses nothing: what is not UTF-8 becomes {"hex": "..."}.
    """
    with _box(url) as box:
        found = list(box.find(DeadLetterFilter(app=app, handler=handler, stream=stream, ids=(letter_id,))))
    if not found:
        raise MillstreamError(f"there is no dead letter {letter_id} (any more); see: millstream dlq list")
    # Boxes are apart, so two handlers may have given the same id.
    for filed in found:
        if as_json:
            say_json(_as_json(filed, full=True))
        else:
            _show(filed)


# --- What changes something ---


def _redrive(box: DeadLetterQueue, slips: Sequence[DeadLetterRef]) -> tuple[int, int]:
    """Send dead letters back to the tail of their streams, in the order in which they were published.

    Only the handler that gave up on a letter processes it again. Killed at any point, this neither loses nor
    doubles one: run it again.
    """
    moved, failed = 0, 0
    for outcome in box.redrive(slips):
        if outcome.new_id is not None:
            moved += 1
        else:
            failed += 1
            talk(f"letter {outcome.slip.letter_id} stays: {outcome.problem}")
    return moved, failed


def _purge(box: DeadLetterQueue, slips: Sequence[DeadLetterRef]) -> tuple[int, int]:
    """Delete dead letters for good."""
    return box.purge(slips), 0


def _on_selected(
    act: Callable[[DeadLetterQueue, Sequence[DeadLetterRef]], tuple[int, int]], *, question: str, done: str
) -> Callable[..., None]:
    """The command that asks `question` and then does `act`, which counts what succeeds and fails, to selected letters."""

    def command(
        letter_ids: Ids = None,
        app: App = None,
        handler: Handler = None,
        stream: Stream = None,
        reason: Reason = None,
        key: Key = None,
        since: Since = None,
        limit: Limit = None,
        every: All = False,
        dry_run: DryRun = False,
        yes: Yes = False,
        url: Url = DEFAULT_URL,
        as_json: Json = False,
    ) -> None:
        wanted = _filter(app, handler, stream, reason, key, since, letter_ids)
        with _box(url) as box:
            slips = _selected(box, wanted, limit, every=every)
            number, failed = 0, 0
            if slips and not dry_run:
                confirm(question.format(counted(len(slips), "dead letter")), yes=yes)
                number, failed = act(box, slips)
        _summary(done, number, slips, dry_run=dry_run, as_json=as_json)
        if failed:
            raise typer.Exit(1)

    command.__doc__ = act.__doc__
    return command


dlq.command("redrive")(_on_selected(_redrive, question="Redrive {}?", done="redriven"))
dlq.command("purge")(_on_selected(_purge, question="Delete {} for good?", done="purged"))


# --- What is meant ---


@contextmanager
def _box(url: str) -> Iterator[DeadLetterQueue]:
    with Client(url) as client:
        yield DeadLetterQueue(client)


def _filter(
    app: str | None,
    handler: str | None,
    stream: str | None,
    reason: str | None,
    key: str | None,
    since: str | None,
    ids: Sequence[str] | None = None,
) -> DeadLetterFilter:
    return DeadLetterFilter(
        app=app,
        handler=handler,
        stream=stream,
        reason=reason,
        key=None if key is None else unescape(key),
        since_ms=parse_time_ms(since) if since else 0,
        ids=tuple(ids or ()),
    )


def _selected(box: DeadLetterQueue, wanted: DeadLetterFilter, limit: int | None, *, every: bool) -> list[DeadLetterRef]:
    if wanted == DeadLetterFilter() and not every:
        raise ConfigError("say which dead letters: their ids, a filter such as --reason, or --all")
    return box.select(wanted, limit)


# --- What is shown ---


def _list_counts(found: Iterator[DeadLetterEntry], *, as_json: bool) -> None:
    counts = Counter((f"{filed.keys.app}.{filed.keys.handler}", filed.keys.stream, filed.reason) for filed in found)
    ordered = sorted(counts.items())
    if as_json:
        for (handler, stream, reason), number in ordered:
            say_json({"handler": handler, "stream": stream, "reason": reason, "count": number})
        return
    rows = [(handler, visible(stream), reason, f"{number:,}") for (handler, stream, reason), number in ordered]
    table(("handler", "stream", "reason", ">letters"), rows)


def _list_table(found: Sequence[DeadLetterEntry]) -> None:
    if not found:
        talk("there are no such dead letters")
        return
    now_ms = time.time() * 1000
    table(
        ("letter_id", "handler", "stream", "original", "key", "reason", "error", ">attempts", ">age"),
        [_row(filed, now_ms) for filed in found],
    )


def _row(filed: DeadLetterEntry, now_ms: float) -> tuple[str, ...]:
    letter = filed.letter
    error = letter.error if letter else filed.problem
    return (
        filed.letter_id,
        f"{filed.keys.app}.{filed.keys.handler}",
        visible(filed.keys.stream),
        letter.id if letter else "-",
        clip(visible(letter.key), _KEY_CHARS) if letter and letter.key is not None else "-",
        filed.reason,
        clip(visible(error.partition("\n")[0]), _ERROR_CHARS),
        str(letter.attempts) if letter else "-",
        age(max(0.0, now_ms - letter.time_ms)) if letter else "-",
    )


def _as_json(filed: DeadLetterEntry, *, full: bool = False) -> dict[str, Any]:
    keys, letter = filed.keys, filed.letter
    place = {"letter_id": filed.letter_id, "app": keys.app, "handler": keys.handler, "stream": keys.stream}
    if letter is None:
        return {**place, "reason": filed.reason, "error": filed.problem, **json_fields(filed.pairs)}
    return {
        **place,
        "id": letter.id,
        "key": json_value(letter.key),
        "reason": letter.reason,
        "error": letter.error,
        "attempts": letter.attempts,
        "time_ms": letter.time_ms,
        **({"traceback": letter.traceback, **json_fields(letter.pairs)} if full else {}),
    }


def _show(filed: DeadLetterEntry) -> None:
    letter = filed.letter
    head = [("letter_id", filed.letter_id), ("handler", f"{filed.keys.app}.{filed.keys.handler}")]
    head.append(("stream", visible(filed.keys.stream)))
    details(head + (_story(letter) if letter else [("problem", visible(filed.problem))]))
    say("")
    say("fields")
    pairs = letter.pairs if letter else filed.pairs
    details((f"  {visible(name)}", visible(value)) for name, value in zip(pairs[::2], pairs[1::2], strict=True))
    if letter and letter.traceback:
        say_lines(f"\ntraceback\n{letter.traceback.rstrip()}")


def _story(letter: DeadLetter) -> list[tuple[str, str]]:
    died = datetime.fromtimestamp(letter.time_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")
    return [
        ("original", letter.id),
        ("key", "-" if letter.key is None else visible(letter.key)),
        ("reason", letter.reason),
        ("error", visible(letter.error)),
        ("attempts", str(letter.attempts)),
        ("died", f"{died} ({age(max(0.0, time.time() * 1000 - letter.time_ms))} ago)"),
    ]


def _summary(done: str, number: int, slips: Sequence[DeadLetterRef], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        say_json({"selected": len(slips), done: number, "dry_run": dry_run})
    elif dry_run:
        say(f"{counted(len(slips), 'dead letter')} would be {done}")
        for (stream, keys), count in Counter((slip.stream, slip.keys) for slip in slips).items():
            say(f"  {count:,} of {keys.app}.{keys.handler} on {visible(stream)}")
    else:
        say(f"{counted(number, 'dead letter')} {done}")
