"""Dead letters of a handler: in groups, one group, one letter; redrive and purge."""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from starlette.responses import Response

from millstream.admin.audit_log import AuditLog
from millstream.admin.dead_letter_groups import (
    MOST_LETTERS,
    FoundLetters,
    LetterGroup,
    find_letters,
    fingerprint_of,
    group_letters,
)
from millstream.admin.findings import quoted
from millstream.admin.letter_export import LetterExport
from millstream.delivery.dead_letter_queue import DeadLetterEntry, DeadLetterFilter, DeadLetterQueue
from millstream.delivery.rate_override import format_rate, parse_rate
from millstream.errors import ConfigError, MillstreamError
from millstream.redis_client.escaping import escape, unescape
from millstream.redis_client.formats import pluralize, progress
from millstream.redis_client.key_names import from_wire, to_wire
from millstream.services.console.downloads import Download
from millstream.services.console.pages import PageRequest
from millstream.services.console.views import redrives
from millstream.services.web.errors import Refused

_MOST_SHOWN = 100
_MOST_IN_COMMAND = 20
_GROUP_FIELDS = ("reason", "error", "sample")
"""What names a group in addresses and forms."""


def letters(page: PageRequest) -> Response:
    """The groups of a handler's dead letters; with a reason and an error, the letters of one group."""
    name = page.wanted("handler")
    app, handler = _split(page, name)
    found = find_letters(page.client, app=app, handler=handler)
    groups = group_letters(found.letters)
    wanted = _wanted_group(page, app, handler)
    if wanted is not None:
        group = next((one for one in groups if (one.reason, one.fingerprint) == wanted), None)
        return page.render(
            "letter_group.html",
            name=name,
            group=group,
            named={"handler": name, **(_name_of(page, group) if group else {})},
            error=page.display.text(wanted[1], "error"),
            has_more=found.has_more,
            most=MOST_LETTERS,
            shown=[(one, *_texts_of(page, one)) for one in (group.letters[:_MOST_SHOWN] if group else ())],
        )
    return page.render(
        "letters.html",
        name=name,
        redrives=redrives.under_way(page, app, handler),
        format_rate=format_rate,
        total=len(found.letters),
        has_more=found.has_more,
        most=MOST_LETTERS,
        groups=[
            (
                one,
                page.display.text(one.fingerprint, "error"),
                page.url("/letters", handler=name, **_name_of(page, one)),
                _texts_of(page, one.letters[0]),
            )
            for one in groups
        ],
    )


def letter(page: PageRequest) -> Response:
    """One dead letter in full."""
    name, stream, letter_id = page.wanted("handler"), page.wanted_name("stream"), page.wanted("id")
    app, handler = _split(page, name)
    wanted = DeadLetterFilter(app=app, handler=handler, stream=stream, ids=(letter_id,))
    entry = next(DeadLetterQueue(page.client).find(wanted), None)
    if entry is None:
        raise MillstreamError(f"there is no dead letter {letter_id} (any more)")
    found = entry.letter
    return page.render(
        "letter.html",
        name=name,
        entry=entry,
        key=None if found is None or found.key is None else page.display.key(found.key),
        error=page.display.text(found.error if found else entry.problem, "error"),
        fields=page.display.fields(found.pairs if found else entry.pairs),
        before_edit=page.display.fields(found.pairs_before_edit) if found and found.pairs_before_edit else None,
        traceback=page.display.text(found.traceback, "traceback") if found else "",
    )


def redrive(page: PageRequest) -> Response:
    """Send dead letters back to their streams, once their number is confirmed: now, or at a rate from now on."""
    rate, problem = None, ""
    try:
        rate = parse_rate(text) if (text := page.field("rate").strip()) else None
    except ConfigError as error:  # the form is shown again, with what it had
        problem = str(error)
    selected = _selected(page)
    found = [one for one in selected.letters if not one.copy_id]
    if not found:
        raise Refused(409, "they stay: an edited copy of each is under way, and each goes with the commit of its copy")
    if problem or not _is_confirmed(page, found):
        staying = len(selected.letters) - len(found)
        sentences = [
            f"{pluralize(len(found), 'dead letter')} would be redriven: {_by_stream(found)}.",
            *([f"{staying:,} more would stay, as an edited copy of each is under way."] if staying else []),
            *_of_more(page, selected),
            "Each goes to the end of its stream, in the order in which they were published.",
            "Only this handler processes them again. Other messages of their keys have been processed since.",
            "Without a rate all are redriven at once.",
            "With one, this console goes on when you leave the page: that of the dead letters shows how far it is.",
        ]
        return _confirm(page, "redrive", sentences, found, problem, has_more=selected.has_more)
    refs = sorted((one.ref for one in found), key=lambda ref: ref[:3])
    if rate is not None:
        return redrives.start(page, refs, rate=rate, about=_about(page, found))
    moved, problems = 0, []
    with page.audit("dlq redrive", **_about(page, found)) as action:
        action.done_before = progress(0, len(found), "redriven")
        for one in DeadLetterQueue(page.client).redrive(refs):
            moved += one.new_id is not None
            problems += [f"{one.ref.letter_id}: {one.problem}"] if one.new_id is None else []
            action.result = action.done_before = progress(moved, len(found), "redriven")
    return _report(page, f"{pluralize(moved, 'dead letter')} redriven", problems, selected)


