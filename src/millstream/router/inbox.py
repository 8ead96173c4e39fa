"""The buffer between the router's thread and one subscriber. The thread puts in, the subscriber takes out.

Batches go through as they came from the server: subscribers of one stream share the same lists. There is no lock in
the usual way: each counter has one writer, and each side says what it wants before it looks what the other has done.
"""

import threading
from typing import TypeAlias

from millstream.errors import MillstreamError
from millstream.model import Message
from millstream.router.bell import Bell
from millstream.router.judging import Entry
from millstream.router.notices import Dropped, Gap, Item, Start, WhenFull

Waker: TypeAlias = "Bell | threading.Lock"
_DROPPING = threading.Lock()


class Inbox:
    """Entries and notices for one subscriber, at most `limit` entries.

    `skip`: entries up to this id are not for it. `ending`: None while it goes on; then True, or why it ended.
    """

    __slots__ = (
        "at", "batch", "batches", "cursor", "dropped", "ending", "given", "limit", "paused", "skip", "stream", "taken",
        "tells_start", "waker", "when_full",
    )  # fmt: skip

    def __init__(self, stream: str, limit: int, when_full: WhenFull, tells_start: bool = False) -> None:
        self.stream = stream
        self.limit = limit
        self.when_full = when_full
        self.tells_start = tells_start
        self.cursor: Cursor | None = None
        self.batches: list[list[Entry] | Gap | Dropped | Start] = []
        self.batch: list[Entry] | None = None
        self.at = 0
        self.given = 0
        self.taken = 0
        self.dropped = 0
        self.paused = False
        self.skip: bytes | None = None
        self.ending: bool | Exception | None = None
        self.waker: Waker | None = None

    # For the router's thread

    @property
    def held(self) -> int:
        """Entries in it."""
        return self.given - self.taken

    @property
    def drained(self) -> bool:
        """True when so much has been taken out that reading on is worth a round trip."""
        return self.held <= self.limit // 2

    def put(self, entries: list[Entry]) -> None:
        """Add entries that fit."""
        if entries:
            self.given += len(entries)
            self.batches.append(entries)

    def put_dropping(self, entries: list[Entry]) -> int:
        """Add entries, dropping the oldest ones that do not fit; return how many those were."""
        with _DROPPING:
            excess = max(0, self.held + len(entries) - self.limit)
            left, place = excess, 0
            if self.batch is not None and left:
                gone = min(left, len(self.batch) - self.at)
                self.at += gone
                left -= gone
                if self.at == len(self.batch):
                    self.batch = None
            while left and place < len(self.batches):
                batch = self.batches[place]
                if not isinstance(batch, list):
                    place += 1
                elif len(batch) <= left:
                    left -= len(batch)
                    del self.batches[place]
                else:
                    self.batches[place] = batch[left:]
                    left = 0
            if excess:
                self._tell_dropped(place, excess)
                entries = entries[left:]
            self.given += len(entries) - (excess - left)
            self.batches.append(entries)
        return excess

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
            if not isinstance(following, list):
                return following
            batch, at = self.batch, self.at = following, 0
        self.at = at + 1
        if self.at == len(batch):
            self.batch = None
        self.taken += 1
        entry_id, pairs = batch[at]
        return Message(self.stream, entry_id.decode(), pairs)

    def over(self) -> bool:
        """Whether nothing will come any more; raises what ended it."""
        if self.ending is None or self.batches:
            return False
        if isinstance(self.ending, Exception):
            raise self.ending
        return True

    def may_sleep(self, waker: Waker) -> bool:
        """Have `waker` wake the subscriber when there is something; False if there is already."""
        sleeping = self.waker
        if sleeping is not None and (not isinstance(sleeping, Bell) or sleeping.awaited):
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

    * `last`: the last entry delivered; `ordinal`: which of all ever added that is, if known
    * `careful`: a read needs the stream's counters too
    * `lost_at`: the place reached in a stream that is gone, told when there is a new one
    * `anchor`, `next_anchor`: entries delivered a while ago, to recognise the stream by
    * `queued`, `asked`, `stale`: waits to be read; is being read; changed meanwhile. `alone`: not together with others
    * `armed`: a pool waits for it to change
    * `paused`: its subscriber is full
    """

    __slots__ = (
        "alone", "anchor", "armed", "asked", "careful", "inboxes", "key", "last", "lost_at", "next_anchor", "ordinal",
        "paused", "queued", "stale",
    )  # fmt: skip

    def __init__(self, key: bytes, last: bytes, ordinal: int | None = None) -> None:
        self.key = key
        self.last = last
        self.ordinal = ordinal
        self.anchor: bytes | None = None
        self.next_anchor: bytes | None = None
        self.lost_at: bytes | None = None
        self.inboxes: list[Inbox] = []
        self.careful = True
        self.queued = self.asked = self.stale = self.alone = self.armed = self.paused = False
