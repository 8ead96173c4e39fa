"""Delayed mover: moves the delayed messages of thousands of streams; queries only streams that have some."""

from collections.abc import Sequence
from math import inf

from millstream.clock import Clock
from millstream.delivery.delayed_messages import DelayedMessages, MovedMessages
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import StreamKeys
from millstream.worker.changed_streams import ChangedStreams
from millstream.worker.due_times import DelayQueue


class TrackedDelayedMessages(DelayedMessages):
    """DelayedMessages for a mover that moves those of the same streams again and again. Used by one thread.

    Key tracking reports the streams with new delayed messages, and some are checked in any case, round robin; without
    key tracking (`ChangedStreams.refused`) all are checked each time.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        super().__init__(client)
        self._clock = clock
        self._changed = ChangedStreams(client, clock, lambda name: (StreamKeys(name).due,))
        self._delay_queue = DelayQueue[str]()

    def close(self) -> None:
        """Close the connections of key tracking."""
        self._changed.close()

    def move_due(self, streams: Sequence[str]) -> MovedMessages:
        """See DelayedMessages."""
        names = set(streams)
        found = self._changed.find(names)
        if self._changed.refused:
            return super().move_due(streams)
        now_ms = self._clock.monotonic_ms()
        for name, waits in self._changed.exists(found):
            if waits:
                self._delay_queue.put(name, now_ms)
        due = [name for name in self._delay_queue.pop_due(now_ms, len(names)) if name in names]
        try:
            moved = self.move_each(due)
        except RedisError:
            for name in due:
                self._delay_queue.put(name, now_ms)
            raise
        for name, movement in zip(due, moved, strict=True):
            if movement.next_ms is not None:
                self._delay_queue.put(name, now_ms + movement.next_ms)
        wait_ms = self._delay_queue.wait_ms(now_ms)
        return MovedMessages(moved=sum(one.moved for one in moved), next_ms=None if wait_ms == inf else round(wait_ms))
