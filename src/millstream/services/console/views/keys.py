"""The page of a key: why it waits, what waits, its state, dead letters and last outputs; park, unpark, skip, reset the state."""

from collections.abc import Sequence

from starlette.responses import Response

from millstream.admin.findings import quoted
from millstream.admin.inspection import reset_states
from millstream.admin.key_details import KeyDetails, read_key
from millstream.admin.key_explanation import explain_key
from millstream.admin.key_outputs import OutputSearch, find_key_outputs
from millstream.admin.key_places import KeyPlaces, find_key_places
from millstream.admin.key_queues import park as park_queue
from millstream.admin.key_queues import read_queues
from millstream.admin.key_queues import skip as skip_first
from millstream.admin.key_queues import unpark as unpark_queue
from millstream.delivery.keyed_stream import queue_of_key
from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys
from millstream.services.console.pages import PageRequest

_MOST_STREAMS, _MOST_LETTERS = 20, 20
_KEEP_MS, _KEEP_OPEN_MS = 5_000.0, 60_000.0
_DONE = {
    "parked": "The key is parked, from the end of the message in progress on.",
    "was-parked": "The key was parked already.",
    "unparked": "The key goes on.",
    "was-unparked": "The key was not parked.",
    "skipped": "The first message is a dead letter now. A parked key stays parked until it is unparked.",
    "unskipped": "Nothing was skipped: the first message is another one now.",
    "reset": "The state is deleted: the next message starts without one.",
    "unreset": "The key had no state.",
}


def key(page: PageRequest) -> Response:
    """One key of a handler, on one of its streams, or on those of all that have something of it."""
    name, stream, data = page.wanted("handler"), page.name("stream"), page.wanted_key()
    places = page.places_of(name, stream)
    streams = len(page.places_of(name))
    search = _search(page, name, places, data) if len(places) > _MOST_STREAMS else None
    having = places if search is None else search.found
    shown = (having or places[:1])[:_MOST_STREAMS]
    found = read_key(page.client, shown, data, is_only=streams == 1)
    outputs = None if page.is_renewal else find_key_outputs(page.client, places[0], data)
    return page.render(
        "key.html",
        name=name,
        key=page.display.key(data),
        raw=escape(data),
        found=[(one, _texts_of(page, one)) for one in found if len(shown) == 1 or one.has_content]
        or [(found[0], _texts_of(page, found[0]))],
        stream=page.query.get("stream", ""),
        streams=streams,
        search=search,
        more=len(having) - len(shown),
        outputs=outputs,
        searches=[(one, page.display.text(one.problem), _outputs_of(page, one)) for one in outputs.searches]
        if outputs
        else [],
        done_texts=_DONE,
    )


def _search(page: PageRequest, name: str, places: Sequence[HandlerKeys], data: bytes) -> KeyPlaces:
    """Where the key has something; an open page looks again once a minute."""
    keep_ms = _KEEP_OPEN_MS if page.is_renewal else _KEEP_MS
    found: KeyPlaces = page.shared.get(
        f"key {name} {escape(data)}", page.now_ms, lambda: find_key_places(page.client, places, data), keep_ms=keep_ms
    )
    return found


def park(page: PageRequest) -> Response:
    """Park the key."""
    keys, data = _place_of(page)
    reason = page.field("reason") or f"by {page.viewer.name}"
    with page.audit("key park", **_about(keys, data), reason=reason) as action:
        is_done = park_queue(page.client, keys, queue_of_key(data, b""), reason)
        action.result = "parked" if is_done else "was parked already"
    return _back(page, keys, "parked" if is_done else "was-parked")


def unpark(page: PageRequest) -> Response:
    """Unpark the key."""
    keys, data = _place_of(page)
    return _back(page, keys, "unparked" if unpark_key(page, keys, data) else "was-unparked")


def unpark_key(page: PageRequest, keys: HandlerKeys, data: bytes) -> bool:
    """Unpark a key, with its record; False if it was not parked. Raises ConfigError if its handler cannot unpark it now."""
    with page.audit("key unpark", **_about(keys, data)) as action:
        is_done = unpark_queue(page.client, keys, queue_of_key(data, b""))
        action.result = "unparked" if is_done else "was not parked"
    return is_done


