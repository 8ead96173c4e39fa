"""Tracked key router: routes entries of thousands of streams; key tracking says which have new ones."""

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from millstream.delivery.keyed_stream import READ_BYTES, KeyedStream
from millstream.errors import RedisError, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.worker.context import WorkerContext
from millstream.worker.due_times import DelayQueue, RoundRobin
from millstream.worker.fetching.key_fetcher import WakeUp
from millstream.worker.fetching.key_router import KeyRouter
from millstream.worker.fetching.router_role import RouterRole

logger = logging.getLogger(__name__)

_AT_ONCE = 100
_ROUTED_AT_ONCE = 1_000
_LISTEN_MS = 50.0
_CHECK_MS = 1_000.0
_FALSE_ROUNDS = 5
_WARN_AFTER_FALSE_ROUNDS = 20
_PAUSE_MS_EACH = 10.0
_FALSE_MS_EACH = 0.2


class TrackedKeyRouter(KeyRouter):
    """A KeyRouter that a `KeyTracker` notifies of changed streams; without key tracking in Redis, a plain KeyRouter.

    `ready_streams`: receives the names of streams that may have keys to lease
    """

    def __init__(
        self,
        context: WorkerContext,
        client: Client,
        joined: Mapping[str, KeyedStream],
        role: RouterRole | None = None,
        *,
        ready_streams: WakeUp,
    ) -> None:
        super().__init__(context, client, joined, role)
        self._tracker = KeyTracker(client)
        self._ready_streams = ready_streams
        self._added: SimpleQueue[str] = SimpleQueue()
        self._to_route: dict[str, None] = {}
        self._delayed = DelayQueue[str]()
        self._round_robin = RoundRobin()
        self._check_due_ms = self._collect_due_ms = 0.0
        self._invalidated: set[str] = set()
        self._true_count = self._false_count = self._false_rounds = 0
        self._has_warned = False

    def add(self, stream: KeyedStream) -> None:
        """See KeyRouter."""
        super().add(stream)
        self._added.put(stream.stream)

    def run(self, stopping: threading.Event) -> None:
        """See KeyRouter."""
        while not (stopping.is_set() or self._tracker.refused):
            try:
                self._collect(stopping)
                self._route_batch()
                self._on_routed()
            except Unavailable as error:
                if self._role is not None:
                    self._role.make_due()
                self._log_unavailable(error)
                stopping.wait(self._policy.sweep_ms / 1000)
        self._tracker.close()
        super().run(stopping)

    def _collect(self, stopping: threading.Event) -> None:
        """Wait a little for invalidations; note the streams to route."""
        if self._role is not None:
            before = self._role.held
            self._role.acquire(self.streams.copy())
            self._to_route |= dict.fromkeys(self._role.held - before)
        now_ms = self._clock.monotonic_ms()
        is_check_due = now_ms >= self._check_due_ms
        if now_ms < self._collect_due_ms:
            if not self._to_route:
                stopping.wait(min(_LISTEN_MS, self._collect_due_ms - now_ms) / 1000)
        elif self._to_route or is_check_due or self._tracker.wait(_LISTEN_MS):
            self._on_invalidated()
        now_ms = self._clock.monotonic_ms()
        if is_check_due:
            self._check_due_ms = now_ms + _CHECK_MS
            # Invalidations may be lost: each stream is checked once in a while.
            self._to_route |= dict.fromkeys(self._round_robin.next_names(self.streams))
        self._to_route |= dict.fromkeys(self._delayed.pop_due(now_ms, len(self.streams)))
        with contextlib.suppress(Empty):
            while True:
                self._to_route[self._added.get_nowait()] = None

    def _on_invalidated(self) -> None:
        """Note the invalidated streams. While most invalidations are false, pause before the next read of them.

        A server that can track fewer keys than there are streams reports each key that it stops tracking as changed,
        and stops tracking one for each key that is read. Keys that it cannot track while slots migrate count as
        changed, too.
        """
        self._false_rounds = self._false_rounds + 1 if self._false_count > self._true_count else 0
        pause_ms = 0.0
        if (rounds := self._false_rounds - _FALSE_ROUNDS) > 0:
            pause_ms = min(_longest_pause_ms(self._false_count), _PAUSE_MS_EACH * rounds)
        self._true_count = self._false_count = 0
        if self._false_rounds >= _WARN_AFTER_FALSE_ROUNDS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "most key-tracking invalidations are false: tracking-table-max-keys of Redis may be too small for "
                "%d streams; raise it",
                len(self.streams),
            )
        invalidated = self._tracker.changed()
        if invalidated is None:  # perhaps again at once, as while slots migrate: each time all streams are routed
            pause_ms = max(pause_ms, _longest_pause_ms(len(self.streams)))
        self._collect_due_ms = self._clock.monotonic_ms() + pause_ms
        self._invalidated |= invalidated or set()
        self._to_route |= dict.fromkeys(self.streams.copy() if invalidated is None else invalidated)

    def _route_batch(self) -> None:
        names = self._next_names()
        streams: list[KeyedStream] = []
        for name in names:
            if (stream := self.streams.get(name)) is None or not self._is_owned(name):
                continue
            if self._readable(name):
                streams.append(stream)
            else:
                self._delay(name, _LISTEN_MS)
        more, unavailable = self._route_pipelined(streams) if streams else ([], None)
        for name in names:
            del self._to_route[name]
            self._invalidated.discard(name)
        self._warn_full(streams)
        for stream in streams:
            if stream.stream in self._full:
                self._delay(stream.stream, _LISTEN_MS)
        self._to_route |= dict.fromkeys(name for name in more if name not in self._full)
        if unavailable is not None and not self._client.is_cluster:  # in a cluster it concerns the delayed streams only
            raise unavailable

    def _next_names(self) -> list[str]:
        """Return as many names as may be read together: few where entries are large."""
        names: list[str] = []
        size = 0
        for name in islice(self._to_route, _AT_ONCE):
            if (stream := self.streams.get(name)) is not None:
                size += READ_BYTES // stream.max_read_count
            if names and size > READ_BYTES:
                break
            names.append(name)
        return names

    def _notify(self, stream: KeyedStream) -> None:
        """Notify the fetcher that the stream may have a key to lease."""
        self._ready_streams.put(stream.stream)

    def _delay(self, name: str, for_ms: float) -> None:
        self._delayed.put(name, self._clock.monotonic_ms() + for_ms)

    def _route_pipelined(self, streams: Sequence[KeyedStream]) -> tuple[list[str], Unavailable | None]:
        """Route new entries in two round trips; return which streams may have more, and why others were delayed."""
        found, one_by_one, more = self._read_pipelined(streams)
        before = [(one.enqueued_id, one.pending_count) for one in found]
        look_ahead = self._policy.look_ahead
        calls = [one.enqueue_call(entries, max_pending=look_ahead) for one, entries in found.items()]
        results = self._client.run_all(calls)
        for (stream, entries), enqueued_count, (routed, pending) in zip(found.items(), results, before, strict=True):
            if isinstance(enqueued_count, RedisError):
                one_by_one.append(stream)
                continue
            is_moved = stream.enqueued_id != routed
            # Without new entries a changed position means that Redis lost writes, or that a reply was lost.
            if enqueued_count or is_moved:
                self._notify(stream)
            if enqueued_count < len(entries) or (is_moved and not enqueued_count):
                more.append(stream.stream)
            if stream.stream in self._invalidated:
                is_false = not (
                    enqueued_count or is_moved or pending or stream.pending_count
                )  # commits invalidate the key, too
                self._false_count, self._true_count = self._false_count + is_false, self._true_count + (not is_false)
        others, unavailable = self._route_one_by_one(one_by_one)
        return more + others, unavailable

    def _read_pipelined(
        self, streams: Sequence[KeyedStream]
    ) -> tuple[dict[KeyedStream, Sequence[Any]], list[KeyedStream], list[str]]:
        """Read new entries in one round trip; return them, the streams to read alone, and those that may have more."""
        look_ahead, share = self._policy.look_ahead, READ_BYTES // len(streams)
        counts = [min(_ROUTED_AT_ONCE, one.max_read_count) // len(streams) or 1 for one in streams]
        reads = [
            one.read_call(count=count, max_bytes=share, one_at_least=len(streams) == 1, max_pending=look_ahead)
            for one, count in zip(streams, counts, strict=True)
        ]
        # Reading a key makes Redis report its next change.
        asked = {
            one.stream: read.command if read else ("EXISTS", one.stream)
            for one, read in zip(streams, reads, strict=True)
        }
        try:
            replies = dict(self._tracker.read(asked))
        except Unavailable:
            for stream in streams:
                stream.on_failed_read()
            raise
        found: dict[KeyedStream, Sequence[Any]] = {}
        one_by_one: list[KeyedStream] = []
        more: list[str] = []
        for stream, count, read in zip(streams, counts, reads, strict=True):
            reply = replies[stream.stream]
            if isinstance(reply, Unavailable):  # its key is not tracked, even if the server answers by now
                self._delay(stream.stream, self._policy.sweep_ms)
                if self._client.is_cluster:  # each further read might wait for that server
                    stream.on_failed_read()
                    continue
            if read is None or isinstance(reply, Exception):
                one_by_one.append(stream)
                continue
            entries, unfit = read.parse(reply)
            if unfit and not entries:
                one_by_one.append(stream)
            else:
                found[stream] = entries
            if unfit or len(entries) >= count:
                more.append(stream.stream)
        return found, one_by_one, more

    def _route_one_by_one(self, streams: Sequence[KeyedStream]) -> tuple[list[str], Unavailable | None]:
        """As _route_pipelined, one by one: a refusal by one server delays no stream of the others."""
        more: list[str] = []
        unavailable: Unavailable | None = None
        for stream in streams:
            if (
                unavailable is not None and not self._client.is_cluster
            ):  # its only server has just refused another stream
                self._delay(stream.stream, self._policy.sweep_ms)
                continue
            try:
                if self._route(stream):
                    more.append(stream.stream)
            except Unavailable as error:
                unavailable = error
                logger.debug("cannot route entries of %s: %s; retrying", stream.stream, error)
                self._delay(stream.stream, self._policy.sweep_ms)
        return more, unavailable


def _longest_pause_ms(streams: int) -> float:
    """How long routing pauses at most before it reads invalidations again after so many needless reads of streams."""
    return min(_CHECK_MS, max(_LISTEN_MS, _FALSE_MS_EACH * streams))
