"""`millstream dlq edit`: resends a dead letter with other fields."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import typer

from millstream.admin.letter_edits import LetterEdit, compare, edit
from millstream.cli.dlq_selection import Stream, letter_filter
from millstream.cli.options import DryRun, Json, Url, Yes, parse_fields
from millstream.cli.recorded_action import recorded, user_name
from millstream.cli.terminal import confirm, print_json, print_line, print_message
from millstream.delivery.dead_letter_queue import DeadLetterQueue, DeadLetterRef, Redriven
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape

Original = Annotated[
    bool,
    typer.Option("--original", help="Begin with the fields that the message had before its edits, as `show` has them."),
]


def edit_letter(
    letter: Annotated[
        list[str],
        typer.Argument(
            help="The letter's id, as in `list`; its handler too, if several have one with this id.",
            metavar="[APP.HANDLER] LETTER_ID",
        ),
    ],
    stream: Stream = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A field of the copy, new or with another value."),
    ] = None,
    removed: Annotated[
        list[str] | None, typer.Option("--remove", metavar="NAME", help="A field that the copy does not have.")
    ] = None,
    original: Original = False,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="NAME", help="The editor, as the copy says. Default: the user of this process."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Redrive a copy of a dead letter with other fields. The letter stays until the copy is committed.

    The copy has a last field, `millstream.edited`, that names the editor.
    """
    wanted = letter_filter(letter, stream)
    if len(wanted.ids) != 1:
        raise ConfigError("give the id of one dead letter, like 1700000000000-0; see: millstream dlq list")
    new_values, gone = parse_fields(values or []), {os.fsencode(one) for one in removed or ()}
    with Client(url) as client:
        queue = DeadLetterQueue(client)
        (ref,) = queue.select(wanted)
        found = next((one.letter for one in queue.find(wanted)), None)
        if found is None:
            raise MillstreamError(f"{ref.letter_id} is no dead letter (any more): see `millstream dlq list`")
        pairs = _edited(found, new_values, gone, original=original)
        changes = compare(found.pairs, pairs)
        new_id, problem = None, ""
        if not dry_run:
            confirm(f"Redrive dead letter {ref.letter_id} of {ref.keys.label}: {changes.describe()}?", yes=yes)
            _, new_id, problem = _redrive(client, ref, pairs, changes, by)
    if as_json:
        names = {kind: [escape(one) for one in getattr(changes, kind)] for kind in ("changed", "added", "removed")}
        head: dict[str, Any] = {"letter_id": ref.letter_id, "handler": ref.keys.label, "stream": ref.stream}
        print_json({**head, **names, "new_id": new_id, "dry_run": dry_run})
    elif dry_run:
        print_line(f"dead letter {ref.letter_id} would be redriven: {changes.describe()}")
    elif new_id:
        print_line(f"dead letter {ref.letter_id} redriven as {new_id}: {changes.describe()}")
    if problem:
        print_message(f"letter {ref.letter_id} was not redriven: {problem}")
        raise typer.Exit(1)


def _edited(
    letter: DeadLetter, values: Mapping[bytes, bytes], removed: Collection[bytes], *, original: bool
) -> list[bytes]:
    """The fields of the copy; `original`: it begins with those before the edits. Raises ConfigError."""
    first = letter.pairs_before_edit if original else letter.pairs
    if first is None:
        raise ConfigError(f"--original: {letter.letter_id} is not the dead letter of an edited copy")
    if missing := {*removed} - {*first[::2]}:
        raise ConfigError(f"the dead letter has no field {escape(min(missing))!r}")
    return edit(first, values, removed)


def _redrive(
    client: Client, ref: DeadLetterRef, pairs: Sequence[bytes], changes: LetterEdit, by: str | None
) -> Redriven:
    about = {"handler": ref.keys.label, "stream": escape(ref.stream), "id": ref.letter_id}
    with recorded(client, "dlq edit", **about, fields=changes.describe(), editor=by) as action:
        outcome = DeadLetterQueue(client).redrive_edited(ref, pairs, by=by or user_name())
        action.result = f"redriven as {outcome.new_id}" if outcome.new_id else f"not redriven: {outcome.problem}"
    return outcome
