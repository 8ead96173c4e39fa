"""KeyRun: the entries of one key in a task: which of them are processed, which are committed."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from millstream.delivery.cancellation import Cancellation
from millstream.delivery.deferral import DeferMode, Deferral, DeferredKey
from millstream.delivery.effects import FROM_QUEUE, Effects, crash_counts_of
from millstream.delivery.last_error import LastError
from millstream.errors import Unfinished
from millstream.handlers.attempt import Parked, RetryLater
from millstream.handlers.consecutive import Stretch, unpack
from millstream.model import ZERO_ID, EntryId, Message, Retry
from millstream.redis_client.key_names import EDITED_FIELD, REDRIVE_FIELD, own_pairs
from millstream.redis_client.resp import Arg

_HEAD_BYTES = 32  # at most so many of a packed entry are the beginning of the list and its first name, if that is ours
_pack = msgspec.msgpack.Encoder().encode
_DELETED = _pack([REDRIVE_FIELD, b""])  # a deleted entry: meant for no handler, so it is skipped


class Entry(NamedTuple):
    """An entry: its id, as text, and its fields, still packed as msgpack."""

    id_text: bytes
    packed: bytes

    @property
    def id(self) -> EntryId:
        """Its id, to compare."""
        return EntryId.parse(self.id_text)

    @property
    def may_be_for_one(self) -> bool:
        """True if it may be for one handler alone, as what was redriven is. Nothing is unpacked for that."""
        return REDRIVE_FIELD in self.packed[:_HEAD_BYTES]

    def add_copy_to(self, effects: Effects) -> None:
        """Add its id to the effects that complete it, if it may be the edited copy of a dead letter."""
        if self.may_be_for_one and EDITED_FIELD in self.packed:
            effects.add_copy(self.id_text.decode())


def _is_for_all(entry: Entry) -> bool:
    return not entry.may_be_for_one


class DeferReason(NamedTuple):
    """Why the rest of a run is deferred; the default: its key already has deferred messages. See `Deferral`."""

    mode: DeferMode = "append"
    detail: Arg = ""
    failed_attempts: int | None = None
    last_error: bytes = b""

    @classmethod
    def of(cls, outcome: RetryLater | Parked, attempt: int, retry: Retry) -> "DeferReason":
        """Return why a run is deferred after a failed attempt on its first message, under this retry policy."""
        if isinstance(outcome, RetryLater) and outcome.limited is not None:
            return cls("limit", outcome.limited, outcome.failed_attempts(attempt) or None)
        error = LastError.of(outcome, retry).pack()
        if isinstance(outcome, Parked):
            return cls("park", f"{outcome.reason}: {outcome.error}", attempt, error)
        return cls("backoff", round(outcome.delay_ms), outcome.failed_attempts(attempt), error)


@dataclass(slots=True, eq=False)
class KeyRun:
    """The messages of one key of one stream, in order; or a single message without a key.

    * `offset_field`: the field of its key offset
    * `entries`: not processed yet; `covered`: processed, in `effects`, not committed yet
    * `others`: runs that a batch commits with the `effects` of this one
    * `may_be_redriven`: some of its messages may be for one handler alone
    * `from_queue`: the messages were deferred before, and run from the key queue
    * `waited_ms`: back-off that its batch has waited out for it so far
    * `defer_reason`: why its remaining entries are to be deferred
    * `cancellation`: which of its entries an earlier dead letter of the key has canceled
    * `alone_until`, `admitted_until`: up to which id its entries run alone, as a list of them has failed; and up to
      which the rate limit has admitted them before
    """

    stream: str
    key: bytes | None
    offset_field: bytes
    entries: deque[Entry]
    covered: list[Entry] = field(default_factory=list)
    effects: Effects = field(default_factory=lambda: Effects(b"", b""))
    state: bytes = b""
    committed_state: bytes = b""
    attempt: int = 1
    others: list["KeyRun"] = field(default_factory=list)
    may_be_redriven: bool = True
    from_queue: bool = False
    waited_ms: float = 0.0
    defer_reason: DeferReason = field(default_factory=DeferReason)
    cancellation: Cancellation | None = None
    alone_until: EntryId = ZERO_ID
    admitted_until: EntryId = ZERO_ID

    @property
    def next_may_be_for_one(self) -> bool:
        """True if its next message may be for one handler alone."""
        return self.may_be_redriven and self.entries[0].may_be_for_one

    def resume(self, key_offset: bytes, state: bytes, committed_id: EntryId | None) -> None:
        """Start, or restart, after the last committed entry."""
        self.entries.extendleft(reversed(self.covered))
        # The key offset of a batch that died may lie below the committed offset by now.
        last_done = max(EntryId.parse(key_offset) if key_offset else ZERO_ID, committed_id or ZERO_ID)
        while self.entries and self.entries[0].id <= last_done:
            self.entries.popleft()
            self.attempt = 1
        self._reset(state, key_offset)

    def load_queue(self, queue: DeferredKey) -> None:
        """Start, or restart, with the entries of its key queue."""
        self.entries = deque(
            Entry(one.encode(), _DELETED if pairs is None else _pack(pairs)) for one, pairs in queue.entries
        )
        self.attempt = queue.failed_attempts + 1
        self._reset(queue.state, b"")

    def _reset(self, state: bytes, key_offset: bytes) -> None:
        self.state = self.committed_state = state
        self.defer_reason = DeferReason()
        self._reset_effects(key_offset)

    def deferral(self) -> Deferral:
        """The deferral of its remaining entries; valid once its effects are committed."""
        ids = [entry.id_text.decode() for entry in self.entries]
        how, detail, failed, last_error = self.defer_reason
        return Deferral(
            queue=self.offset_field,
            expected_offset=self.effects.expected_offset,
            mode=how,
            detail=detail,
            failed_attempts=failed,
            last_error=last_error,
            ids=ids[:1] if self.from_queue else ids,
        )

    @property
    def next_id(self) -> str:
        """The id of its next entry."""
        return self.entries[0].id_text.decode()

    def next_published(self, attempt: int) -> Message:
        """The message of its next entry, as published."""
        return Message(self.stream, self.next_id, unpack_fields(self.entries[0].packed)[0], self.key, attempt)

    def next_entries(self) -> Iterable[Entry]:
        """Its next entries, up to the first that may be for one handler alone."""
        return takewhile(_is_for_all, self.entries) if self.may_be_redriven else self.entries

    def add_stretch(self, done: Stretch) -> None:
        """Add what its next entries have come to, and their crash counts if they are of its key queue."""
        if not done.count:
            return
        effects, entries = self.effects, self.entries
        covered = [entries.popleft() for _ in range(done.count)]
        self.covered += covered
        if self.from_queue:
            for entry in covered:
                entry_id = entry.id_text.decode()
                effects.add_message(entry_id)
                effects.clear_crash_counts(*crash_counts_of(entry_id))
        else:
            effects.first_id = effects.first_id or covered[0].id_text.decode()
            effects.last_id = covered[-1].id_text.decode()
            effects.message_count += done.count
        if done.outputs:
            effects.add_outputs(done.outputs)
        if done.timers:
            effects.add_timers(done.timers)
        self.state = done.state

    def add_state(self) -> None:
        """Add its state to its effects, if it has changed since the last commit."""
        if self.key is not None and self.state != self.committed_state:
            self.effects.state = self.state

    def on_committed(self) -> None:
        """Continue after a successful commit of its effects."""
        self.committed_state = self.state
        self._reset_effects(self.effects.last_id.encode())

    def _reset_effects(self, key_offset: bytes) -> None:
        self.covered = []
        self.others = []
        self.effects = Effects(self.offset_field, FROM_QUEUE if self.from_queue else key_offset, self.key or b"")


def check_finished(runs: Iterable[KeyRun]) -> None:
    """Raise Unfinished if messages are left, so Spark repeats the task: the committed offset must not pass them."""
    for run in runs:
        if run.entries or run.covered:
            raise Unfinished(
                f"messages of stream {run.stream!r} from {(run.covered or run.entries)[0].id} on are unfinished: the "
                "handler cancelled tasks that are not its own; let it cancel only tasks that it created"
            )


def unpack_fields(packed: bytes) -> tuple[Sequence[bytes], bytes | None]:
    """Unpack an entry's fields; return them and, if it is for one handler alone, that handler."""
    pairs = unpack(packed)
    if pairs and pairs[0] == REDRIVE_FIELD:
        return own_pairs(pairs), pairs[1]
    return pairs, None
