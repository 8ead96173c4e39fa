"""`millstream key outputs`: the last outputs of a key."""

from millstream.admin.handler_names import find_handler
from millstream.admin.key_outputs import OutputSearch, find_key_outputs
from millstream.cli.handler_names import HandlerName, Key
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_message, print_table, truncate_on_screen
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, escape_fields, json_fields, unescape

_FIELD_CHARS = 100


def outputs(handler: HandlerName, key: Key, url: Url = DEFAULT_URL, as_json: JsonLines = False) -> None:
    """Show the last 10 outputs of a key, the newest first, among the newest entries of the stream of its handler's outputs.

    An entry counts as an output of the key if its field key is the key, whichever program has written it.
    """
    with Client(url) as client:
        found = find_key_outputs(client, find_handler(client, handler, None)[0], unescape(key))
    entries = [(search.stream, entry_id, pairs) for search in found.searches for entry_id, pairs in search.found]
    if as_json:
        for stream, entry_id, pairs in entries:
            print_json({"stream": stream, "id": entry_id, **json_fields(pairs)})
    elif entries:
        rows = [
            (escape(stream), entry_id, truncate_on_screen(escape_fields(pairs), _FIELD_CHARS))
            for stream, entry_id, pairs in entries
        ]
        print_table(("~stream", "id", "+fields"), rows)
    for reason in found.reasons:
        print_message(reason)
    for search in found.searches:
        print_message(_extent(search))


def _extent(search: OutputSearch) -> str:
    stream = escape(search.stream)
    if search.problem is not None:
        return f"{stream} cannot be read: {search.problem}"
    return f"{len(search.found)} found among the last {search.searched:,} of {search.total:,} entries of {stream}"
