"""The buffer between the router's thread and one subscriber. The thread puts in, the subscriber takes out.

Batches go through as they came from the server: subscribers of one stream share the same lists. There is no lock in
the usual way: each counter has one writer, and each side says what it wants before it looks what the other has done.
"""

import threading
from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias

from millstream.errors import MillstreamError
from millstream.model import Message
from millstream.router.budget import LEAST_BYTES, Batch, Budget
from millstream.router.stream_events import Dropped, Gap, Item, Start, WhenFull
from millstream.router.waker import Waker

WakeTarget: TypeAlias = "Waker | threading.Lock"
_DROPPING = threading.Lock()


class SubscriberBuffer:
    """Entries and notices for one subscriber, at most `limit` entries and, with the next one, `limit_bytes` bytes.

    While the router's whole `budget` is spent, only as many bytes as keep it going.
    `skip`: entries up to this id are not for it. `ending`: None while it goes on; then True, or why it ended.
    """

    __slots__ = (
        "at", "batch", "batches", "budget", "cursor", "dropped", "ending", "given", "given_bytes", "limit", "limit_bytes",
        "paused", "skip", "stream", "taken", "taken_bytes", "tells_start", "waker", "when_full",
    )  # fmt: skip

    def __init__(
        self,
        stream: str,
        budget: Budget,
        *,
        limit: int,
        limit_bytes: int,
        when_full: WhenFull,
        tells_start: bool = False,
    ) -> None:
        self.stream = stream
        self.budget = budget
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.when_full = when_full
        self.tells_start = tells_start
        self.cursor: Cursor | None = None
        self.batches: list[Batch | Gap | Dropped | Start] = []
        self.batch: Batch | None = None
        self.at = 0
        self.given = self.given_bytes = 0
        self.taken = self.taken_bytes = 0
        self.dropped = 0
        self.paused = False
        self.skip: bytes | None = None
        self.ending: bool | Exception | None = None
        self.waker: WakeTarget | None = None

    # For the router's thread

    @property
    def held(self) -> int:
        """Entries in it."""
        return self.given - self.taken

    @property
    def held_bytes(self) -> int:
        """What they take."""
        return self.given_bytes - self.taken_bytes

    @property
    def drained(self) -> bool:
        """True when so much has been taken out that reading on is worth a round trip: the next entry has room then."""
        return self.held <= self.limit // 2 and self.held_bytes <= self._most_bytes // 2

    @property
    def _most_bytes(self) -> int:
        return min(self.limit_bytes, LEAST_BYTES) if self.budget.spent else self.limit_bytes

    def fits(self, batch: Batch) -> bool:
        """Whether there is room for all of it."""
        return (
            self.given - self.taken + len(batch.entries) <= self.limit
            and self.given_bytes - self.taken_bytes + batch.size <= self.limit_bytes
            and not self.budget.spent
        ) or self.fitting(batch) == len(batch)  # first what is nearly always so

    def fitting(self, batch: Batch) -> int:
        """How many of its entries there is room for, the first ones. A single one fits whatever its size, once `drained`."""
        room, room_bytes = self.limit - self.held, self._most_bytes - self.held_bytes
        if len(batch) <= room and batch.size <= room_bytes:
            return len(batch)
        count = 0
        while count < min(room, len(batch)) and batch.sizes[count] <= room_bytes:
            room_bytes -= batch.sizes[count]
            count += 1
        return count or int(self.drained)

    def put(self, batch: Batch) -> None:
        """Add entries that fit."""
        self.given += len(batch.entries)
        self.given_bytes += batch.size
        self.batches.append(batch)

    def put_dropping(self, batch: Batch) -> int:
        """Add entries, dropping the oldest ones that do not fit; return how many those were."""
        with _DROPPING:
            excess = left = self._excess(batch)
            if excess and self.batch is not None:  # what is left of it comes after what is dropped of it
                self.batches.insert(0, self.batch.part(self.at, len(self.batch)))
                self.batch = None
            place = 0
            while left and place < len(self.batches):
                waiting = self.batches[place]
                if not isinstance(waiting, Batch):
                    place += 1
                    continue
                gone = min(left, len(waiting))
                self._took(waiting.sizes[:gone])
                left -= gone
                if gone == len(waiting):
                    del self.batches[place]
                else:
                    self.batches[place] = waiting.part(gone, len(waiting))
            if excess:
                self._tell_dropped(place, excess)
            self.put(batch.part(left, len(batch)) if left else batch)
        return excess

    def _excess(self, batch: Batch) -> int:
        """How many of the oldest entries have no room beside the newest ones. The very newest always has."""
        over = self.held + len(batch) - self.limit
        over_bytes = self.held_bytes + batch.size - self._most_bytes
        excess = 0
        for size in self._sizes(batch):
            if over <= excess and over_bytes <= 0:
                break
            over_bytes -= size
            excess += 1
        return excess

    def _sizes(self, batch: Batch) -> Iterator[int]:
        """Of all entries in it, and of all but the last of the batch."""
        if self.batch is not None:
            yield from islice(self.batch.sizes, self.at, None)
        for waiting in self.batches:
            if isinstance(waiting, Batch):
                yield from waiting.sizes
        yield from batch.sizes[:-1]

    def _took(self, sizes: tuple[int, ...]) -> None:
        self.taken += len(sizes)
        self.taken_bytes += sum(sizes)

    def _tell_dropped(self, place: int, count: int) -> None:
        self.dropped += count
        before = self.batches[place - 1] if place else None
        if isinstance(before, Dropped):
            self.batches[place - 1] = Dropped(stream=self.stream, count=before.count + count)
        else:
            self.batches.insert(place, Dropped(stream=self.stream, count=count))

    # For the subscriber

    def take(self) -> Item | None:
        """The next message or notice; None if there is none."""
        if self.when_full != "drop-oldest":
            return self._take()
        with _DROPPING:
            return self._take()

    def _take(self) -> Item | None:
        batch, at = self.batch, self.at
        if batch is None:
            if not self.batches:
                return None
            following = self.batches.pop(0)
            if not isinstance(following, Batch):
                return following
            batch, at = self.batch, self.at = following, 0
        self.at = at + 1
        if self.at == len(batch):
            self.batch = None
        self.taken += 1
        self.taken_bytes += batch.sizes[at]
        entry_id, pairs = batch.entries[at]
        return Message(self.stream, entry_id.decode(), pairs)

    def over(self) -> bool:
        """Whether nothing will come any more; raises what ended it."""
        if self.ending is None or self.batches:
            return False
        if isinstance(self.ending, Exception):
            raise self.ending
        return True

    def may_sleep(self, waker: WakeTarget) -> bool:
        """Have `waker` wake the subscriber when there is something; False if there is already."""
        sleeping = self.waker
        if sleeping is not None and (not isinstance(sleeping, Waker) or sleeping.awaited):
            raise MillstreamError(
                f"the subscription of {self.stream} is being read by somebody else: subscribe once more"
            )
        self.waker = waker
        # Said first, looked second: whoever puts something in looks for the waker after that.
        if self.batches or self.ending is not None:
            self.waker = None
            return False
        return True


