"""`millstream dlq groups`: how many dead letters have about the same error, and since when."""

import time

from millstream.admin.dead_letter_groups import MOST_LETTERS, LetterGroup, find_letters, group_letters
from millstream.cli.dlq_selection import Reason, check_name, letter_filter
from millstream.cli.handler_names import HandlerNames
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_message, print_table, truncate_on_screen
from millstream.delivery.dead_letter_queue import DeadLetterQueue
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age

_ERROR_CHARS = 80


def groups(
    handlers: HandlerNames = None, reason: Reason = None, url: Url = DEFAULT_URL, as_json: JsonLines = False
) -> None:
    """List the dead letters of each handler in groups: those with the same reason and about the same error.

    The errors of a group have the same first line except for numbers. The largest group of a handler comes first.
    """
    wanted = letter_filter([handlers] if handlers else [], None, reason)
    found: list[tuple[str, LetterGroup]] = []
    with Client(url) as client:
        for app, name in dict.fromkeys((one.app, one.handler) for one in DeadLetterQueue(client).handlers(wanted)):
            letters, has_more = find_letters(client, app=app, handler=name, reason=reason)
            found += [(f"{app}.{name}", one) for one in group_letters(letters)]
            if has_more:
                print_message(f"{app}.{name} has more dead letters: the groups have the first {MOST_LETTERS:,}")
        if not found:
            check_name(client, [handlers] if handlers else [], None)
    if as_json:
        for label, one in found:
            figures = {"letters": len(one.letters), "first_ms": one.first_ms, "last_ms": one.last_ms}
            print_json({"handler": label, "reason": one.reason, "fingerprint": one.fingerprint, **figures})
    elif found:
        print_table(("~handler", "reason", "+error", ">letters", ">first", ">last"), [_row(*one) for one in found])
    else:
        print_message("there are no dead letters" + (" of these" if handlers or reason else ""))


def _row(label: str, group: LetterGroup) -> tuple[str, ...]:
    now_ms = time.time() * 1000
    first, last = (format_age(max(0.0, now_ms - at_ms)) for at_ms in (group.first_ms, group.last_ms))
    error = truncate_on_screen(escape(group.fingerprint), _ERROR_CHARS)
    return label, group.reason, error, f"{len(group.letters):,}", first, last
