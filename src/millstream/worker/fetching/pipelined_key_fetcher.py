"""Pipelined key fetcher: leases keys of thousands of streams, those of many streams in one round trip."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

from millstream.delivery.keyed_stream import KeyedStream, LeaseResult
from millstream.errors import RedisError
from millstream.worker.context import WorkerContext
from millstream.worker.due_times import DelayQueue
from millstream.worker.fetching.key_fetcher import LeaseFetcher
from millstream.worker.stream_exclusion import exclude_on_error

AT_ONCE = 100
SWEEP_MS_EACH = 5.0
_FOREIGN_LEASE_MS = 100.0


class PipelinedKeyFetcher(LeaseFetcher):
    """Leases one key queue of each stream that is due.

    `ready_streams`: a queue of names of streams that may have entries. Each stream is polled from time to time, too.
    """

    def __init__(
        self, context: WorkerContext, streams: Mapping[str, KeyedStream], *, ready_streams: "SimpleQueue[str]"
    ) -> None:
        super().__init__(context, streams)
        self._ready_streams = ready_streams
        self._delay_queue = DelayQueue[str]()
        self._with_oversized: list[str] = []
        self._keys_each = 1

    def fetch(self, room: int, stopping: threading.Event) -> None:
        """See Fetcher."""
        self._loop_metrics.on_poll_wanted()
        now_ms = self._clock.monotonic_ms()
        self._receive_ready(now_ms)
        due = (
            [self._with_oversized.pop()]
            if self._with_oversized
            else self._delay_queue.pop_due(now_ms, min(room, AT_ONCE))
        )
        if not due:
            self._block(now_ms)
            return
        streams = self._affordable(due, now_ms)
        quota = self._acquire_quota([one for one in streams if one.readable])
        for stream in streams:
            if stream.stream not in quota.counts:
                self._delay_queue.put(stream.stream, now_ms + min(self._policy.sweep_ms, quota.until_ms))
        if quota.counts:
            leased = self._lease_from([one for one in streams if one.stream in quota.counts], quota.counts)
            self._in_flight.on_fetched(leased, room)
        else:
            self._loop_metrics.on_idle()

    def _affordable(self, due: Sequence[str], now_ms: float) -> list[KeyedStream]:
        """Return the streams whose entries fit, judging by earlier sizes; make the others due again."""
        streams: list[KeyedStream] = []
        room_bytes = self._in_flight.free_bytes
        for name in due:
            stream = self._streams.get(name)
            if stream is not None and not stream.leaving:
                room_bytes -= stream.entry_sizes.average
                if room_bytes >= 0 or not streams:
                    streams.append(stream)
                else:
                    self._delay_queue.put(name, now_ms)
        return streams

    def refresh(self) -> None:
        """See Fetcher."""
        now_ms = self._clock.monotonic_ms()
        for name in list(self._streams):
            self._delay_queue.put(name, now_ms)

    def _lease_from(self, streams: Sequence[KeyedStream], counts: Mapping[str, int]) -> int:
        """Lease the ready key of each stream in one round trip; return how many were leased."""
        now_ms = self._clock.monotonic_ms()
        options = {
            one.stream: self._lease_options(self._keys_each, counts[one.stream], len(streams)) for one in streams
        }
        results = self._client.run_all([one.lease_keys_call(now_ms=now_ms, **options[one.stream]) for one in streams])
        failed: list[KeyedStream] = []
        leased = self._in_flight.oversized_bytes = 0
        for stream, result in zip(streams, results, strict=True):
            if isinstance(result, RedisError):
                failed.append(stream)
            else:
                leased += self._on_leased(stream, result, now_ms)
        if len(streams) > 1:
            self._in_flight.oversized_bytes = 0  # an entry that did not fit beside others may fit alone
        for stream in failed:  # last: the leases of the other replies are in flight, whatever happens here
            with exclude_on_error(stream):
                leased += self._on_leased(stream, stream.lease_keys(now_ms=now_ms, **options[stream.stream]), now_ms)
        return leased

    def _on_leased(self, stream: KeyedStream, leased: LeaseResult, now_ms: float) -> int:
        """Add leased keys to flight; return how many there are."""
        if leased.unfit_bytes:
            self._in_flight.oversized_bytes = leased.unfit_bytes
            self._with_oversized.append(stream.stream)
            return self._add_in_flight(stream, leased)
        wait_ms = max(self._policy.sweep_ms, SWEEP_MS_EACH * len(self._streams))
        if not leased.leases and leased.wait_ms is not None:
            # The former owner may be about to end its lease, and then no notification reaches this worker.
            wait_ms = min(wait_ms, leased.wait_ms, max(_FOREIGN_LEASE_MS, len(self._streams)))
        self._delay_queue.put(stream.stream, now_ms + wait_ms)
        return self._add_in_flight(stream, leased)

    def _block(self, now_ms: float) -> None:
        """Wait until a stream is reported ready, or is due by itself."""
        self._loop_metrics.on_polled(0)
        wait_ms = max(1.0, min(self._policy.block_ms, self._delay_queue.wait_ms(now_ms)))
        with contextlib.suppress(Empty):
            self._delay_queue.put(self._ready_streams.get(timeout=wait_ms / 1000), now_ms)

    def _receive_ready(self, now_ms: float) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._delay_queue.put(self._ready_streams.get_nowait(), now_ms)