def skip(page: PageRequest) -> Response:
    """Make the first message of the key a dead letter, once that is confirmed with its id."""
    keys, data = _place_of(page)
    queue = queue_of_key(data, b"")
    first_id = next((one.first_id for one in read_queues(page.client, keys, [queue])), "")
    if not page.field("confirm"):
        sentence = (
            f"Message {first_id} becomes a dead letter, and the next message of the key can run. It can be redriven."
        )
        return _confirm(
            page,
            keys,
            data,
            "/key/skip",
            question="Skip the first message",
            sentence=sentence if first_id else "",
            answer=first_id,
            command="millstream key skip",
        )
    with page.audit("key skip", **_about(keys, data), id=page.field("confirm")) as action:
        error, only = f"skipped by {page.viewer.name}", page.field("confirm")
        is_done = skip_first(page.client, keys, queue, error=error, only=only) is not None
        action.result = "skipped" if is_done else "not skipped: another message is the first one"
    return _back(page, keys, "skipped" if is_done else "unskipped")


def reset(page: PageRequest) -> Response:
    """Delete the state of the key, once that is confirmed."""
    keys, data = _place_of(page)
    if page.field("confirm") != "reset":
        sentence = (
            "The state of the key is deleted for good: the next message starts without one. A run whose batch works on "
            "the key now writes it back: stop it first to be sure."
        )
        return _confirm(
            page,
            keys,
            data,
            "/key/reset",
            question="Reset the state",
            sentence=sentence,
            answer="reset",
            command="millstream state reset",
        )
    with page.audit("state reset", **_about(keys, data)) as action:
        is_done = bool(reset_states(page.client, keys, [data]))
        action.result = "reset" if is_done else "had no state"
    return _back(page, keys, "reset" if is_done else "unreset")


def _place_of(page: PageRequest) -> tuple[HandlerKeys, bytes]:
    """The handler on a stream, and the key, that a form names. Raises MillstreamError if it has not run there."""
    name, stream = page.wanted("handler"), page.wanted_name("stream")
    return page.places_of(name, stream)[0], page.wanted_key()


def _about(keys: HandlerKeys, data: bytes) -> dict[str, str]:
    return {"handler": keys.label, "stream": escape(keys.stream), "key": escape(data)}


def _back(page: PageRequest, keys: HandlerKeys, done: str) -> Response:
    return page.redirect(
        "/key", handler=keys.label, stream=escape(keys.stream), key=escape(page.wanted_key()), done=done
    )


def _confirm(
    page: PageRequest,
    keys: HandlerKeys,
    data: bytes,
    path: str,
    *,
    question: str,
    sentence: str,
    answer: str,
    command: str,
) -> Response:
    if not sentence:
        raise ConfigError("none of the messages of this key is queued")
    fields = _about(keys, data)
    return page.render(
        "confirm.html",
        question=f"{question} of key {page.display.key(data)} of {keys.label}",
        sentences=[sentence],
        path=path,
        fields={**fields, "confirm": answer},
        typed=None,
        command=f"{command} {keys.label} --stream {quoted(keys.stream)} -- {quoted(data)}"
        if page.display.is_shown(data) and escape(keys.stream) == keys.stream
        else None,
        back=page.url("/key", **fields),
    )


def _texts_of(page: PageRequest, one: KeyDetails) -> dict[str, object]:
    display, explanation = page.display, explain_key(one.report, page.display.value_of)
    return {
        "why": display.text(explanation.text),
        "mend": [display.text(command) for command in explanation.mend],
        "traceback": display.text(one.report.last.traceback, "traceback"),
        "state": None if one.state is None else display.state(one.state),
        "state_problem": display.text(one.state_problem, "error"),
        "entries": [(entry.id, entry.pairs and display.fields(entry.pairs)) for entry in one.entries],
        "letters": [
            (letter.letter_id, letter.reason, display.text(letter.error, "error"))
            for letter in one.report.dead_letters[:_MOST_LETTERS]
        ],
    }


def _outputs_of(page: PageRequest, search: OutputSearch) -> list[tuple[str, int, list[tuple[str, str]]]]:
    """The id, the time (Unix milliseconds) and the fields of each output."""
    return [(one, EntryId.parse(one).ms, page.display.fields(pairs)) for one, pairs in search.found]
