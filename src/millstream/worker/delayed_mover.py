"""Delayed mover: moves the delayed messages of thousands of streams; queries only streams that have some."""

from collections.abc import Sequence
from math import inf

from millstream.clock import Clock
from millstream.delivery.delayed_messages import DelayedMessages, MovedMessages
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import StreamKeys
from millstream.redis_client.key_tracking import KeyTracker
from millstream.worker.timers import DelayQueue, RoundRobin

_SWEEP_MS = 1_000.0


class TrackedDelayedMessages(DelayedMessages):
    """DelayedMessages for a mover that moves those of the same streams again and again. Used by one thread.

    Key tracking reports the streams with new delayed messages, and some are checked in any case, round robin; without
    key tracking (`KeyTracker.refused`) all are checked each time.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        super().__init__(client)
        self._clock = clock
        self._tracker = KeyTracker(client)
        self._keys: dict[str, str] = {}
        self._delay_queue = DelayQueue[str]()
        self._round_robin = RoundRobin()
        self._check_due_ms = 0.0

    def close(self) -> None:
        """Close the connections of key tracking."""
        self._tracker.close()

    def move_due(self, streams: Sequence[str]) -> MovedMessages:
        """See DelayedMessages."""
        changed = self._tracker.changed()
        if self._tracker.refused:
            return super().move_due(streams)
        keys = {name: self._keys.get(name) or StreamKeys(name).due for name in streams}
        now_ms = self._clock.monotonic_ms()
        swept: set[str] = set()
        if now_ms >= self._check_due_ms:
            # Key tracking may lose invalidations; SWAPDB, for one, sends none.
            self._check_due_ms = now_ms + _SWEEP_MS
            swept.update(self._round_robin.next_names(streams))
        checked = [
            name
            for name, key in keys.items()
            if changed is None or key in changed or name not in self._keys or name in swept
        ]
        self._keys = keys
        names = {keys[name]: name for name in checked}
        for key, waits in self._tracker.read_each(("EXISTS",), names):
            if waits:
                self._delay_queue.put(names[key], now_ms)
        due = [name for name in self._delay_queue.pop_due(now_ms, len(keys)) if name in keys]
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
