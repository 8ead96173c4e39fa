"""How a worker gets the entries of a handler without a key: it reads them through the consumer group, as many as it has room for."""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.groups import Consumer
from millstream.worker.fetching.fetcher import Fetcher
from millstream.worker.fetching.rate_limit import Permit
from millstream.worker.fetching.read_plan import ReadPlan, ReadScheduler

_IDLE_WAIT_MS = 20.0
_FIRST_TRIP, _LONGEST_TRIP = 2, 64
_LITTLE_BYTES = 2**20
_WAITED_FOR = 4
_FRESH_MS = 100.0


class EntryFetcher(Fetcher[ReliableStream]):
    """Takes new entries, as `consumer`.

    Nobody can say how large entries are that were not given out yet. So they are asked for by a script, which stops when
    there is no room for more bytes, and of many streams a few at a time. Only where nothing more is there they are waited
    for, and then few.
    """

    def __init__(self, *means: Any, consumer: str, **options: Any) -> None:
        super().__init__(*means, **options)
        self._consumer = consumer
        self._turns = ReadScheduler()
        self._waiting: Consumer | None = None
        self._about = self._policy.prefetch_bytes
        self._trip = _FIRST_TRIP
        self._dry_until_ms = 0.0

    def take(self, room: int, stopping: threading.Event) -> None:
        """See Taker."""
        if (allowed := self._ask_all(stopping)) is not None:
            self._take(allowed, room, stopping)

    def _take(self, allowed: Permit, room: int, stopping: threading.Event) -> None:
        affordable = max(1, self._hand.room_bytes // self._about)
        turn = self._turns.next(allowed.streams, min(room, affordable), allowed.count)
        can_wait = turn.may_wait and (len(turn.streams) == 1 or not self._client.is_cluster)
        if can_wait and self._clock.monotonic_ms() < self._dry_until_ms:
            turn = ReadPlan(turn.streams, min(turn.count, _WAITED_FOR if len(turn.streams) == 1 else 1), may_wait=True)
            found = self._wait_for(turn, min(self._policy.block_ms, allowed.until_ms))
            if (
                len(turn.streams) == 1
            ):  # of many that are waited for, each gives something: that says nothing of one's backlog
                self._hand.found(max(found.values(), default=0), turn.count)
        else:
            found = self._read(turn)
            self._hand.found(max(found.values(), default=0), turn.count)
            if turn.may_wait and not (found or can_wait):
                stopping.wait(min(_IDLE_WAIT_MS, allowed.until_ms) / 1000)
        self._turns.found(turn, found)
        self._report.polled(sum(found.values()))
        if turn.may_wait:
            self._note_dry(turn, found)

    def _note_dry(self, turn: ReadPlan, found: Mapping[str, int]) -> None:
        """Note for how long streams that were all asked may be waited for: an entry of each of thousands may come then."""
        have_more = sum(count >= turn.count for count in found.values())
        is_known = have_more < len(turn.streams) and self._hand.room_bytes > 0
        self._dry_until_ms = self._clock.monotonic_ms() + _FRESH_MS if is_known else 0.0

    def look_again(self) -> None:
        """Nothing has to be done when streams were joined again: a read asks for what is new, whatever there was."""

    # What is there

    def _read(self, turn: ReadPlan) -> dict[str, int]:
        """Take what these streams have, as far as there is room; return how many entries of each that had some."""
        found: dict[str, int] = {}
        at = size = 0
        while at < len(turn.streams) and self._hand.room_bytes > 0:
            some = turn.streams[at : at + self._trip]
            counts, trip_bytes = self._read_some([self._streams[name] for name in some], turn.count)
            found |= counts
            at, size = at + len(some), size + trip_bytes
            self._trip = min(2 * self._trip, _LONGEST_TRIP) if trip_bytes < _LITTLE_BYTES else _FIRST_TRIP
        if found:
            self._about = max(1, size // sum(found.values()))
        return found

    def _read_some(self, streams: Sequence[ReliableStream], count: int) -> tuple[dict[str, int], int]:
        """Take from these in one round trip; return how many entries of each that had some, and how many bytes."""
        terms = {"count": count, "most_bytes": self._hand.room_bytes // len(streams)}
        replies = self._client.pipeline([one.to_receive(**terms) for one in streams])
        found: dict[str, int] = {}
        failed: list[ReliableStream] = []
        size = 0
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, Exception):
                failed.append(stream)
            elif reply:
                found[stream.stream] = len(reply)
                size += self._put_in_hand(stream, len(reply), stream.received(reply))
        for stream in failed:  # after the others: what was given is in hand, whatever comes of these
            if taken := stream.receive(**terms):
                found[stream.stream] = len(taken)
                size += self._put_in_hand(stream, len(taken), taken)
        return found, size

    def _put_in_hand(self, stream: ReliableStream, count: int, taken: Sequence[Delivery]) -> int:
        """Hold what was read; return how many bytes it has. `count`: with what was done already, and is not run."""
        self._allowance.spend(stream.stream, count)
        self._hand.take(taken, self._clock.monotonic_ms())
        return sum([one.size for one in taken])

    # What is to come

    def _wait_for(self, turn: ReadPlan, longest_ms: float) -> dict[str, int]:
        """Wait until one of these streams has something; take it, and return how many entries of each that had some."""
        if self._waiting is None or self._waiting.streams != turn.streams:
            group = self._streams[turn.streams[0]].group
            self._waiting = Consumer(self._client, group=group, name=self._consumer, streams=turn.streams)
        found: dict[str, int] = {}
        for batch in self._waiting.read_new(count=turn.count, block_ms=math.ceil(longest_ms)):
            stream = self._streams[batch.stream]
            found[batch.stream] = len(batch)
            self._put_in_hand(stream, len(batch), stream.delivered([batch]))
        return found
