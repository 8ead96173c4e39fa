"""`millstream dlq`: lists and shows dead letters. What changes them is in the modules beside this one."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from millstream.admin.letter_export import letter_json
from millstream.cli.dlq_actions import purge, redrive
from millstream.cli.dlq_edit import edit_letter
from millstream.cli.dlq_groups import groups
from millstream.cli.dlq_selection import (
    All,
    Key,
    Limit,
    Reason,
    Selection,
    Since,
    Stream,
    check_name,
    check_selection,
    letter_filter,
)
from millstream.cli.dlq_stop import stop
from millstream.cli.handler_names import HandlerNames
from millstream.cli.options import (
    JsonLines,
    OnlyCount,
    Url,
    command_group,
)
from millstream.cli.terminal import (
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
)
from millstream.errors import MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.model import EntryId
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, format_time
from millstream.redis_client.replies import pairs_of

_ERROR_CHARS = 60

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
            check_name(client, [handlers] if handlers else [], stream)
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
    check_selection(wanted, every=every)
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
            check_name(client, selection or [], stream)
            print_message("there are no dead letters" + ("" if every else " of these"))
    gone = [one for one in wanted.ids if str(EntryId.parse(one)) not in known] if limit is None else []
    if gone:
        raise MillstreamError(f"there is no dead letter {gone[0]} (any more); see: millstream dlq list")


dlq.command("groups")(groups)
dlq.command("redrive")(redrive)
dlq.command("stop")(stop)
dlq.command("edit")(edit_letter)
dlq.command("purge")(purge)


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
    columns: Sequence[str] = (
        "letter_id",
        "~handler",
        "~stream",
        "+original",
        "~key",
        "reason",
        "+error",
        ">attempts",
        ">age",
    )
    rows = [_row(entry, now_ms) for entry in found]
    if any(entry.copy_id for entry in found):
        columns = (*columns, "+edited copy")
        rows = [(*row, entry.copy_id or "-") for row, entry in zip(rows, found, strict=True)]
    print_table(columns, rows)


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
    copy = [("edited copy", f"{entry.copy_id} is under way")] if entry.copy_id else []
    print_details([*head, *(_details_of(letter) if letter else [("problem", escape(entry.problem))]), *copy])
    _show_fields("fields", letter.pairs if letter else entry.pairs)
    if letter and letter.pairs_before_edit is not None:
        _show_fields("fields before the edit", letter.pairs_before_edit)
    if letter and letter.traceback:
        print_text(f"\ntraceback\n{letter.traceback.rstrip()}")


def _show_fields(title: str, pairs: Sequence[bytes]) -> None:
    print_line("")
    print_line(title)
    print_details((f"  {escape(name)}", escape(value)) for name, value in pairs_of(pairs))


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
