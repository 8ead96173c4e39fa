"""Dead letters of a handler in groups: those with the same reason and about the same error."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from millstream.delivery.dead_letter_queue import DeadLetterEntry, DeadLetterFilter, DeadLetterQueue
from millstream.model import EntryId
from millstream.redis_client.client import Client

MOST_LETTERS = 5_000
"""So many dead letters of a handler, the first ones, are put in groups."""

# What a name has, such as that of an encoding, is no number of the message: those in the texts of Python and millstream.
_NAMES_WITH_NUMBERS = r"\b(?:utf-?(?:8|16|32)|iso[ -]?(?:8601|8859-\d+)|base64|ipv[46])\b"
_NUMBER = re.compile(rf"({_NAMES_WITH_NUMBERS})|0x[0-9a-f]+|\d+(?:\.\d+)*", re.IGNORECASE)
_FINGERPRINT_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class LetterGroup:
    """Dead letters with one reason and one fingerprint of their errors.

    * `fingerprint`: the first line of the error, its numbers replaced by `N`
    * `first_ms`, `last_ms`: when the first and the last were dead-lettered, in Unix milliseconds
    * `letters`: all of them, in the order in which they were dead-lettered
    """

    reason: str
    fingerprint: str
    letters: Sequence[DeadLetterEntry]

    @property
    def first_ms(self) -> int:
        """When the first was dead-lettered."""
        return EntryId.parse(self.letters[0].letter_id).ms

    @property
    def last_ms(self) -> int:
        """When the last was dead-lettered."""
        return max(EntryId.parse(one.letter_id).ms for one in self.letters)


class FoundLetters(NamedTuple):
    """Dead letters of a handler; `has_more`: it has more than the first 5,000, among which these were sought."""

    letters: Sequence[DeadLetterEntry]
    has_more: bool


def fingerprint_of(entry: DeadLetterEntry) -> str:
    """The first line of the error of a dead letter, its numbers replaced by `N`."""
    error = entry.letter.error if entry.letter else entry.problem
    return _NUMBER.sub(lambda found: found[1] or "N", error.partition("\n")[0])[:_FINGERPRINT_CHARS]


def find_letters(
    client: Client,
    *,
    app: str,
    handler: str,
    reason: str | None = None,
    fingerprint: str | None = None,
    places: Sequence[tuple[str, str]] = (),
) -> FoundLetters:
    """The first 5,000 dead letters of a handler, and of these the wanted ones: without messages and tracebacks, which
    would take as much memory as they do in Redis.

    `places`: those with these streams and letter ids, wherever they are in the queues; () for all. Raises RedisError, and
    ConfigError for an unknown reason.
    """
    selected = DeadLetterFilter(reason=reason)
    entries = _find(client, app, handler, places)
    found: list[DeadLetterEntry] = []
    for entry in islice(entries, MOST_LETTERS):
        if entry.matches(selected) and fingerprint in (None, fingerprint_of(entry)):
            letter = entry.letter and replace(entry.letter, pairs=(), traceback="", pairs_before_edit=None)
            found.append(replace(entry, pairs=(), letter=letter))
    return FoundLetters(found, next(entries, None) is not None)


def _find(client: Client, app: str, handler: str, places: Sequence[tuple[str, str]]) -> Iterator[DeadLetterEntry]:
    queue = DeadLetterQueue(client)
    if not places:
        yield from queue.find(DeadLetterFilter(app=app, handler=handler))
    ids: dict[str, list[str]] = {}
    for stream, letter_id in dict.fromkeys(places):
        ids.setdefault(stream, []).append(letter_id)
    for stream, some in ids.items():
        yield from queue.find(DeadLetterFilter(app=app, handler=handler, stream=stream, ids=tuple(some)))


def group_letters(letters: Iterable[DeadLetterEntry]) -> list[LetterGroup]:
    """The groups of these dead letters, the largest first."""
    found: dict[tuple[str, str], list[DeadLetterEntry]] = {}
    for entry in letters:
        found.setdefault((entry.reason, fingerprint_of(entry)), []).append(entry)
    groups = [LetterGroup(reason=name[0], fingerprint=name[1], letters=some) for name, some in found.items()]
    return sorted(groups, key=lambda one: -len(one.letters))