def purge(page: PageRequest) -> Response:
    """Delete dead letters for good, once their number is typed."""
    selected = _selected(page)
    found = selected.letters
    if not _is_confirmed(page, found):
        copies = sum(bool(one.copy_id) for one in found)
        sentences = [
            f"{pluralize(len(found), 'dead letter')} would be deleted for good, with their messages: {_by_stream(found)}.",
            *([f"Edited copies of {copies:,} of them are under way, and go on."] if copies else []),
            *_of_more(page, selected),
        ]
        return _confirm(page, "purge", sentences, found, has_more=selected.has_more)
    removed = 0
    with page.audit("dlq purge", **_about(page, found)) as action:

        def count(number: int) -> None:
            nonlocal removed
            removed += number
            action.result = action.done_before = progress(removed, len(found), "purged")

        count(0)
        DeadLetterQueue(page.client).purge([one.ref for one in found], on_removed=count)
    return _report(page, f"{pluralize(removed, 'dead letter')} purged", [], selected)


def export(page: PageRequest) -> Response:
    """The dead letters of a handler, or of one group, as lines of JSON."""
    name = page.wanted("handler")
    app, handler = _split(page, name)
    reason, fingerprint = _wanted_group(page, app, handler) or (None, None)
    wanted = DeadLetterFilter(app=app, handler=handler, reason=reason)
    letters = LetterExport(page.client, wanted, fingerprint=fingerprint, redact=page.display.redact)
    log = AuditLog(page.client)
    record = log.begin(by=page.viewer.name, action="dlq show", about=_named(page))
    try:
        first = letters.next_part(page.client)
    except MillstreamError as failure:
        log.end(record, f"failed: {failure}")
        raise
    return Download(
        page.clients,
        f"dead-letters-{name}.jsonl",
        first=first,
        read=letters.next_part,
        record=record,
        result=lambda: f"{letters.count:,} read",
    )


def _selected(page: PageRequest) -> FoundLetters:
    """The dead letters that a form names: those that are ticked if it says so, else a group, else all.

    Raises ConfigError if none is ticked, and MillstreamError if there are none.
    """
    app, handler = _split(page, page.wanted("handler"))
    is_selection = bool(page.field("only"))
    places = [
        (from_wire(unescape(stream)), letter_id)
        for letter_id, _, stream in map(_parts, page.form.get("letter", ()))
        if is_selection
    ]
    if is_selection and not places:
        raise ConfigError("no dead letter is selected: go back and tick some")
    reason, fingerprint = _wanted_group(page, app, handler) or (None, None)
    found = find_letters(page.client, app=app, handler=handler, reason=reason, fingerprint=fingerprint, places=places)
    if not found.letters:
        raise MillstreamError("there are no such dead letters (any more)")
    return found


def _parts(place: str) -> tuple[str, str, str]:
    return place.partition(" ")


def _is_confirmed(page: PageRequest, found: Sequence[DeadLetterEntry]) -> bool:
    """Whether the form confirms exactly these dead letters, with their number."""
    return page.field("confirm") == str(len(found)) and page.field("of") == _digest(found)


def _digest(found: Sequence[DeadLetterEntry]) -> str:
    """A short text that is another one for other dead letters."""
    names = (to_wire(f"{one.letter_id} {one.keys.stream}\n") for one in found)
    return blake2b(b"".join(names), digest_size=16).hexdigest()


def _confirm(
    page: PageRequest,
    verb: str,
    sentences: Sequence[str],
    found: Sequence[DeadLetterEntry],
    problem: str = "",
    *,
    has_more: bool,
) -> Response:
    """Ask for the confirmation; `problem`: why what was filled in is refused."""
    name, group = page.wanted("handler"), _group_fields(page)
    rate = page.field("rate").strip() if verb == "redrive" else ""
    if problem:
        sentences = [f"Nothing is redriven: {problem}.", *sentences]
    elif page.field("confirm"):
        sentences = ["These are not the dead letters, or not the number, that was confirmed.", *sentences]
    return page.render(
        "confirm.html",
        status=400 if problem else 200,
        question=f"{verb.capitalize()} dead letters of {name}",
        sentences=sentences,
        path=f"/letters/{verb}",
        fields={
            "handler": name,
            **group,
            "only": page.field("only"),
            "of": _digest(found),
            **({"confirm": str(len(found))} if verb == "redrive" else {}),
        },
        repeated=[("letter", one) for one in page.form.get("letter", ())],
        **({"rate": rate} if verb == "redrive" else {}),
        typed=f"the number {len(found)}" if verb == "purge" else None,
        inputmode="numeric",
        command=_command(verb, name, found, is_all=_is_all(page), has_more=has_more, rate="" if problem else rate),
        back=page.url("/letters", handler=name, **group),
    )


