"""`millstream dlq`: lists, shows, redrives and purges dead letters."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated

import typer

from millstream.admin.handler_names import select_handlers
from millstream.admin.letter_export import letter_json
from millstream.cli.dlq_edit import edit_letter
from millstream.cli.dlq_selection import Key, Reason, Since, Stream, letter_filter, names_in
from millstream.cli.handler_names import HandlerNames
from millstream.cli.options import (
    DryRun,
    Json,
    JsonLines,
    OnlyCount,
    Url,
    Yes,
    command_group,
)
from millstream.cli.recorded_action import named, on_stream, recorded
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
from millstream.delivery.dead_letter_queue import (
    DeadLetterEntry,
    DeadLetterFilter,
    DeadLetterQueue,
    DeadLetterRef,
)
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.model import EntryId
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, format_time, pluralize
from millstream.redis_client.replies import pairs_of

_ERROR_CHARS = 60

Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of letters.")]
Selection = Annotated[
    list[str] | None,
    typer.Argument(
        help="Only those of this handler, or of all handlers of this app; then, only these letter ids.",
        metavar="[APP[.HANDLER]] [LETTER_ID...]",
    ),
]
All = Annotated[bool, typer.Option("--all", help="All dead letters; required without ids and filters.")]

dlq = command_group("List, show, redrive, edit and purge dead letters: messages that their handler could not process.")


@dlq.command("list")
def list_(
    handlers: HandlerNames = None,
    stream: Stream = None,
    reason: Reason = None,
    key: Key = None,
    since: Since = None,
    limit: Limit = 100,
    count: OnlyCount = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List dead letters, handler by handler, in the order in which they were dead-lettered."""
    wanted = letter_filter([handlers] if handlers else [], stream, reason, key, since)
    with Client(url) as client:
        queue = DeadLetterQueue(client)
        if count:
            _list_counts(queue.find(wanted), as_json=as_json)
            return
        found = list(islice(queue.find(wanted), (limit or 0) + 1))
        if not found:
            _check_name(client, handlers, stream)
    shown = found[:limit]
    if as_json:
        for entry in shown:
            print_json(letter_json(entry))
    else:
        _list_table(shown, is_filtered=wanted != DeadLetterFilter())
    if len(found) > len(shown):
        print_message("there are more: --limit shows them, --count counts them")


@dlq.command()
def show(
    selection: Selection = None,
    stream: Stream = None,
    reason: Reason = None,
    key: Key = None,
    since: Since = None,
    limit: Limit = None,
    every: All = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """Show dead letters in full: their fields byte for byte, the error and the traceback.

    Unprintable bytes are escaped. --json is lossless: values that are not UTF-8 become {"hex": "..."}.
    """
    wanted = letter_filter(selection or [], stream, reason, key, since)
    _check_selection(wanted, every=every)
    number, known = 0, set[str]()
    with Client(url) as client:
        # Each handler has its own queue per stream, so several letters may have the same id.
        for entry in islice(DeadLetterQueue(client).find(wanted), limit):
            if as_json:
                print_json(letter_json(entry, full=True))
            else:
                _show(entry, is_first=not number)
            number += 1
            known.update((entry.letter_id,) if wanted.ids else ())
        if not number and not wanted.ids:
            _check_name(client, next(iter(names_in(selection or [])), None), stream)
            print_message("there are no dead letters" + ("" if every else " of these"))
    gone = [one for one in wanted.ids if str(EntryId.parse(one)) not in known] if limit is None else []
    if gone:
        raise MillstreamError(f"there is no dead letter {gone[0]} (any more); see: millstream dlq list")


# --- Redrive and purge ---


def _redrive(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef]) -> tuple[int, int]:
    """Redrive dead letters to the end of their streams, in the order in which they were published.

    Only the handler that dead-lettered a message processes it again. If the command is killed at any point, no letter
    is lost or duplicated: run it again.
    """
    moved, failed = 0, 0
    for outcome in queue.redrive(refs):
        if outcome.new_id is not None:
            moved += 1
        else:
            failed += 1
            print_message(f"letter {outcome.ref.letter_id} was not redriven: {outcome.problem}")
    return moved, failed


def _purge(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef]) -> tuple[int, int]:
    """Delete dead letters for good."""
    return queue.purge(refs), 0


