"""DeadLetterQueue: messages that could not be processed, stored with the reason, to show, redrive or purge.

A dead letter is an entry of the handler's dead-letter stream (`HandlerKeys.dead_letters`), written in the same atomic step that
commits the message, so it is neither lost nor doubled. `DeadLetterQueue` is all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, get_args

from millstream.errors import AccessDenied, CommandFailed, ConfigError, MillstreamError, RedisError, WrongType
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import EDITED_FIELD, PREFIX, REDRIVE_FIELD, HandlerKeys, is_edited, to_wire
from millstream.redis_client.pipelining import send_all
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.resp import Arg, Command
from millstream.redis_client.scripts import Script

UNREADABLE = "unreadable"
"""The reason shown for an entry of a dead-letter stream that is no dead letter."""

REASONS: Sequence[str] = (*get_args(Reason), UNREADABLE)
"""All reasons that a filter accepts; UNREADABLE is the last."""

_REDRIVE = Script("producer/redrive")
_GONE = "it is not in the queue any more: another redrive or purge removed it"
_UNDER_WAY = "its edited copy is under way: "
_MAX_ITEMS = 7_900
_PAGE = 50
_DELETE_PAGE = 500


@dataclass(frozen=True, kw_only=True)
class DeadLetterFilter:
    """Selects dead letters: those that match all given fields.

    * `app`, `handler`, `stream`, `key`: where they come from
    * `reason`: why they are dead letters, one of REASONS
    * `since_ms`: dead-lettered at this time or later, in Unix milliseconds
    * `ids`: their letter ids; () for any

    Raises ConfigError for an unknown reason.
    """

    app: str | None = None
    handler: str | None = None
    stream: str | None = None
    key: bytes | None = None
    reason: str | None = None
    since_ms: int = 0
    ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.reason is not None and self.reason not in REASONS:
            raise ConfigError(f"unknown dead-letter reason {self.reason!r}: use one of {', '.join(REASONS)}")


class DeadLetterRef(NamedTuple):
    """Refers to one dead letter; sorts by stream, then by the original entry's id."""

    stream: str
    id: EntryId
    letter_id: str
    keys: HandlerKeys


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """An entry of a dead-letter stream: a `letter`; or None, the `problem`, and the `pairs` of a foreign entry.

    A foreign entry is one that millstream did not write, or cannot read. `copy_id`: the id of the letter's edited copy
    that is under way, with whose commit the letter goes; "" if there is none.
    """

    keys: HandlerKeys
    letter_id: str
    pairs: Sequence[bytes]
    letter: DeadLetter | None
    problem: str = ""
    copy_id: str = ""

    @property
    def reason(self) -> str:
        """Why it is a dead letter; "unreadable" for a foreign entry."""
        return self.letter.reason if self.letter else UNREADABLE

    @property
    def ref(self) -> DeadLetterRef:
        """Its reference; a foreign entry sorts first in its stream."""
        original = EntryId.parse(self.letter.id) if self.letter else ZERO_ID
        return DeadLetterRef(self.keys.stream, original, self.letter_id, self.keys)

    def matches(self, wanted: DeadLetterFilter) -> bool:
        """Whether the filter selects it by reason and key. A foreign entry has no key."""
        key = self.letter.key if self.letter else None
        return wanted.reason in (None, self.reason) and (wanted.key is None or wanted.key == key)


