"""Gap detection: whether entries are missing at a reader's position, by a read and the stream's own counters. No I/O.

Each read begins *at* the last entry delivered, not after it. If that entry comes back first, nothing after it can have
been trimmed, since a trim removes the oldest entries: in the usual case that is the whole cost. If it does not, the
counters of XINFO STREAM (Redis 7.0: entries-added, length, max-deleted-entry-id) say exactly how many entries went
unread, and nearly always whether it is still the same stream: two histories may end in the same counters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from millstream.errors import KeyMissing
from millstream.redis_client.replies import mapping_of

ZERO = b"0-0"
_LAST_SEQ = (1 << 64) - 1
Entry = list[Any]
"""An entry as hiredis returns it: `[id, [name, value, ...]]`."""


def id_as_numbers(entry_id: bytes) -> tuple[int, int]:
    """An id as a pair of numbers, for comparisons."""
    ms, _, seq = entry_id.partition(b"-")
    return int(ms), int(seq)


def id_before(entry_id: bytes) -> bytes:
    """The id right before: an XREAD after it returns the entry itself too."""
    ms, _, seq = entry_id.partition(b"-")
    if seq != b"0":
        return b"%b-%d" % (ms, int(seq) - 1)
    return b"%d-%d" % (int(ms) - 1, _LAST_SEQ) if ms != b"0" else ZERO


class StreamCounters(NamedTuple):
    """The reply of XINFO STREAM for a stream that exists; `first` and `last` are None where it has no entries."""

    last_generated: bytes
    first: bytes | None
    last: bytes | None
    length: int
    entries_added: int
    max_deleted: bytes

    @property
    def removed(self) -> int:
        """How many entries were ever removed."""
        return self.entries_added - self.length


MISSING = StreamCounters(last_generated=ZERO, first=None, last=None, length=0, entries_added=0, max_deleted=ZERO)
"""The counters of a stream that does not exist."""


def counters_of(reply: Any) -> StreamCounters | None:
    """Parse a reply of XINFO STREAM; None for an error that says nothing about the stream."""
    if isinstance(reply, Exception):
        return MISSING if isinstance(reply, KeyMissing) else None
    fields = reply if isinstance(reply, dict) else mapping_of(reply)
    first, last = fields[b"first-entry"], fields[b"last-entry"]
    length = int(fields[b"length"])
    return StreamCounters(
        last_generated=fields[b"last-generated-id"],
        first=first[0] if first else None,
        last=last[0] if last else None,
        length=length,
        entries_added=int(fields.get(b"entries-added", length)),
        max_deleted=fields.get(b"max-deleted-entry-id", ZERO),
    )


@dataclass(frozen=True, slots=True)
class ReadResult:
    """One read: the entries after `position`, which is the `ordinal`-th entry ever added (None: unknown).

    * `proven`: `position` was an entry of this stream; otherwise it may be any id, as a subscriber gave it
    * `present`: the entry at `position` was still there, or the position is the very beginning
    * `full`: the stream may have more entries than these
    """

    position: bytes
    ordinal: int | None
    proven: bool
    present: bool
    entries: Sequence[Entry]
    full: bool


class Verdict(NamedTuple):
    """The result of gap detection.

    * `kind`: "complete": deliver the entries; "retry": the stream changed between the read and the counters; "deleted":
      the stream does not exist; "diverged": it is another stream, or Redis lost the end of this one, and unread entries
      may be before the position; "trimmed", "recreated": a gap before the entries
    * `missed`: how many entries are in the gap; None: unknown
    * `ordinal`: the ordinal of the last entry read
    """

    kind: Literal["complete", "retry", "deleted", "diverged", "trimmed", "recreated"]
    missed: int | None = None
    ordinal: int | None = None


def detect_gap(result: ReadResult, counters: StreamCounters) -> Verdict:
    """Decide whether entries are missing between a position and the entries read after it."""
    entries, position = result.entries, result.position
    if counters is MISSING:
        if entries:
            return Verdict("retry")
        return Verdict("deleted", ordinal=0) if position != ZERO else Verdict("complete", ordinal=0)
    if position != ZERO and id_as_numbers(counters.last_generated) < id_as_numbers(position):
        return Verdict("diverged")
    if result.present and (position != ZERO or result.ordinal is None):
        return Verdict("complete", ordinal=_ordinal(result, counters))
    if counters.first is not None and id_as_numbers(counters.first) <= id_as_numbers(position):  # older entries remain
        if not entries and counters.last is not None and id_as_numbers(counters.last) > id_as_numbers(position):
            return Verdict("retry")
        return (
            Verdict("diverged")
            if _has_diverged(result, counters)
            else Verdict("complete", ordinal=_ordinal(result, counters))
        )
    if counters.first != (entries[0][0] if entries else None):
        return Verdict("retry")
    removed, ordinal = counters.removed, _ordinal(result, counters)
    if result.ordinal is None:
        return Verdict("trimmed" if removed else "complete", ordinal=ordinal)
    if removed < result.ordinal:  # a trim past the position removes every delivered entry
        return Verdict("recreated", ordinal=ordinal)
    missed = removed - result.ordinal
    return Verdict("trimmed" if missed else "complete", missed or None, ordinal)


def _has_diverged(result: ReadResult, counters: StreamCounters) -> bool:
    """Whether the entry at the position, missing while older entries remain, was never an entry of this stream.

    A trim removes the oldest entries, so XDEL must have removed it: then the stream has a removed entry, and a deleted
    id as high as the position. Redis 8.2 trims entries out of order on request (ACKED), which may leave that id lower:
    then the number of entries ever added decides.
    """
    if not result.proven:
        return False
    expected = None if result.ordinal is None else result.ordinal + len(result.entries)
    if expected is not None and counters.entries_added < expected:
        return True
    if id_as_numbers(counters.max_deleted) > id_as_numbers(result.position):
        return False  # unread entries may have been deleted too
    if counters.removed == 0:
        return True
    all_read = (result.entries[-1][0] if result.entries else result.position) == counters.last_generated
    return expected is not None and all_read and counters.entries_added != expected


def _ordinal(result: ReadResult, counters: StreamCounters) -> int | None:
    """The ordinal of the last entry read."""
    entries = result.entries
    end = entries[-1][0] if entries else result.position
    if end == counters.last_generated or counters.first is None:  # no entry is left to read
        return counters.entries_added
    first = counters.first
    if entries and first == entries[0][0] and id_as_numbers(counters.max_deleted) < id_as_numbers(first):
        return counters.removed + len(entries)
    return None if result.ordinal is None else result.ordinal + len(entries)
