"""Whether entries are missing at a reader's position: decided from a read and the stream's own counters. No I/O.

Each read begins *at* the last entry that was delivered, not after it. If that entry comes back first, nothing after it
can have been trimmed, since trimming takes the oldest: that is the whole cost in the usual case. If it does not, the
counters of XINFO STREAM (Redis 7.0: entries-added, length, max-deleted-entry-id) say exactly how many entries went
unread, and nearly always whether it is still the same stream: two histories may end in the same counters.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from millstream.errors import CommandFailed

ZERO = b"0-0"
_LAST_SEQ = (1 << 64) - 1
Entry = list[Any]
"""An entry as hiredis has it: `[id, [name, value, ...]]`."""


def number(entry_id: bytes) -> tuple[int, int]:
    """An id, for comparisons."""
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)


def before(entry_id: bytes) -> bytes:
    """The id right before: what to read after, to get the entry itself too."""
    ms, _, seq = entry_id.partition(b"-")
    if seq != b"0":
        return b"%b-%d" % (ms, int(seq) - 1)
    return b"%d-%d" % (int(ms) - 1, _LAST_SEQ) if ms != b"0" else ZERO


class StreamCounters(NamedTuple):
    """What XINFO STREAM says of a stream that exists; an id of an entry is None where there is no entry."""

    top: bytes
    first: bytes | None
    last: bytes | None
    length: int
    added: int
    deleted: bytes

    @property
    def removed(self) -> int:
        """How many entries were ever removed."""
        return self.added - self.length


MISSING = StreamCounters(top=ZERO, first=None, last=None, length=0, added=0, deleted=ZERO)
"""The facts of a stream that does not exist."""


def counters_of(reply: Any) -> StreamCounters | None:
    """Understand a reply of XINFO STREAM; None if it is an error that says nothing of the stream."""
    if isinstance(reply, Exception):
        return MISSING if isinstance(reply, CommandFailed) and "no such key" in str(reply) else None
    named = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    first, last = named[b"first-entry"], named[b"last-entry"]
    length = int(named[b"length"])
    return StreamCounters(
        top=named[b"last-generated-id"],
        first=first[0] if first else None,
        last=last[0] if last else None,
        length=length,
        added=int(named.get(b"entries-added", length)),
        deleted=named.get(b"max-deleted-entry-id", ZERO),
    )


@dataclass(frozen=True, slots=True)
class ReadResult:
    """One read: of the entries after `position`, which is the `ordinal`-th ever added (None: not known).

    * `proven`: at `position` there was an entry of this stream; otherwise it may be any id, as a subscriber gave it
    * `present`: the entry at `position` was still there, or the position is the very beginning
    * `full`: there may be more entries than these
    """

    position: bytes
    ordinal: int | None
    proven: bool
    present: bool
    entries: list[Entry]
    full: bool


class Verdict(NamedTuple):
    """What a reading means.

    * `what`: "sound": deliver the entries; "again": the stream changed between read and counters; "gone": there is no
      such stream; "another": this is not the stream that was followed, or Redis lost its end, and entries of it may lie
      before the position; "trimmed", "recreated": a gap before the entries
    * `missed`: how many entries are in the gap
    * `ordinal`: that of the last of the entries
    """

    what: Literal["sound", "again", "gone", "another", "trimmed", "recreated"]
    missed: int | None = None
    ordinal: int | None = None


def detect_gap(reading: ReadResult, facts: StreamCounters) -> Verdict:
    """Say whether anything is missing between a position and what was read after it."""
    entries, position = reading.entries, reading.position
    if facts is MISSING:
        if entries:
            return Verdict("again")
        return Verdict("gone", ordinal=0) if position != ZERO else Verdict("sound", ordinal=0)
    if position != ZERO and number(facts.top) < number(position):
        return Verdict("another")
    if reading.present and (position != ZERO or reading.ordinal is None):
        return Verdict("sound", ordinal=_ordinal(reading, facts))
    if facts.first is not None and number(facts.first) <= number(position):  # older ones remain
        if not entries and facts.last is not None and number(facts.last) > number(position):
            return Verdict("again")
        return Verdict("another") if _is_another(reading, facts) else Verdict("sound", ordinal=_ordinal(reading, facts))
    if facts.first != (entries[0][0] if entries else None):
        return Verdict("again")
    removed, ordinal = facts.removed, _ordinal(reading, facts)
    if reading.ordinal is None:
        return Verdict("trimmed" if removed else "sound", ordinal=ordinal)
    if removed < reading.ordinal:  # at least as many as were delivered must have gone
        return Verdict("recreated", ordinal=ordinal)
    missed = removed - reading.ordinal
    return Verdict("trimmed" if missed else "sound", missed or None, ordinal)


def _is_another(reading: ReadResult, facts: StreamCounters) -> bool:
    """Whether the entry at the position, which is gone while older ones remain, never was an entry of this stream.

    A trim takes the oldest, so it must have been deleted by itself: then the stream knows of a removed entry, and of a
    deleted id as high as the position. Redis 8.2 trims entries out of turn if asked to (ACKED), which may leave that id
    lower: then the number of entries ever added decides.
    """
    if not reading.proven:
        return False
    expected = None if reading.ordinal is None else reading.ordinal + len(reading.entries)
    if expected is not None and facts.added < expected:
        return True
    if number(facts.deleted) > number(reading.position):
        return False  # unread entries may have been deleted too
    if facts.removed == 0:
        return True
    all_read = (reading.entries[-1][0] if reading.entries else reading.position) == facts.top
    return expected is not None and all_read and facts.added != expected


def _ordinal(reading: ReadResult, facts: StreamCounters) -> int | None:
    """Which entry of all ever added the last one read is."""
    entries = reading.entries
    end = entries[-1][0] if entries else reading.position
    if end == facts.top or facts.first is None:  # none is left, so none will be read
        return facts.added
    first = facts.first
    if first is not None and entries and first == entries[0][0] and number(facts.deleted) < number(first):
        return facts.removed + len(entries)
    return None if reading.ordinal is None else reading.ordinal + len(entries)