def _on_selected(
    act: Callable[[DeadLetterQueue, Sequence[DeadLetterRef]], tuple[int, int]], *, verb: str, question: str, done: str
) -> Callable[..., None]:
    """A command that selects letters, asks `question` and applies `act`, which counts successes and failures."""

    def command(
        selection: Selection = None,
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
        wanted = letter_filter(selection or [], stream, reason, key, since)
        with Client(url) as client:
            queue = DeadLetterQueue(client)
            refs = _selected(queue, wanted, limit, every=every)
            number, failed = 0, 0
            if not refs:
                _check_name(client, next(iter(names_in(selection or [])), None), stream)
            if refs and not dry_run:
                confirm(question.format(pluralize(len(refs), "dead letter")), yes=yes)
                about = {"stream": on_stream(stream), "reason": reason, "key": key, "since": since}
                with recorded(client, verb, **_about(refs, wanted), **about) as action:
                    number, failed = act(queue, refs)
                    action.result = f"{number:,} of {len(refs):,} {done}"
        _summary(done, number, refs, dry_run=dry_run, as_json=as_json)
        if failed:
            raise typer.Exit(1)

    command.__doc__ = act.__doc__
    return command


dlq.command("redrive")(_on_selected(_redrive, verb="dlq redrive", question="Redrive {}?", done="redriven"))
dlq.command("edit")(edit_letter)
dlq.command("purge")(_on_selected(_purge, verb="dlq purge", question="Delete {} for good?", done="purged"))


def _about(refs: Sequence[DeadLetterRef], wanted: DeadLetterFilter) -> dict[str, str | None]:
    """The letters of an action: their handlers, the ids if the user has named them, and how many there are."""
    handlers = named(sorted({one.keys.label for one in refs}))
    return {"handler": handlers, "id": named(wanted.ids) or None, "letters": f"{len(refs):,}"}


# --- Selection ---


def _check_name(client: Client, name: str | None, stream: str | None) -> None:
    """Where nothing is found, raise MillstreamError if no such handler has run: the name may be misspelt."""
    if name is not None:
        select_handlers(client, name, stream)


def _selected(
    queue: DeadLetterQueue, wanted: DeadLetterFilter, limit: int | None, *, every: bool
) -> list[DeadLetterRef]:
    _check_selection(wanted, every=every)
    return queue.select(wanted, limit)


def _check_selection(wanted: DeadLetterFilter, *, every: bool) -> None:
    if wanted == DeadLetterFilter() and not every:
        raise ConfigError("select dead letters: give their ids, a handler, a filter such as --reason, or --all")


# --- Output ---


def _list_counts(found: Iterator[DeadLetterEntry], *, as_json: bool) -> None:
    counts = Counter((entry.keys.label, entry.keys.stream, entry.reason) for entry in found)
    ordered = sorted(counts.items())
    if as_json:
        for (handler, stream, reason), number in ordered:
            print_json({"handler": handler, "stream": stream, "reason": reason, "count": number})
        return
    rows = [(handler, escape(stream), reason, f"{number:,}") for (handler, stream, reason), number in ordered]
    print_table(("~handler", "~stream", "reason", ">letters"), rows)


def _list_table(found: Sequence[DeadLetterEntry], *, is_filtered: bool) -> None:
    if not found:
        print_message("there are no dead letters" + (" of these" if is_filtered else ""))
        return
    now_ms = time.time() * 1000
    print_table(
        ("letter_id", "~handler", "~stream", "+original", "~key", "reason", "+error", ">attempts", ">age"),
        [_row(entry, now_ms) for entry in found],
    )


def _row(entry: DeadLetterEntry, now_ms: float) -> tuple[str, ...]:
    letter = entry.letter
    error = letter.error if letter else entry.problem
    return (
        entry.letter_id,
        entry.keys.label,
        escape(entry.keys.stream),
        letter.id if letter else "-",
        escape(letter.key) if letter and letter.key is not None else "-",
        entry.reason,
        truncate_on_screen(escape(error.partition("\n")[0]), _ERROR_CHARS),
        str(letter.attempts) if letter else "-",
        format_age(max(0.0, now_ms - letter.time_ms)) if letter else "-",
    )


def _show(entry: DeadLetterEntry, *, is_first: bool) -> None:
    letter = entry.letter
    if not is_first:
        print_line("")
    head = [("letter_id", entry.letter_id), ("handler", entry.keys.label)]
    head.append(("stream", escape(entry.keys.stream)))
    print_details(head + (_details_of(letter) if letter else [("problem", escape(entry.problem))]))
    print_line("")
    print_line("fields")
    pairs = letter.pairs if letter else entry.pairs
    print_details((f"  {escape(name)}", escape(value)) for name, value in pairs_of(pairs))
    if letter and letter.traceback:
        print_text(f"\ntraceback\n{letter.traceback.rstrip()}")


def _details_of(letter: DeadLetter) -> list[tuple[str, str]]:
    return [
        ("original", letter.id),
        ("key", "-" if letter.key is None else escape(letter.key)),
        ("reason", letter.reason),
        ("error", escape(letter.error)),
        ("attempts", str(letter.attempts)),
        (
            "time",
            f"{format_time(letter.time_ms) or letter.time_ms} ({format_age(max(0.0, time.time() * 1000 - letter.time_ms))} ago)",
        ),
    ]


def _summary(done: str, number: int, refs: Sequence[DeadLetterRef], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"selected": len(refs), done: number, "dry_run": dry_run})
    elif dry_run:
        print_line(f"{pluralize(len(refs), 'dead letter')} would be {done}")
        for (stream, keys), count in Counter((ref.stream, ref.keys) for ref in refs).items():
            print_line(f"  {count:,} of {keys.label} on {escape(stream)}")
    else:
        print_line(f"{pluralize(number, 'dead letter')} {done}")
