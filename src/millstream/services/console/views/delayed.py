"""Delayed messages: the streams that have some, those of one stream, and cancelling one."""

from collections.abc import Mapping
from shlex import quote

from starlette.responses import Response

from millstream.admin.delayed_streams import find_delayed_streams
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.errors import ConfigError
from millstream.redis_client.escaping import escape, unescape
from millstream.redis_client.key_names import from_wire
from millstream.services.console.pages import PageRequest

_PAGE = 100
_MOST_DIGITS = 15


def delayed(page: PageRequest) -> Response:
    """The streams that have delayed messages; of one of them, a hundred messages, in due order."""
    name = page.name("stream")
    if name is None:
        found, is_partial = find_delayed_streams(page.client)
        return page.render("delayed.html", found=found, is_partial=is_partial)
    messages = DelayedMessages(page.client)
    after = _position(page)
    read = messages.find(name, limit=_PAGE + 1, after=after) if page.may("payloads") else []
    shown = read[:_PAGE]
    return page.render(
        "delayed_stream.html",
        name=name,
        count=messages.count(name),
        found=[(one, page.display.fields(one.pairs)) for one in shown],
        after=_parameters(after),
        following=_parameters((shown[-1].due_ms, shown[-1].id)) if len(read) > _PAGE else None,
    )


def cancel(page: PageRequest) -> Response:
    """Cancel one delayed message, once that is confirmed."""
    name, message_id = page.wanted_name("stream"), page.wanted_name("id")
    fields = {"stream": escape(name), "id": escape(message_id)}
    after = _parameters(_position(page))
    if page.field("confirm") != "cancel":
        return page.render(
            "confirm.html",
            question=f"Cancel the delayed message {escape(message_id)} of {escape(name)}",
            sentences=["The message is deleted for good: it is never added to its stream."],
            path="/delayed/cancel",
            fields={**fields, **after, "confirm": "cancel"},
            typed=None,
            command=f"millstream delayed cancel {quote(escape(name))} {quote(escape(message_id))}",
            back=page.url("/delayed", stream=escape(name), **after),
        )
    with page.audit("delayed cancel", **fields) as action:
        cancelled = DelayedMessages(page.client).cancel(name, [message_id])
        action.result = "cancelled" if cancelled else "was moved or cancelled before"
    return page.redirect("/delayed", stream=escape(name), **after, done="cancelled" if cancelled else "gone")


def _position(page: PageRequest) -> tuple[int, str] | None:
    """The message behind which the page begins: when it is due, and its id. Raises ConfigError for what is none."""
    text = page.query.get("after") or page.field("after")
    due_ms, space, message_id = text.partition(" ")
    if not text:
        return None
    if not (space and due_ms.isascii() and due_ms.isdigit() and len(due_ms) <= _MOST_DIGITS):
        raise ConfigError(f"{escape(text)!r} is no place among delayed messages: follow a link of the console")
    return int(due_ms), from_wire(unescape(message_id))


def _parameters(after: tuple[int, str] | None) -> Mapping[str, str]:
    """The place of a message in an address or a form."""
    return {} if after is None else {"after": f"{after[0]} {escape(after[1])}"}