class Redriven(NamedTuple):
    """The outcome of one redrive: the id of the new entry; or None, and `problem` says why the letter stays."""

    ref: DeadLetterRef
    new_id: str | None
    problem: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether another redrive or purge came first: the letter is gone from the queue, or its copy is under way."""
        return self.problem == _GONE or self.problem.startswith(_UNDER_WAY)


class DeadLetterQueue:
    """The dead letters of all handlers of one Redis, with the redrive of SQS. Every method raises RedisError."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def handlers(self, wanted: DeadLetterFilter) -> list[HandlerKeys]:
        """Return the selected handlers and streams that have dead letters, sorted by name."""
        if wanted.app and wanted.handler and wanted.stream:
            return [HandlerKeys(wanted.app, wanted.handler, wanted.stream)]
        found = []
        for name in self._client.scan_streams(f"{PREFIX}:*:dead"):
            try:
                keys = HandlerKeys.parse(name)
            except ConfigError:
                continue  # another program's stream
            asked = ((wanted.app, keys.app), (wanted.handler, keys.handler), (wanted.stream, keys.stream))
            if all(want in (None, have) for want, have in asked):
                found.append(keys)
        return sorted(found, key=lambda keys: (keys.app, keys.handler, keys.stream))

    def find(self, wanted: DeadLetterFilter) -> Iterator[DeadLetterEntry]:
        """Yield the selected entries, handler by handler, in the order in which they were dead-lettered."""
        for keys in self.handlers(wanted):
            pages = self._find_by_id(keys, wanted.ids) if wanted.ids else self._find_since(keys, wanted.since_ms)
            for page in pages:
                yield from (entry for entry in self._parse_page(keys, page) if entry.matches(wanted))

    def read_after(self, keys: HandlerKeys, letter_id: str, count: int) -> list[DeadLetterEntry]:
        """Return the `count` entries of one handler on a stream that follow the one with this id."""
        page = self._client.execute("XRANGE", to_wire(keys.dead_letters), f"({letter_id}", "+", "COUNT", count)
        return self._parse_page(keys, page)

    def newest(self, keys: HandlerKeys) -> Iterator[DeadLetterEntry]:
        """Yield the entries of one handler on a stream, in the opposite order: the last one comes first."""
        end = "+"
        while True:
            page = self._client.execute("XREVRANGE", to_wire(keys.dead_letters), end, "-", "COUNT", _PAGE)
            yield from self._parse_page(keys, page)
            if len(page) < _PAGE:
                return
            end = f"({page[-1][0].decode()}"

    def select(self, wanted: DeadLetterFilter, limit: int | None = None) -> list[DeadLetterRef]:
        """Return references to the first `limit` selected letters, in the order of the original entries.

        Later dead letters are not among them. Raises MillstreamError for an id in `wanted.ids` that is not found, and
        ConfigError for one that exists for several handlers.
        """
        refs = [entry.ref for entry in islice(self.find(wanted), limit)]
        for letter_id in wanted.ids if limit is None else ():
            owners = [ref.keys for ref in refs if ref.letter_id == letter_id]
            if not owners:
                raise MillstreamError(f"there is no dead letter {letter_id} (any more): see `millstream dlq list`")
            if len(owners) > 1:
                names = " and ".join(f"{keys.label} on {keys.stream}" for keys in owners)
                raise ConfigError(f"dead letter {letter_id} exists for {names}: give its handler too, or --stream")
        return sorted(refs, key=lambda ref: ref[:3])

    def redrive(self, refs: Sequence[DeadLetterRef]) -> Iterator[Redriven]:
        """Move letters back to the tail of their streams, in the order of `refs`, some at each step of the iteration:
        nothing happens until it is iterated.

        Each is moved in one atomic step; one that was edited before goes with the commit of the new entry instead, as
        after `redrive_edited`. One whose edited copy is under way stays. The entry begins with a field that names its
        handler, so that no other handler of the stream processes it again. Interrupted at any point, or run twice at
        once, this neither loses nor doubles one. An error of one letter or its stream stops no other redrive: that letter stays, and its `problem` says why.
        Any other error is raised once all letters are yielded that are known to be redriven. After Unavailable,
        up to 50 of the next ones may have been redriven, too: redrive them again, which is safe.
        """
        for at in range(0, len(refs), _PAGE):
            yield from self._redrive_page(refs[at : at + _PAGE])

    def redrive_edited(self, ref: DeadLetterRef, pairs: Sequence[bytes], *, by: str) -> Redriven:
        """Add a copy of one letter with other fields to the tail of its stream. The letter stays in the queue until the
        copy is committed, and goes with that commit.

        Until then it is neither redriven nor edited again. If the copy becomes a dead letter, that replaces this one, and
        has the fields before the edit, too. The copy ends with a field that names `by`, who edited it, and that its
        handler sees. Raises ConfigError if `pairs` are none.
        """
        own = unedited(pairs)
        if not own:
            raise ConfigError("a message needs at least one field")
        (found,) = self._redrive_page([ref], [*own, EDITED_FIELD, to_wire(by)])
        return found

    def purge(self, refs: Sequence[DeadLetterRef], *, on_removed: Callable[[int], None] = lambda _: None) -> int:
        """Delete letters for good; return how many of them were still there.

        `on_removed` is called with the number of each step, which deletes some; an error is raised once it has had all
        numbers that are known, and no further step is done.
        """
        removed = 0
        for at in range(0, len(refs), _DELETE_PAGE):
            by_stream: dict[str, list[str]] = {}
            for ref in refs[at : at + _DELETE_PAGE]:
                by_stream.setdefault(ref.keys.dead_letters, []).append(ref.letter_id)
            commands: list[Command] = [("XDEL", to_wire(dead), *ids) for dead, ids in by_stream.items()]
            replies = send_all(self._client, commands)
            known = sum(reply for reply in replies if isinstance(reply, int))
            on_removed(known)
            for reply in replies:
                raise_if_error(reply)
            removed += known
        return removed

    def _redrive_page(self, refs: Sequence[DeadLetterRef], edited: Sequence[bytes] | None = None) -> Iterator[Redriven]:
        found = self._client.pipeline([("XRANGE", to_wire(s.keys.dead_letters), *([s.letter_id] * 2)) for s in refs])
        entries = [_redrive_args(ref, raise_if_error(reply), edited) for ref, reply in zip(refs, found, strict=True)]
        calls: list[tuple[Script, Sequence[Arg], Sequence[Arg]]] = [
            (_REDRIVE, _redrive_keys(ref), (ref.letter_id, *entry))
            for ref, entry in zip(refs, entries, strict=True)
            if not isinstance(entry, str)
        ]
        replies = iter(self._client.try_scripts(calls))
        errors: list[RedisError] = []
        for ref, entry in zip(refs, entries, strict=True):
            reply = entry if isinstance(entry, str) else next(replies)
            problem = "" if isinstance(reply, bytes) else _refusal_of(ref, reply)
            if isinstance(problem, RedisError):
                errors.append(problem)
            else:
                yield Redriven(ref, reply.decode() if isinstance(reply, bytes) else None, problem)
        if errors:
            raise errors[0]

    def _parse_page(self, keys: HandlerKeys, page: Sequence[tuple[bytes, list[bytes]]]) -> list[DeadLetterEntry]:
        """Parse entries of a dead-letter stream, and add which of them have an edited copy that is under way."""
        entries = [_parse_entry(keys, letter_id, pairs) for letter_id, pairs in page]
        copies = self._copies_under_way(keys, [entry.letter_id for entry in entries])
        return [replace(entry, copy_id=copies.get(entry.letter_id, "")) for entry in entries]

    def _copies_under_way(self, keys: HandlerKeys, letter_ids: Sequence[str]) -> Mapping[str, str]:
        """The ids of the edited copies of those letters that have one."""
        marks = [f"l{one}" for one in letter_ids]
        found = self._client.execute("HMGET", to_wire(keys.resent), *marks) if marks else ()
        copies = {letter_id: copy.decode() for letter_id, copy in zip(letter_ids, found, strict=True) if copy}
        # A copy that was deleted from its stream, or trimmed, is under way no more.
        there = send_all(self._client, [("XRANGE", to_wire(keys.stream), copy, copy) for copy in copies.values()])
        return {
            letter_id: copy
            for (letter_id, copy), entries in zip(copies.items(), there, strict=True)
            if not isinstance(entries, WrongType) and raise_if_error(entries)
        }

    def _find_since(self, keys: HandlerKeys, since_ms: int) -> Iterator[Sequence[tuple[bytes, list[bytes]]]]:
        start = str(since_ms)
        while True:
            page = self._client.execute("XRANGE", to_wire(keys.dead_letters), start, "+", "COUNT", _PAGE)
            yield page
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"

    def _find_by_id(self, keys: HandlerKeys, ids: Sequence[str]) -> Iterator[Sequence[tuple[bytes, list[bytes]]]]:
        exact = [str(EntryId.parse(letter_id)) for letter_id in ids]
        for at in range(0, len(exact), _PAGE):
            some = exact[at : at + _PAGE]
            replies = self._client.pipeline([("XRANGE", to_wire(keys.dead_letters), one, one) for one in some])
            yield [entry for reply in replies for entry in raise_if_error(reply)]