class Cursor:
    """A place in a stream, and who is served from it.

    * `last`: the last entry delivered; `ordinal`: which of all ever added that is, if known; `proven`: it was there
    * `scale`: entries take about 2 ** `scale` bytes; 0: not known
    * `careful`: a read needs the stream's counters too
    * `lost_at`: the place reached in a stream that is gone, told when there is a new one
    * `anchor`, `next_anchor`: entries delivered a while ago, to recognise the stream by
    * `queued`, `asked`, `stale`: waits to be read; is being read; changed meanwhile. `alone`: not together with others
    * `armed`: a pool waits for it to change
    * `paused`: its subscriber is full
    """

    __slots__ = (
        "alone", "anchor", "armed", "asked", "careful", "inboxes", "key", "last", "lost_at", "next_anchor", "ordinal",
        "paused", "proven", "queued", "scale", "stale",
    )  # fmt: skip

    def __init__(self, key: bytes, last: bytes, ordinal: int | None = None) -> None:
        self.key = key
        self.last = last
        self.ordinal = ordinal
        self.anchor: bytes | None = None
        self.next_anchor: bytes | None = None
        self.lost_at: bytes | None = None
        self.inboxes: list[SubscriberBuffer] = []
        self.careful = True
        self.proven = False
        self.scale = 0
        self.queued = self.asked = self.stale = self.alone = self.armed = self.paused = False
