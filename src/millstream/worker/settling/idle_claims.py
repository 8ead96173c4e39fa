"""IdleClaimer: claims the idle entries of other workers, and recovers those of this worker."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import RedisError, Unavailable
from millstream.handlers.handler import Handler
from millstream.worker.context import WorkerContext
from millstream.worker.policy import TIME_LIMIT_GRACE_MS, WorkerPolicy
from millstream.worker.running.losses import isolated_after, loss_retry
from millstream.worker.settling.stream_calls import Step, ask_all, query_by

_CLAIMED_AT_ONCE = 100
_ASKED_AT_ONCE = 100
_RUNS_IN_FLIGHT = 3
_CLAIMS_IN_FLIGHT = 10


class IdleClaimer:
    """Claims pending entries of a handler without a key, and adds them to flight. Used by one thread, except `recover`.

    `streams`: the streams that this worker has joined; other threads add to it.
    """

    def __init__(self, context: WorkerContext, streams: Mapping[str, ReliableStream]) -> None:
        self._context = context
        self._streams = streams
        self._in_flight = context.in_flight
        self._clock = context.clock
        self._claim_lock = threading.Lock()
        self._loss_retry = loss_retry(context.handler.retry)
        self._recovered: set[str] = set()
        self._longest_in_flight_ms = _longest_in_flight_ms(context.handler, context.policy)
        self._more_to_claim = False

    def recover(self, stream: ReliableStream) -> None:
        """See Renewer: adds these entries to flight. Skips a paused stream; it is done when the stream resumes."""
        # From the second call on, entries that are pending and not in flight came in a lost reply: no run has begun.
        is_first = stream.stream not in self._recovered
        while not stream.paused and self._claim(stream, idle_ms=0, own=True, count=_CLAIMED_AT_ONCE, delays=is_first):
            pass
        if not stream.paused:
            self._recovered.add(stream.stream)

    def claim_idle(self) -> bool:
        """See Renewer."""
        streams = list(self._streams.values())
        for at in range(0, len(streams), _ASKED_AT_ONCE):
            if self._room() <= 0:
                return self._more_to_claim
            for stream in self._with_idle(streams[at : at + _ASKED_AT_ONCE]):
                if (room := self._room()) <= 0:
                    return self._more_to_claim
                claimed = self._claim(stream, idle_ms=self._context.policy.claim_ms, own=False, count=room)
                self._more_to_claim = claimed >= room
                if self._more_to_claim:
                    self._in_flight.on_fetched(claimed, room)
                    return True
        self._more_to_claim = False
        return False

    def _room(self) -> int:
        return min(self._in_flight.free_slots(), _CLAIMED_AT_ONCE)

    def _with_idle(self, streams: Sequence[ReliableStream]) -> list[ReliableStream]:
        """Return those of the streams that may have idle entries; one round trip asks them all."""
        asked = [one for one in streams if not one.paused]
        calls = [one.may_claim_call(self._context.policy.claim_ms) for one in asked]
        try:
            replies = list(self._context.client.run_all(calls))
        except Unavailable:  # perhaps of one node of a cluster: claims find out of which
            return asked
        return [one for one, may_claim in zip(asked, replies, strict=True) if may_claim]

    def claim_stuck(self, streams: Mapping[str, ReliableStream]) -> Iterator[Step]:
        """Yield the steps that claim the entries of workers that renew their claims but seem stuck."""
        asked = {name: one for name, one in streams.items() if not one.paused}
        times = {"longest_ms": self._longest_in_flight_ms, "now_ms": self._clock.monotonic_ms()}
        calls = {name: one.has_stuck_call(**times) for name, one in asked.items()}
        for name, has_stuck in ask_all(calls, query_by(self._context.client)):
            yield asked[name], partial(self._claim_stuck, asked[name], has_stuck)

    def _claim_stuck(self, stream: ReliableStream, has_stuck: Callable[[], bool | RedisError]) -> None:
        if has_stuck():
            with self._claim_lock:
                now_ms = self._clock.monotonic_ms()
                claimed = stream.claim_stuck(longest_ms=self._longest_in_flight_ms, now_ms=now_ms)
                self._add_in_flight(claimed, delays=False)

    def _claim(self, stream: ReliableStream, *, idle_ms: int, own: bool, count: int, delays: bool = True) -> int:
        with self._claim_lock:
            in_flight = self._in_flight.entry_ids(stream.stream)
            claimed = stream.claim_idle(excluding=in_flight, idle_ms=idle_ms, own=own, count=count)
            return self._add_in_flight(claimed, delays=delays)

    def _add_in_flight(self, claimed: Sequence[Delivery], *, delays: bool) -> int:
        """Add claimed entries to flight; `delays`: those that a process may have died of wait first."""
        trusted_count = isolated_after(self._context.handler.retry)
        by_loss_count: dict[int, list[Delivery]] = defaultdict(list)
        for one in claimed:
            if one.deliveries <= trusted_count:
                by_loss_count[one.deliveries - 1 if delays else 0].append(one)
        for loss_count, trusted in by_loss_count.items():
            delay_ms = self._loss_retry.delay_after(loss_count) if loss_count else 0.0
            self._in_flight.add_later(trusted, delay_ms, self._clock)
        for delivery in claimed:
            if delivery.deliveries > trusted_count:
                self._in_flight.add_suspect(delivery)
                self._context.on_suspect(delivery)
        self._context.loop_metrics.count_claimed(len(claimed))
        return len(claimed)


def _longest_in_flight_ms(handler: Handler, policy: WorkerPolicy) -> float:
    """Return for how long a healthy worker may have one entry in flight, in milliseconds.

    The sum of all its attempts, each after as long as some other runs take, of the waits in between, and of some claim
    times.
    """
    retry = handler.retry
    waits_ms = sum(map(retry.max_delay_after, range(1, retry.attempts)))
    runs_ms = retry.attempts * _RUNS_IN_FLIGHT * (handler.time_limit_ms + TIME_LIMIT_GRACE_MS)
    return runs_ms + waits_ms + _CLAIMS_IN_FLIGHT * policy.claim_ms
