"""SubscriberBuffer: the buffer between the router's thread, which adds items, and one subscriber, which reads them.

Batches pass through as they came from the server: subscribers of one stream share the same lists. The usual path needs
no lock: each counter has one writer, and each side writes its own state before it reads the other's.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from millstream.errors import MillstreamError
from millstream.model import Message
from millstream.router.budget import LEAST_BYTES, Batch, Budget
from millstream.router.stream_events import Dropped, Gap, Item, Start, WhenFull
from millstream.router.waker import Waker

WakeTarget: TypeAlias = "Waker | threading.Lock"
_DROPPING = threading.Lock()


class BufferPolicy(NamedTuple):
    """The settings of a buffer, in one object for all buffers with the same."""

    budget: Budget
    limit: int
    limit_bytes: int
    when_full: WhenFull
    reports_start: bool


_policy_of = lru_cache(BufferPolicy)


class SubscriberBuffer:
    """Entries and events for one subscriber: at most `limit` entries and `limit_bytes` bytes.

    An entry larger than that is accepted once the buffer is `drained`. While the `budget` of the whole router is spent,
    the buffer accepts LEAST_BYTES at most.

    * `skip`: entries up to this id are not for it
    * `ending`: None while the subscription runs; then True, or the error that ended it
    """

    __slots__ = (
        "batch",
        "batches",
        "cursor",
        "dropped",
        "ending",
        "index",
        "paused",
        "policy",
        "put_bytes",
        "put_count",
        "removed_bytes",
        "removed_count",
        "skip",
        "stream",
        "waker",
    )

    def __init__(
        self,
        stream: str,
        budget: Budget,
        *,
        limit: int,
        limit_bytes: int,
        when_full: WhenFull,
        reports_start: bool = False,
    ) -> None:
        self.stream = stream
        self.policy = _policy_of(budget, limit, limit_bytes, when_full, reports_start)
        self.cursor: Cursor | None = None
        self.batches: list[Batch | Gap | Dropped | Start] = []
        self.batch: Batch | None = None
        self.index = 0
        self.put_count = self.put_bytes = 0
        self.removed_count = self.removed_bytes = 0
        self.dropped = 0
        self.paused = False
        self.skip: bytes | None = None
        self.ending: bool | Exception | None = None
        self.waker: WakeTarget | None = None

    # For the router's thread

    @property
    def held(self) -> int:
        """Entries in the buffer."""
        return self.put_count - self.removed_count

    @property
    def held_bytes(self) -> int:
        """Bytes of these entries."""
        return self.put_bytes - self.removed_bytes

    @property
    def drained(self) -> bool:
        """True when enough is free that reading on is worth a round trip: then the next entry fits."""
        return self.held <= self.policy.limit // 2 and self.held_bytes <= self._max_bytes // 2

    @property
    def _max_bytes(self) -> int:
        policy = self.policy
        return min(policy.limit_bytes, LEAST_BYTES) if policy.budget.spent else policy.limit_bytes

    def fits(self, batch: Batch) -> bool:
        """Whether the whole batch fits."""
        policy = self.policy
        return (
            self.put_count - self.removed_count + len(batch.entries) <= policy.limit
            and self.put_bytes - self.removed_bytes + batch.size <= policy.limit_bytes
            and not policy.budget.spent
        ) or self.fitting(batch) == len(batch)  # the usual case first

    def fitting(self, batch: Batch) -> int:
        """How many entries of the batch fit, from its start. Once `drained`, a single entry fits whatever its size."""
        room, room_bytes = self.policy.limit - self.held, self._max_bytes - self.held_bytes
        if len(batch) <= room and batch.size <= room_bytes:
            return len(batch)
        count = 0
        while count < min(room, len(batch)) and batch.sizes[count] <= room_bytes:
            room_bytes -= batch.sizes[count]
            count += 1
        return count or int(self.drained)

    def put(self, batch: Batch) -> None:
        """Append entries that fit."""
        self.put_count += len(batch.entries)
        self.put_bytes = self.put_bytes + batch.size if self.put_bytes else batch.size  # one object for both
        self.batches += (batch,)  # `append` would reserve room for three more

    def put_dropping(self, batch: Batch) -> int:
        """Append entries, and drop the oldest that do not fit; return how many those were."""
        with _DROPPING:
            excess = left = self._excess(batch)
            if excess and self.batch is not None:  # back into the queue, to drop from it
                self.batches.insert(0, self.batch.part(self.index, len(self.batch)))
                self.batch = None
            index = 0
            while left and index < len(self.batches):
                queued = self.batches[index]
                if not isinstance(queued, Batch):
                    index += 1
                    continue
                dropped = min(left, len(queued))
                self._count_removed(queued.sizes[:dropped])
                left -= dropped
                if dropped == len(queued):
                    del self.batches[index]
                else:
                    self.batches[index] = queued.part(dropped, len(queued))
            if excess:
                self._insert_dropped(index, excess)
            self.put(batch.part(left, len(batch)) if left else batch)
        return excess

    def _excess(self, batch: Batch) -> int:
        """How many of the oldest entries have no room beside the newest ones. The very newest always fits."""
        over = self.held + len(batch) - self.policy.limit
        over_bytes = self.held_bytes + batch.size - self._max_bytes
        excess = 0
        for size in self._sizes(batch):
            if over <= excess and over_bytes <= 0:
                break
            over_bytes -= size
            excess += 1
        return excess

    def _sizes(self, batch: Batch) -> Iterator[int]:
        """The sizes of all entries in the buffer, and of all but the last of the batch."""
        if self.batch is not None:
            yield from islice(self.batch.sizes, self.index, None)
        for queued in self.batches:
            if isinstance(queued, Batch):
                yield from queued.sizes
        yield from batch.sizes[:-1]

    def _count_removed(self, sizes: tuple[int, ...]) -> None:
        self.removed_count += len(sizes)
        self.removed_bytes += sum(sizes)

    def _insert_dropped(self, index: int, count: int) -> None:
        self.dropped += count
        previous = self.batches[index - 1] if index else None
        if isinstance(previous, Dropped):
            self.batches[index - 1] = Dropped(stream=self.stream, count=previous.count + count)
        else:
            self.batches.insert(index, Dropped(stream=self.stream, count=count))

    # For the subscriber

    def next_item(self) -> Item | None:
        """The next message or event; None if the buffer is empty."""
        if self.policy.when_full != "drop-oldest":
            return self._next_item()
        with _DROPPING:
            return self._next_item()

    def _next_item(self) -> Item | None:
        batch, at = self.batch, self.index
        if batch is None:
            if not self.batches:
                return None
            following = self.batches.pop(0)
            if not isinstance(following, Batch):
                return following
            batch, at = following, 0
        entries = batch.entries
        left = len(entries) - at - 1
        self.batch, self.index = batch if left else None, at + 1
        self.removed_count += 1
        self.removed_bytes += batch.sizes[at] if left or at else batch.size
        entry_id, pairs = entries[at]
        return Message(self.stream, entry_id.decode(), pairs)

    def has_ended(self) -> bool:
        """Whether no item will follow; raises the error that ended the subscription."""
        if self.ending is None or self.batches:
            return False
        if isinstance(self.ending, Exception):
            raise self.ending
        return True

    def prepare_wait(self, waker: WakeTarget) -> bool:
        """Register `waker` for the next item; False if there is an item already."""
        sleeping = self.waker
        if sleeping is not None and (not isinstance(sleeping, Waker) or sleeping.awaited):
            raise MillstreamError(
                f"another reader waits on this subscription of {self.stream}; subscribe once more for a second reader"
            )
        self.waker = waker
        # Set first, checked second: the router puts an item in before it reads the waker.
        if self.batches or self.ending is not None:
            self.waker = None
            return False
        return True


class Cursor:
    """A position in a stream, and the subscribers served from it.

    * `last`: the last entry delivered; `ordinal`: its ordinal among all entries ever added, if known; `proven`: that
      entry was seen
    * `size_log2`: an entry takes about 2 ** `size_log2` bytes; 0: unknown
    * `needs_counters`: a read needs the stream's counters too
    * `deleted_at`: the position in a stream that was deleted, reported as a gap once there is a new one
    * `anchor`, `next_anchor`: entries delivered a while ago, which identify the stream
    * `queued`, `in_flight`, `stale`: it waits to be read; it is in flight; it changed while in flight
    * `isolated`: read it in a command of its own
    * `watched`: the pool waits for a change
    * `paused`: the buffer of its subscriber is full
    * `read_step`: the step of the sweep at which it was last read
    """

    __slots__ = (
        "anchor",
        "buffers",
        "deleted_at",
        "in_flight",
        "isolated",
        "key",
        "last",
        "needs_counters",
        "next_anchor",
        "ordinal",
        "paused",
        "proven",
        "queued",
        "read_step",
        "size_log2",
        "stale",
        "watched",
    )

    def __init__(self, key: bytes, last: bytes, ordinal: int | None = None) -> None:
        self.key = key
        self.last = last
        self.ordinal = ordinal
        self.anchor: bytes | None = None
        self.next_anchor: bytes | None = None
        self.deleted_at: bytes | None = None
        self.buffers: list[SubscriberBuffer] = []
        self.needs_counters = True
        self.proven = False
        self.size_log2 = self.read_step = 0
        self.queued = self.in_flight = self.stale = self.isolated = self.watched = self.paused = False
