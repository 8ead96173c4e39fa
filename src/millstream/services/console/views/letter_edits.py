"""Editing one dead letter: a form with its fields, what would change, and the copy that is resent."""

from collections.abc import Sequence
from shlex import quote
from urllib.parse import urlencode

from starlette.responses import Response

from millstream.admin.letter_edits import compare
from millstream.delivery.dead_letter_queue import DeadLetterEntry, DeadLetterFilter, DeadLetterQueue, unedited
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.escaping import escape, unescape
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import pairs_of
from millstream.services.console.pages import PageRequest

_ORIGINAL = "original"  # of the address and the form: begin with the fields before the edits
_BLANK_ROWS = 3
_MOST_FIELDS = 500
_MOST_CHARS = 50_000  # as a form sends them; a form has 65,536 bytes at most
_RULES = (
    "The copy goes to the end of its stream, and says by whom it was edited. The dead letter stays until it is committed.",
    "Only this handler processes the copy. Its key is taken from these fields, and later messages of that key were first.",
)


def edit(page: PageRequest) -> Response:
    """The fields of a dead letter as a form."""
    keys, entry, letter = _find(page)
    rows = _rows_of(page, _base_of(page, letter))
    shown = [(f"name{at}", name, f"value{at}", value) for at, (name, value) in enumerate(rows) if value is not None]
    is_large = len(rows) > _MOST_FIELDS or len(urlencode([pair[1::2] for pair in shown])) > _MOST_CHARS
    return page.render(
        "letter_edit.html",
        name=keys.label,
        stream=keys.stream,
        letter=letter,
        copy_id=entry.copy_id,
        original=_ORIGINAL in page.query,
        rows=list(enumerate(rows)),
        blank=range(len(rows), len(rows) + _BLANK_ROWS),
        is_large=is_large,
    )


def redrive(page: PageRequest) -> Response:
    """Redrive the dead letter with the fields of the form, once what changes is confirmed."""
    keys, _, letter = _find(page)
    before, after = unedited(letter.pairs), _pairs_of(page, letter)
    about = {"handler": keys.label, "stream": escape(keys.stream), "id": letter.letter_id}
    if page.field("confirm") != "edit":
        return _confirm(page, about, letter, after)
    with page.audit("dlq edit", **about, fields=compare(before, after).describe()) as action:
        queue = DeadLetterQueue(page.client)
        (ref,) = queue.select(_filter_of(keys, letter.letter_id))
        outcome = queue.redrive_edited(ref, after, by=page.viewer.name)
        action.result = f"redriven as {outcome.new_id}" if outcome.new_id else f"not redriven: {outcome.problem}"
    done = f"The edited copy of dead letter {letter.letter_id} is redriven as {outcome.new_id}"
    return page.render(
        "letters_done.html",
        name=keys.label,
        done=done if outcome.new_id else "0 dead letters redriven",
        more=["The dead letter stays until the copy is committed."] if outcome.new_id else [],
        problems=[page.display.text(outcome.problem, "error")] if outcome.problem else [],
    )


def _find(page: PageRequest) -> tuple[HandlerKeys, DeadLetterEntry, DeadLetter]:
    """The dead letter that a form or an address names. Raises MillstreamError if it is gone or is none."""
    stream, letter_id = page.wanted_name("stream"), page.wanted("id")
    keys = page.places_of(page.wanted("handler"), stream)[0]
    entry = next(DeadLetterQueue(page.client).find(_filter_of(keys, letter_id)), None)
    if entry is None or entry.letter is None:
        raise MillstreamError(f"there is no dead letter {letter_id} (any more)")
    return keys, entry, entry.letter


def _base_of(page: PageRequest, letter: DeadLetter) -> Sequence[bytes]:
    """The fields with which the form begins: those of the dead letter, or those before its edits.

    Raises MillstreamError if it has none.
    """
    if not (page.query.get(_ORIGINAL) or page.field(_ORIGINAL)):
        return unedited(letter.pairs)
    if letter.pairs_before_edit is None:
        raise MillstreamError(f"{letter.letter_id} is not the dead letter of an edited copy")
    return unedited(letter.pairs_before_edit)


def _filter_of(keys: HandlerKeys, letter_id: str) -> DeadLetterFilter:
    return DeadLetterFilter(app=keys.app, handler=keys.handler, stream=keys.stream, ids=(letter_id,))


def _rows_of(page: PageRequest, base: Sequence[bytes]) -> list[tuple[str, str | None]]:
    """Names and values as a form has them; None for a value that is hidden, or too long to be shown whole."""
    return [
        (escape(name), escape(value) if page.display.value(escape(name), value) == escape(value) else None)
        for name, value in pairs_of(base)
    ]


def _pairs_of(page: PageRequest, letter: DeadLetter) -> list[bytes]:
    """The fields that the form asks for: a row without a name is left out, a value that was not shown stays.

    Raises ConfigError for an invalid escape, and if no field is left.
    """
    found: list[bytes] = []
    base = _base_of(page, letter)
    rows = _rows_of(page, base)
    for at, ((_, value), pair) in enumerate(zip(rows, pairs_of(base), strict=True)):
        if value is not None:
            found += _row(page, at)
        elif not page.field(f"remove{at}"):
            found += pair
    for at in range(len(rows), len(rows) + _BLANK_ROWS):
        found += _row(page, at)
    if not found:
        raise ConfigError("a message needs at least one field: go back and leave one")
    return found


def _row(page: PageRequest, at: int) -> Sequence[bytes]:
    """The field of a row; none for a row without a name."""
    name = _bytes_of(page.field(f"name{at}"))
    return (name, _bytes_of(page.field(f"value{at}"))) if name else ()


def _bytes_of(text: str) -> bytes:
    """What a field of the form means: browsers send line ends as CRLF, and those of the message itself are escaped."""
    return unescape(text.replace("\r\n", "\n"))


def _confirm(page: PageRequest, about: dict[str, str], letter: DeadLetter, after: Sequence[bytes]) -> Response:
    before, base, original = unedited(letter.pairs), _base_of(page, letter), page.field(_ORIGINAL)
    changes, old, new = compare(before, after), dict(pairs_of(before)), dict(pairs_of(after))
    given = compare(base, after)  # what the command has to be told
    rows = {
        name: escape(_bytes_of(values[0]))
        for name, values in page.form.items()
        if name.startswith(("name", "value", "remove"))
    }
    options = ["--original"] if original else []
    options += [f"--set {quote(escape(name))}=VALUE" for name in (*given.changed, *given.added)]
    options += [f"--remove {quote(escape(name))}" for name in given.removed]
    values = [
        f"{escape(name)}: {page.display.value(escape(name), old[name])} becomes {page.display.value(escape(name), new[name])}"
        for name in changes.changed
    ]
    values += [f"{escape(name)}: {page.display.value(escape(name), new[name])}" for name in changes.added]
    return page.render(
        "confirm.html",
        question=f"Redrive dead letter {about['id']} of {about['handler']} with other fields",
        sentences=[f"Its fields would be those of the form: {changes.describe()}.", *values, *_RULES],
        path="/letter/edit",
        fields={**about, **rows, _ORIGINAL: original, "confirm": "edit"},
        typed=None,
        command=" ".join(
            ("millstream dlq edit", about["handler"], about["id"], "--stream", quote(about["stream"]), *options)
        ),
        back=page.url("/letter/edit", **about, **({_ORIGINAL: original} if original else {})),
    )