def _parse_entry(keys: HandlerKeys, letter_id: bytes, pairs: list[bytes]) -> DeadLetterEntry:
    try:
        letter = DeadLetter.parse(letter_id, pairs)
        if (letter.app, letter.handler, letter.stream) != (keys.app, keys.handler, keys.stream):
            raise ValueError(f"it belongs to {letter.app}.{letter.handler} on {letter.stream}")
    except KeyError as error:
        return DeadLetterEntry(keys, letter_id.decode(), pairs, None, f"it lacks the field {error}")
    except (ValueError, ConfigError) as error:
        return DeadLetterEntry(keys, letter_id.decode(), pairs, None, str(error))
    return DeadLetterEntry(keys, letter_id.decode(), pairs, letter)


def _refusal_of(ref: DeadLetterRef, reply: str | RedisError | None) -> str | RedisError:
    """Return why a letter stays; or the error, if it does not concern this letter alone."""
    match reply:
        case None:
            return _GONE
        case str():
            return reply
        case WrongType():
            return f"cannot add to {ref.stream}: the key holds no stream"
        case CommandFailed() if reply.code == "RESENT":
            return f"{_UNDER_WAY}{reply.detail}"
        case CommandFailed():
            return str(reply)
        case AccessDenied() if reply.concerns_key:
            return str(reply)
        case _:
            return reply


