"""Effects: one commit unit: the state, outputs, dead letters and progress of a run of messages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar, cast

import msgspec

from millstream.handlers.encoding import items_of_outputs
from millstream.handlers.key_timers import TimerChanges
from millstream.model import EntryId
from millstream.redis_client.resp import Arg

T = TypeVar("T")

FAILED_SUFFIX = "f"
"""Suffix of the crash-count field for failed attempts; the field without one counts runs that may have died."""

FROM_QUEUE = b"queue"
"""Stands for the expected key offset of entries that Spark runs from a key queue, where they were deferred."""

CANCELED = "-"
"""In `Effects.cancels`: messages of the unit were canceled, and the cancellation may end with it."""

ERROR_SUFFIX = "e"
"""Suffix of the field beside the crash counts that says why the last attempt failed (`last_error.py`)."""

SINCE_SUFFIX = "s"
"""Suffix of the field beside the crash counts that says when the first attempt failed, in Unix milliseconds."""

EXPIRED_SUFFIX = "l"
"""Suffix of the crash-count field for leases that expired while the entry was the first of its queue."""

CAUSES_SUFFIX = "c"
"""Suffix of the field beside the crash counts that says why a master's consumers lost the leases (JSON: cause, count)."""

ISOLATED_SUFFIX = "a"
"""Suffix of the crash-count field that names the process which runs the entry in isolation
(`worker/incarnations.py`).
"""


def crash_counts_of(entry_id: str) -> tuple[str, ...]:
    """Return all crash-count fields of an entry."""
    suffixes = (FAILED_SUFFIX, SINCE_SUFFIX, ERROR_SUFFIX, EXPIRED_SUFFIX, CAUSES_SUFFIX, ISOLATED_SUFFIX)
    return entry_id, *(entry_id + suffix for suffix in suffixes)


MAX_COMMIT_OUTPUTS = 10_000
"""Outputs and changes of timers of several units that one call commits at most, as Redis answers no other client meanwhile."""

_CHUNK_BYTES = 8 << 20
_OUTPUT_KEY = 8
_TIMERS = "T"
_FOR_OTHERS = "O"
_COPIES = "R"


class Effects(msgspec.Struct):
    """The effects of a run of messages of one key, of one unkeyed message or of a batch: committed whole or not at all.

    * `offset_field`, `expected_offset`: the offset field and the value that was loaded (b"" = none). For a key of a
      worker: the name of its queue and the token of its lease. For entries that Spark runs from a key queue: the
      queue's name and FROM_QUEUE
    * `first_id`, `last_id`, `message_count`: the messages it covers; `skipped_count`: those of them that are for another
      handler alone, and count neither as processed nor as dead letters
    * `state_field`, `state`: None leaves the state alone; b"" removes it
    * `other_ids`: for a worker's batch, or entries of a key queue, the ids of all but the last
    * `unfinished`: "" keeps the lease; a number ends it, and is how many of its claimed entries are not committed
    * `cancels`: the id of the message whose dead letter cancels the rest of the key; CANCELED if messages of the unit
      were canceled before; else ""
    * `cleared_counts`: fields of the crash counts that this commit clears
    * `copies`: ids of entries that may be edited copies of dead letters, which go with this commit
    * `outputs`: the entries to add to the output stream, each packed by `handlers.encoding.pack_output`
    * `dead_letters`: items of the entries to add
    * `timers`: changes of timers of the key, in order
    * `lowest_pending_id`: set by the commit: the first entry of the stream that was not done after it; b"" if none is known
    """

    offset_field: bytes
    expected_offset: bytes
    state_field: bytes = b""
    state: bytes | None = None
    first_id: str = ""
    last_id: str = ""
    message_count: int = 0
    skipped_count: int = 0
    other_ids: Sequence[str] = ()
    unfinished: int | Literal[""] = ""
    cancels: str = ""
    cleared_counts: Sequence[str] = ()
    outputs: Sequence[bytes] = ()
    dead_letters: Sequence[Sequence[Arg]] = ()
    timers: TimerChanges = ()
    copies: Sequence[str] = ()
    lowest_pending_id: bytes = b""

    def add_message(self, entry_id: str) -> None:
        """Extend the unit by one message."""
        if self.last_id and self.expected_offset == FROM_QUEUE:
            self.other_ids = _appended(self.other_ids, (self.last_id,))
        self.first_id = self.first_id or entry_id
        self.last_id = entry_id
        self.message_count += 1

    def add_outputs(self, outputs: Sequence[bytes]) -> None:
        """Add entries for the output stream."""
        self.outputs = _appended(self.outputs, outputs)

    def add_timers(self, timers: TimerChanges) -> None:
        """Add changes of timers of the key."""
        self.timers = _appended(self.timers, timers)

    def add_dead_letter(self, items: Sequence[Arg]) -> None:
        """Add a dead letter."""
        self.dead_letters = _appended(self.dead_letters, (items,))

    def clear_crash_counts(self, *fields: str) -> None:
        """Clear crash counts with this commit."""
        self.cleared_counts = _appended(self.cleared_counts, fields)

    def add_copy(self, entry_id: str) -> None:
        """Let the dead letter go whose edited copy this entry of the unit may be."""
        self.copies = _appended(self.copies, (entry_id,))

    @property
    def is_bare(self) -> bool:
        """True if its only effect is that its message is done."""
        return (
            not (self.outputs or self.dead_letters or self.cleared_counts or self.other_ids or self.expected_offset)
            and self.state is None
            and not (self.timers or self.copies or self.skipped_count)
        )

    @property
    def is_ack_only(self) -> bool:
        """True if it adds nothing to the data in Redis."""
        return not (self.outputs or self.dead_letters or self.state or self.timers)

    def count_unblocked(self) -> int:
        """Return how many of its messages were committed while an earlier one of the stream, of another key, was not done.

        Where it has not all their ids, on Spark, those whose ids it has.
        """
        if not self.lowest_pending_id:
            return 0
        lowest = EntryId.parse(self.lowest_pending_id)
        if lowest < EntryId.parse(self.first_id):
            return self.message_count
        return sum(lowest < EntryId.parse(one) for one in (*self.other_ids, self.last_id))

    @property
    def output_count(self) -> int:
        """How many outputs and changes of timers it has."""
        return len(self.outputs) + len(self.timers)

    @property
    def size(self) -> int:
        """About how many bytes it adds to the data in Redis."""
        size = (len(self.state) if self.state else 0) + sum(map(len, self.outputs))
        for items in self.dead_letters:
            size += sum([len(item) for item in items if isinstance(item, (bytes, str))])
        for timer, _, packed in self.timers:
            size += len(timer) + len(packed)
        return size

    def args(self, maxlen: int, state_ttl_ms: int | None = None) -> list[Arg]:
        """Return its arguments for the commit script; output streams are trimmed to about `maxlen` entries (0 =
        never), and the state expires after `state_ttl_ms` (None = never).
        """
        args: list[Arg] = [self.offset_field, self.expected_offset, self.first_id, self.last_id, self.message_count]
        args += (len(self.other_ids), *self.other_ids, self.unfinished, self.cancels)
        if self.state is None:
            args.append("")
        elif self.state and state_ttl_ms:
            args += ("E", self.state_field, self.state, state_ttl_ms)
        elif self.state:
            args += ("S", self.state_field, self.state)
        else:
            args += ("D", self.state_field)
        args += (len(self.cleared_counts), *self.cleared_counts)
        if self.skipped_count:
            args += (_FOR_OTHERS, self.skipped_count)
        if self.copies:
            args += (_COPIES, len(self.copies), *self.copies)
        args.append(len(self.outputs))
        if self.outputs:
            args += (_OUTPUT_KEY, maxlen)
            args += items_of_outputs(self.outputs)
        if self.timers:
            args += (_TIMERS, len(self.timers))
            for change in self.timers:
                args += change
        args.append(len(self.dead_letters))
        for items in self.dead_letters:
            args.append(len(items))
            args += items
        return args


