"""`millstream why`: says why the messages of a key wait or not, and which command mends it."""

from collections.abc import Sequence
from typing import Any

from millstream.admin.handler_names import find_handler
from millstream.admin.inspection import find_handlers
from millstream.admin.key_explanation import KeyReport, explain_key
from millstream.admin.key_inspection import inspect_key
from millstream.cli.handler_names import HandlerName, Key, OnStream
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_line, print_message
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import json_value, unescape
from millstream.redis_client.formats import pluralize


def why(
    handler: HandlerName, key: Key, stream: OnStream = None, url: Url = DEFAULT_URL, as_json: JsonLines = False
) -> None:
    """Say why the messages of a key wait or not: the worker, the attempt, the last error, and what mends it.

    Of several streams it explains those where the key has messages or dead letters; if there are none, the one with
    most unread entries. Changes nothing.
    """
    with Client(url) as client:
        known = find_handlers(client)
        places = find_handler(client, handler, stream, known=known)
        is_only = len(find_handler(client, handler, None, known=known)) == 1
        found = inspect_key(client, places, unescape(key), is_only=is_only)
    shown = _chosen(found)
    for report in shown:
        explanation = explain_key(report)
        if as_json:
            print_json(_as_json(report) | {"why": explanation.text, "mend": explanation.mend})
        else:
            print_line(explanation.text)
            for command in explanation.mend:
                print_line(f"mend: {command}")
    if len(found) > len(shown):
        print_message(f"it does not wait on {pluralize(len(found) - len(shown), 'other stream')} of {handler}")


def _chosen(found: Sequence[KeyReport]) -> Sequence[KeyReport]:
    busy = [one for one in found if one.queue is not None or one.dead_letters]
    return busy or [max(found, key=lambda one: one.unread)]


def _as_json(report: KeyReport) -> dict[str, Any]:
    queue, handler = report.queue, report.handler
    return {
        "handler": handler.label,
        "stream": handler.stream,
        "key": json_value(report.key),
        "state": "free" if queue is None else queue.state,
        "blocked": report.is_blocked,
        "messages": 0 if queue is None else queue.length,
        "first": None if queue is None else queue.first_id or None,
        "worker": None if queue is None else queue.worker,
        "since_ms": None if queue is None else queue.since_ms,
        "until_ms": None if queue is None else queue.until_ms,
        "attempt": report.attempt,
        "attempts": report.last.attempts or None,
        "error": report.last.error or None,
        "limit": None if report.limit is None else json_value(report.limit.value),
        "parked": None if queue is None else queue.parked_reason,
        "paused": handler.paused,
        "alive": handler.consumers,
        "unread": report.unread,
        "delayed": 0 if report.delayed is None else report.delayed.count,
        "dead_letters": len(report.dead_letters),
    }