def unedited(pairs: Sequence[bytes]) -> list[bytes]:
    """Return the fields without the one that names an earlier editor: the next edit replaces it."""
    return [one for pair in pairs_of(pairs) if pair[0] != EDITED_FIELD for one in pair]


def _redrive_keys(ref: DeadLetterRef) -> tuple[bytes, ...]:
    return tuple(map(to_wire, (ref.keys.dead_letters, ref.stream, ref.keys.resent)))


def _redrive_args(
    ref: DeadLetterRef, found: list[tuple[bytes, list[bytes]]], edited: Sequence[bytes] | None
) -> list[bytes] | str:
    """Return when a letter goes, and names and values of the entry that it becomes; or why it cannot become one.
    `edited`: its fields, if they are not those of the letter.
    """
    if not found:
        return _GONE
    entry = _parse_entry(ref.keys, *found[0])
    if entry.letter is None:
        return f"it is no dead letter: {entry.problem}"
    items = [REDRIVE_FIELD, ref.keys.label.encode(), *(entry.letter.pairs if edited is None else edited)]
    if len(items) <= _MAX_ITEMS:
        was_edited = entry.letter.pairs_before_edit is not None and is_edited(items)
        return [b"move" if edited is None and not was_edited else b"keep", *items]
    return (
        f"its {len(items) // 2 - 1:,} fields are too many for one atomic step: add the fields shown by "
        f"`millstream dlq show {ref.letter_id} --json` by hand (XADD), then purge it"
    )
