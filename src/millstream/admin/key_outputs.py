"""KeyOutputs: the last outputs of a key, found among the newest entries of the streams that its handler writes to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from millstream.admin.entry_pages import newest_first
from millstream.delivery.running_code import RunningCode, read_code
from millstream.errors import AccessDenied, WrongType
from millstream.model import value_of
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import unescape
from millstream.redis_client.key_names import HandlerKeys, from_wire, to_wire

_MOST_ENTRIES: Final = 1_000
_MOST_OUTPUTS: Final = 10


@dataclass(frozen=True, kw_only=True)
class OutputSearch:
    """A search for the outputs of a key in one stream.

    * `stream`, `field`: an entry of the stream counts as an output of the key if the value of this field is the key
    * `found`: the last outputs, the newest first, each with its id and its names and values
    * `searched`: how many of the newest entries were looked at, of `total`
    * `problem`: why the stream cannot be read; None if it can
    """

    stream: str
    field: bytes
    found: Sequence[tuple[str, Sequence[bytes]]] = ()
    searched: int = 0
    total: int = 0
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class KeyOutputs:
    """The last outputs of a key.

    * `searches`: one for each stream and field that the running code names, of several versions during a deploy
    * `reasons`: sentences why outputs are not looked for
    """

    searches: Sequence[OutputSearch]
    reasons: Sequence[str]


def find_key_outputs(client: Client, keys: HandlerKeys, key: bytes) -> KeyOutputs:
    """Find the last 10 outputs of a key of the handler among the last entries of each stream.

    It looks at 1,000 of them, or at those of `newest_first` that make a million bytes. Redis does not record which
    handler has written an entry, nor for which key: the search is by the field of the key, as the running code reports
    it. Raises RedisError.
    """
    codes = read_code(client, [(keys.app, keys.handler)])[keys.app, keys.handler]
    places = {(one.settings["into"], one.key_field) for one in codes if "into" in one.settings and one.key_field}
    return KeyOutputs(
        searches=[_search(client, from_wire(unescape(into)), unescape(field), key) for into, field in sorted(places)],
        reasons=list(_reasons(keys.label, codes)),
    )


def _reasons(label: str, codes: Sequence[RunningCode]) -> Iterator[str]:
    if not codes:
        yield f"No worker and no run reports the settings of {label} now, so its output stream is not known here."
    elif not any("into" in one.settings for one in codes):
        yield f"{label} has no into=, so it writes no outputs."
    fields = {one.key_field for one in codes if "into" in one.settings}
    if None in fields:
        yield (
            f"An earlier version of millstream runs {label} and does not report its key, so its outputs are not looked "
            "for."
        )
    if "" in fields:
        yield f"The key of {label} is not a field of its messages, so its outputs are not looked for."


def _search(client: Client, stream: str, field: bytes, key: bytes) -> OutputSearch:
    searched = 0

    def outputs() -> Iterator[tuple[str, Sequence[bytes]]]:
        nonlocal searched
        for entry_id, pairs in newest_first(client, stream, most=_MOST_ENTRIES):
            searched += 1
            if value_of(pairs, field) == key:
                yield entry_id, pairs

    try:
        found = list(islice(outputs(), _MOST_OUTPUTS))
        total = max(searched, client.execute("XLEN", to_wire(stream)))
    except (AccessDenied, WrongType) as error:
        return OutputSearch(stream=stream, field=field, problem=str(error))
    return OutputSearch(stream=stream, field=field, found=found, searched=searched, total=total)