def _command(
    verb: str, name: str, found: Sequence[DeadLetterEntry], *, is_all: bool, has_more: bool, rate: str
) -> str | None:
    """The command that does the same to these dead letters and to no others, at this rate if there is one; None if they
    are too many to name, or a name is not printable.
    """
    command = f"millstream dlq {verb} {name}"
    options = f" --rate {quoted(rate)}" if rate else ""
    if is_all:
        return command + (f" --limit {MOST_LETTERS}" if has_more else "") + options
    if len(found) > _MOST_IN_COMMAND or any(escape(one.keys.stream) != one.keys.stream for one in found):
        return None
    by_stream: dict[str, list[str]] = {}
    for one in found:  # ids are those of a stream: another stream may have the same ones
        by_stream.setdefault(one.keys.stream, []).append(one.letter_id)
    return " && ".join(
        f"{command} {' '.join(ids)} --stream {quoted(stream)}{options}" for stream, ids in by_stream.items()
    )


def _report(page: PageRequest, done: str, problems: Sequence[str], selected: FoundLetters) -> Response:
    return page.render(
        "letters_done.html",
        name=page.wanted("handler"),
        done=done,
        more=_of_more(page, selected),
        problems=[page.display.text(one, "error") for one in problems[:_MOST_SHOWN]],
    )


def _split(page: PageRequest, name: str) -> tuple[str, str]:
    """App and handler. Raises MillstreamError if no such handler has run."""
    found = page.places_of(name)[0]
    return found.app, found.handler


def _about(page: PageRequest, found: Sequence[DeadLetterEntry]) -> dict[str, str]:
    return {**_named(page), "letters": f"{len(found):,}"}


def _named(page: PageRequest) -> dict[str, str]:
    """What a form names, for the audit: the handler, and the group if it names one."""
    return {"handler": page.wanted("handler"), **_group_fields(page)}


def _is_all(page: PageRequest) -> bool:
    """Whether a form is about all dead letters of the handler: it names no group and no selection."""
    return not _group_fields(page) and not page.field("only")


def _of_more(page: PageRequest, selected: FoundLetters) -> list[str]:
    """The sentence that says what becomes of the dead letters after the first 5,000, if there are any."""
    if not selected.has_more or page.field("only"):
        return []
    rest = ", or use the command, which takes all without --limit" if _is_all(page) else ""
    first = f"The console takes the first {MOST_LETTERS:,} dead letters of a handler"
    return [f"{first}, and this one has more: repeat this for the rest{rest}."]


def _by_stream(found: Sequence[DeadLetterEntry]) -> str:
    counts = Counter(one.keys.stream for one in found)
    return ", ".join(f"{count:,} of {escape(stream)}" for stream, count in counts.most_common(5)) + (
        f" and {len(counts) - 5:,} more streams" if len(counts) > 5 else ""
    )


def _name_of(page: PageRequest, group: LetterGroup) -> dict[str, str]:
    """What names a group in addresses and forms: its reason and error; if that is hidden, the first of its letters."""
    if _is_shown(page, group.fingerprint):
        return {"reason": group.reason, "error": escape(group.fingerprint)}
    first = group.letters[0]
    return {"sample": f"{first.letter_id} {escape(first.keys.stream)}"}


def _group_fields(page: PageRequest) -> dict[str, str]:
    """What names a group in a form; nothing if it names none."""
    return {name: text for name in _GROUP_FIELDS if (text := page.field(name))}


def _wanted_group(page: PageRequest, app: str, handler: str) -> tuple[str, str] | None:
    """Reason and fingerprint of the group that an address or a form names; None if it names none.

    Raises MillstreamError if the letter that names it is gone, and for a hidden error: a guess is not confirmed.
    """
    reason, error, sample = (page.query.get(name) or page.field(name) for name in _GROUP_FIELDS)
    if sample:
        letter_id, _, stream = _parts(sample)
        wanted = DeadLetterFilter(app=app, handler=handler, stream=from_wire(unescape(stream)), ids=(letter_id,))
        entry = next(DeadLetterQueue(page.client).find(wanted), None)
        if entry is not None:
            return entry.reason, fingerprint_of(entry)
    elif not reason:
        return None
    elif _is_shown(page, fingerprint := from_wire(unescape(error))):
        return reason, fingerprint
    raise MillstreamError("there are no such dead letters (any more)")


def _is_shown(page: PageRequest, fingerprint: str) -> bool:
    return page.display.text(fingerprint, "error") == fingerprint


def _texts_of(page: PageRequest, entry: DeadLetterEntry) -> tuple[str, str, str]:
    """The address of a dead letter, its key and its error."""
    found = entry.letter
    url = page.url("/letter", handler=entry.keys.label, stream=escape(entry.keys.stream), id=entry.letter_id)
    key = page.display.key(found.key) if found and found.key is not None else "-"
    return url, key, page.display.text((found.error if found else entry.problem).partition("\n")[0], "error")