def _appended(some: Sequence[T], more: Sequence[T]) -> Sequence[T]:
    # Most units have no outputs, dead letters or cleared counts: a list for each would dominate their cost.
    if not some:
        return list(more)
    assert isinstance(some, list)
    some += more
    return some


Unit = Effects | bytes
"""One unit of a commit: effects, or the id of an entry that is only acknowledged.

A handler without outputs only acknowledges most of its entries; objects for them would cost more than their commit.
"""

U = TypeVar("U", bound=Unit)


def chunk_by_size(some: Sequence[T], unit_of: Callable[[T], Unit]) -> Iterator[Sequence[T]]:
    """Split `some`, in order, into chunks that are each sent and answered well within a client's timeout.

    A call that times out is like an outage of Redis for the caller, and would be repeated for ever.
    """
    begin = total = outputs = 0
    units = [unit_of(one) for one in some]
    for at, unit in enumerate(() if are_ids(units) else units):
        if isinstance(unit, bytes):
            continue
        if not unit.is_ack_only:  # most units have no effects, and there are many
            size, count = unit.size, unit.output_count
            if (total + size > _CHUNK_BYTES or outputs + count > MAX_COMMIT_OUTPUTS) and at > begin:
                yield some[begin:at]
                begin, total, outputs = at, 0, 0
            total, outputs = total + size, outputs + count
    if some:
        yield some[begin:]


def split_bare(units: Sequence[U]) -> tuple[list[U], list[U]]:
    """Split the units into those whose only effect is that their message is done, in stream order, and the others.

    The same units always come in the same order: the replies of Redis number them.
    """
    all_are_ids = are_ids(units)
    bare: list[U] = list(units) if all_are_ids else []
    full: list[U] = []
    for unit in () if all_are_ids else units:
        (bare if isinstance(unit, bytes) or unit.is_bare else full).append(unit)
    keys = _sort_keys(last_ids_of(bare))
    if sorted(keys) == keys:  # almost always: one thread has run the messages in the order of the stream
        return bare, full
    return [bare[at] for at in sorted(range(len(bare)), key=keys.__getitem__)], full


def are_ids(units: Sequence[Unit]) -> bool:
    """Return whether all of `units` are ids, as most are of a handler without outputs."""
    return set(map(type, units)) <= {bytes}


def last_ids_of(units: Sequence[Unit]) -> list[bytes]:
    """Return the last id that each unit covers."""
    if are_ids(units):
        return cast("list[bytes]", list(units))
    return [one if isinstance(one, bytes) else one.last_id.encode() for one in units]


def _sort_keys(ids: list[bytes]) -> list[bytes] | list[tuple[int, ...]]:
    """Return what sorts these ids in stream order: as bytes where that is possible, which are compared much faster."""
    lengths = set(map(len, ids))
    if len(lengths) <= 1 and _have_one_dash(ids):
        return ids
    if len({one.find(b"-") for one in ids}) > 1:
        return [tuple(map(int, one.split(b"-"))) for one in ids]
    # Sequence numbers of one length: zeros after the dash.
    longest = max(lengths)
    dashes = {length: b"-".ljust(longest - length + 1, b"0") for length in lengths}
    return [one.replace(b"-", dashes[len(one)]) for one in ids]


def _have_one_dash(ids: Sequence[bytes]) -> bool:
    """Return whether the dash of each of these ids, all of one length, has the same place."""
    return not ids or b"".join(ids)[ids[0].find(b"-") :: len(ids[0])] == b"-" * len(ids)
