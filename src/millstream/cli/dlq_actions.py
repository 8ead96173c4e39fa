"""`millstream dlq redrive` and `millstream dlq purge`: act on the dead letters that their user selects."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from millstream.admin.audit_log import RunningAction
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
from millstream.cli.options import DryRun, Json, Url, Yes, parser_of, with_options_of
from millstream.cli.progress import shown_progress
from millstream.cli.recorded_action import named, on_stream, recorded
from millstream.cli.signals import orderly_stop
from millstream.cli.terminal import confirm, print_json, print_line, print_message
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue, DeadLetterRef
from millstream.delivery.rate_override import format_rate, parse_rate
from millstream.delivery.redrive_pacing import chunks_at
from millstream.errors import MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize, progress


class _LetterRate(float):
    """Dead letters a second, given as `50`, `60/m` or `100/h`."""

    def __str__(self) -> str:
        return format_rate(self)


Rate = Annotated[
    _LetterRate | None,
    typer.Option(
        "--rate",
        parser=parser_of(lambda text: _LetterRate(parse_rate(text))),
        metavar="RATE",
        help="Maximum letters a second, or with a unit: 60/m, 100/h, 5/d; default: as fast as Redis takes them.",
    ),
]


@dataclass(slots=True)
class _Tally:
    """How far a command is.

    * `total`: the number of letters it is about; `verb`: what becomes of them
    * `letters`: how many it has come to; `done`: those that it has changed; `failed`: those that it could not
    """

    total: int
    verb: str
    letters: int = 0
    done: int = 0
    failed: int = 0

    @property
    def figures(self) -> str:
        """How many it has changed, in words."""
        return progress(self.done, self.total, self.verb)


def _redrive(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef], tally: _Tally) -> None:
    """Redrive dead letters to the end of their streams, in the order in which they were published.

    Only the handler that dead-lettered a message processes it again. If the command is killed at any point, no letter
    is lost or duplicated: run it again.
    """
    for outcome in queue.redrive(refs):
        if outcome.new_id is not None:
            tally.done += 1
        else:
            tally.failed += 1
            print_message(f"letter {outcome.ref.letter_id} was not redriven: {outcome.problem}")


def _purge(queue: DeadLetterQueue, refs: Sequence[DeadLetterRef], tally: _Tally) -> None:
    """Delete dead letters for good."""

    def count(removed: int) -> None:
        tally.done += removed

    queue.purge(refs, on_removed=count)


def _at_a_rate(
    refs: Sequence[DeadLetterRef], stopping: threading.Event, *, rate: Rate = None
) -> Iterator[Sequence[DeadLetterRef]]:
    return chunks_at(refs, rate, stopping.wait)


def _without_a_rate(refs: Sequence[DeadLetterRef], stopping: threading.Event) -> Iterator[Sequence[DeadLetterRef]]:
    return chunks_at(refs, None, stopping.wait)


def _on_selected(
    act: Callable[[DeadLetterQueue, Sequence[DeadLetterRef], _Tally], None],
    chunks: Callable[..., Iterator[Sequence[DeadLetterRef]]],
    *,
    verb: str,
    question: str,
    done: str,
) -> Callable[..., None]:
    """A command that selects letters, asks `question`, and applies `act`, which counts what it does.

    `chunks` yields the letters for one call of `act` after another; the command has its options, too.
    """

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
        **options: Any,
    ) -> None:
        wanted = letter_filter(selection or [], stream, reason, key, since)
        check_selection(wanted, every=every)
        with Client(url) as client:
            queue = DeadLetterQueue(client)
            refs = queue.select(wanted, limit)
            if not refs:
                check_name(client, selection or [], stream)
            if dry_run or not refs:
                _summary(done, 0, refs, dry_run=dry_run, as_json=as_json)
                return
            confirm(question.format(pluralize(len(refs), "dead letter")), yes=yes)
            filters = {"stream": on_stream(stream), "reason": reason, "key": key, "since": since}
            chosen = {name: str(value) for name, value in options.items() if value is not None}
            with orderly_stop() as stopping:  # Ctrl-C is raised at its end: what was done is reported before
                with recorded(client, f"dlq {verb}", **_about(refs, wanted), **filters, **chosen) as action:
                    tally = _Tally(total=len(refs), verb=done)
                    _apply(partial(act, queue), chunks(refs, stopping, **options), tally, action)
                    action.result = tally.figures
                _summary(done, tally.done, refs, dry_run=False, as_json=as_json)
                if left := len(refs) - tally.letters:
                    letters = pluralize(left, "dead letter is", "dead letters are")
                    print_message(f"stopped: {letters} left; repeat the command for the rest")
        if tally.failed or left:
            raise typer.Exit(1)

    command.__doc__ = act.__doc__
    return with_options_of(command, chunks)


redrive = _on_selected(_redrive, _at_a_rate, verb="redrive", question="Redrive {}?", done="redriven")
purge = _on_selected(_purge, _without_a_rate, verb="purge", question="Delete {} for good?", done="purged")


def _apply(
    act: Callable[[Sequence[DeadLetterRef], _Tally], None],
    chunks: Iterator[Sequence[DeadLetterRef]],
    tally: _Tally,
    action: RunningAction,
) -> None:
    try:
        with shown_progress(tally.total, lambda: tally.figures) as show:
            for chunk in chunks:
                act(chunk, tally)
                tally.letters += len(chunk)
                show(tally.letters)
    except MillstreamError:
        action.done_before = tally.figures
        if tally.done:
            print_message(f"{tally.figures} before the error")
        raise


def _about(refs: Sequence[DeadLetterRef], wanted: DeadLetterFilter) -> dict[str, str | None]:
    """The letters of an action: their handlers, the ids if the user has named them, and how many there are."""
    handlers = named(sorted({one.keys.label for one in refs}))
    return {"handler": handlers, "id": named(wanted.ids) or None, "letters": f"{len(refs):,}"}


def _summary(done: str, number: int, refs: Sequence[DeadLetterRef], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"selected": len(refs), done: number, "dry_run": dry_run})
    elif dry_run:
        print_line(f"{pluralize(len(refs), 'dead letter')} would be {done}")
        for (stream, keys), count in Counter((ref.stream, ref.keys) for ref in refs).items():
            print_line(f"  {count:,} of {keys.label} on {escape(stream)}")
    else:
        print_line(f"{pluralize(number, 'dead letter')} {done}")
