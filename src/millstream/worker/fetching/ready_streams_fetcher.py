"""ReadyStreamsFetcher: leases keys of thousands of streams that workers share, at a cost that follows the work to do."""

import math
import threading
from collections.abc import Mapping, Sequence
from math import inf
from queue import SimpleQueue

from millstream.delivery.keyed_stream import KeyedStream, LeaseResult
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import from_wire, ready_streams_key, to_wire
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.resp import Command
from millstream.worker.changed_streams import ChangedStreams
from millstream.worker.context import WorkerContext
from millstream.worker.due_times import DelayQueue
from millstream.worker.fetching.pipelined_key_fetcher import AT_ONCE, SWEEP_MS_EACH, PipelinedKeyFetcher
from millstream.worker.fetching.poll_wait import POLL_MS, PollWait

_MOST_NAMES = 10_000
_KEEP_NAMES_MS = 3_600_000
_IDLE_POLL_MS_EACH = 2.5


class ReadyStreams:
    """Streams of a handler that may have ready keys, as its workers report them to each other. Some reports get lost.

    Blocking on a wake-up list for each of many streams would make Redis check each list. Used by one thread.
    """

    def __init__(self, client: Client, handler: Handler) -> None:
        self.key = ready_streams_key(handler.app, handler.name)
        self._client = client
        self._names: dict[bytes, None] = {}

    def put(self, name: str) -> None:
        """Add a stream for the next `publish`."""
        self._names[to_wire(name)] = None

    def publish(self) -> None:
        """Report the added streams to the other workers. Raises RedisError."""
        if self._names:
            names, self._names = self._names, {}
            push: Command = ("RPUSH", self.key, *names)
            if call_all(self._client, [push, ("PEXPIRE", self.key, _KEEP_NAMES_MS)])[0] > _MOST_NAMES:
                # The workers have more names than enough.
                self._client.execute("LTRIM", self.key, -_MOST_NAMES // 2, -1)

    def receive(self, most: int) -> list[str]:
        """Remove and return up to `most` names of streams. Raises RedisError."""
        return [from_wire(name) for name in dict.fromkeys(self._client.execute("LPOP", self.key, most) or ())]


class ReadyStreamsFetcher(PipelinedKeyFetcher):
    """A PipelinedKeyFetcher of streams that other workers work on, too: it leases several key queues of each.

    It blocks on the list of ready streams, and on the wake-up lists of active streams: those known to have entries in key queues. The
    other streams are idle: the fetcher queries those for entries that key tracking reports as changed. Without key
    tracking it queries a fixed number of them a second. On Redis Cluster it blocks on the first list alone, and polls those
    wake-up lists that key tracking reports as changed.
    """

    def __init__(
        self, context: WorkerContext, streams: Mapping[str, KeyedStream], *, ready_streams: "SimpleQueue[str]"
    ) -> None:
        super().__init__(context, streams, ready_streams=ready_streams)
        self._shared_ready = ReadyStreams(self._client, context.handler)
        self._active: dict[str, str] = {}
        self._idle = DelayQueue[str]()
        self._changed = ChangedStreams(self._client, self._clock, self._queue_keys)
        self._changes_due_ms = 0.0
        self._notified: ChangedStreams | None = None  # one command cannot block on keys of several slots
        if self._client.is_cluster:
            self._notified = ChangedStreams(self._client, self._clock, lambda name: (self._active[name],))
        self._poll_wait = PollWait(self._policy.sweep_ms)
        self._poll_due_ms = 0.0

    def close(self) -> None:
        """See Fetcher."""
        self._changed.close()
        if self._notified is not None:
            self._notified.close()

    def fetch(self, room: int, stopping: threading.Event) -> None:
        """See Fetcher."""
        self._keys_each = room
        if (now_ms := self._clock.monotonic_ms()) >= self._changes_due_ms:  # also while there are always ready ones
            self._query_idle(now_ms)
        super().fetch(room, stopping)
        self._shared_ready.publish()

    def _receive_ready(self, now_ms: float) -> None:
        super()._receive_ready(now_ms)
        for name in self._shared_ready.receive(min(self._keys_each, AT_ONCE)):
            self._delay_queue.put(name, now_ms)

    def _affordable(self, due: Sequence[str], now_ms: float) -> list[KeyedStream]:
        streams = super()._affordable(due, now_ms)
        self._keys_each = max(1, self._keys_each // max(1, len(streams)))
        return streams

    def _on_leased(self, stream: KeyedStream, leased: LeaseResult, now_ms: float) -> int:
        name = stream.stream
        if leased.leases or leased.wait_ms is not None:
            # Leases of other workers may expire meanwhile, too.
            sweep_ms = max(self._policy.sweep_ms, SWEEP_MS_EACH * len(self._active))
            self._active[name] = self._context.keys_of(name).notify
            self._delay_queue.put(name, now_ms + min(sweep_ms, inf if leased.wait_ms is None else leased.wait_ms))
        else:
            self._active.pop(name, None)
            self._idle.put(name, now_ms + self._idle_poll_ms)
        if leased.leases:  # the commits may soon notify of more
            self._poll_wait.reset()
            self._poll_due_ms = min(self._poll_due_ms, now_ms + POLL_MS)
        if leased.unfit_bytes:
            self._in_flight.oversized_bytes = leased.unfit_bytes
            self._with_oversized.append(name)
        if (
            leased.unfit_bytes or len(leased.leases) >= self._keys_each
        ):  # there may be more keys, also for other workers
            self._delay_queue.put(name, now_ms)
            self._shared_ready.put(name)
        return self._add_in_flight(stream, leased)

    @property
    def _idle_poll_ms(self) -> float:
        each_ms = _IDLE_POLL_MS_EACH if self._changed.refused else 0.0
        return max(self._policy.sweep_ms, each_ms * len(self._streams))

    def _queue_keys(self, name: str) -> Sequence[str]:
        """Return the keys one of which exists while key queues of a stream are ready, leased or backing off."""
        keys = self._context.keys_of(name)
        return keys.ready, keys.leases, keys.backoff

    def _query_idle(self, now_ms: float) -> bool:
        """Query the idle streams that are due for entries in key queues; return True if some have any."""
        if now_ms >= self._changes_due_ms:
            self._changes_due_ms = now_ms + self._policy.sweep_ms
            for name in self._changed.find(list(self._streams)):
                self._idle.put(name, now_ms)
        due = self._idle.pop_due(now_ms, AT_ONCE)
        names = [name for name in due if name in self._streams and name not in self._active]
        found = False
        for name, reply in self._changed.exists(names):
            if reply:  # also an error: leasing will report it
                found = True
                self._delay_queue.put(name, now_ms)
            elif self._changed.refused:
                self._idle.put(name, now_ms + self._idle_poll_ms)
        return found

    def _block(self, now_ms: float) -> None:
        """Block until a stream is reported ready, or is due by itself."""
        self._loop_metrics.on_polled(0)
        if self._query_idle(now_ms):
            return
        wait_ms = min(self._policy.block_ms, self._delay_queue.wait_ms(now_ms), self._idle.wait_ms(now_ms))
        wake_keys = {to_wire(key): name for name, key in self._active.items()}
        if self._notified is not None and wake_keys:
            if now_ms >= self._poll_due_ms and self._poll(self._notified, now_ms):
                return
            wait_ms, wake_keys = min(wait_ms, self._poll_due_ms - now_ms), {}
        found = self._client.execute("BLPOP", self._shared_ready.key, *wake_keys, math.ceil(max(1.0, wait_ms)) / 1000)
        if found:
            key, name = found
            self._delay_queue.put(wake_keys.get(key) or from_wire(name), now_ms)

    def _poll(self, notified: ChangedStreams, now_ms: float) -> bool:
        """Query the wake-up lists of active streams that have changed; return True if one has an element."""
        active, is_untracked = list(self._active), self._changed.refused or notified.refused
        found = False
        for name, reply in notified.exists(active if is_untracked else notified.find(active)):
            if reply:  # also an error: leasing will report it
                found = True
                self._delay_queue.put(name, now_ms)
        if found:
            self._poll_wait.reset()
        self._poll_due_ms = now_ms + self._poll_wait.next_ms(len(active) if is_untracked else 1)
        return found
