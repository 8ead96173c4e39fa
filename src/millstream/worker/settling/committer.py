"""Settles what was run: commits it, files it as dead, or has it tried again."""

import heapq
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from operator import itemgetter
from typing import TypeVar

from millstream.clock import Clock
from millstream.delivery.commit_store import Effects, chunk_by_size
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import OutOfMemory
from millstream.handlers.attempt import DeadLettered, Done, RetryLater
from millstream.handlers.dead_letter import reason_of
from millstream.redis_client.client import Client
from millstream.worker.completion_queue import Ran
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics

logger = logging.getLogger(__name__)

_MEMORY_RETRY_MS = 500.0
_WORD_EVERY_MS = 5_000.0
Settled = tuple[Sequence[Delivery], Effects]
T = TypeVar("T")


class Committer:
    """Commits what comes out of the handler, as much at once as has come, and times the retries.

    Used by one thread. `give_up` says that waiting for Redis has no point any more.
    """

    def __init__(
        self, pipeline: HandlerSteps, hand: InFlight, client: Client, report: LoopMetrics, clock: Clock, *,
        give_up: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._pipeline = pipeline
        self._hand = hand
        self._client = client
        self._report = report
        self._clock = clock
        self._give_up = give_up
        self._retries: list[tuple[float, int, Delivery]] = []
        self._number = count()
        self._without_memory: list[Settled] = []
        self._memory_due_ms = 0.0
        self._word_due_ms = 0.0

    def run(self) -> None:
        """Settle until the outbox's end."""
        ended = False
        while not ended:
            found, ended = self._hand.outbox.collect(self._wait_s())
            if found:
                self.settle(found)
                found = []  # nothing holds on to it while more is waited for
            self._wake_retries()
            if self._waits_for_memory and self._clock.monotonic_ms() >= self._memory_due_ms:
                self._try_memory_again()

    def settle(self, found: Sequence[Ran]) -> None:
        """Do what the outcomes ask for."""
        units: list[Settled] = []
        failed: dict[ReliableStream, list[Delivery]] = defaultdict(list)
        now_ms = self._clock.monotonic_ms()
        self._report_times(found)
        gone = self._hand.gone([one for deliveries, _ in found for one in deliveries])
        for deliveries, outcome in found:
            delivery = deliveries[0]
            if gone and not gone.isdisjoint(deliveries):
                # It was given up, or lost to another worker, while it ran; the rest of its batch is run again.
                self._run_again([one for one in deliveries if one not in gone], now_ms)
            elif isinstance(outcome, Done):
                commit = self._pipeline.commit_batch(deliveries, outcome) if len(deliveries) > 1 else None
                units.append((deliveries, commit or self._pipeline.commit(delivery, outcome)))
            elif isinstance(outcome, DeadLettered):
                units.append((deliveries, self._pipeline.dead_letter(delivery, outcome)))
            else:
                assert isinstance(outcome, RetryLater)  # what has no key is not parked
                failed[delivery.stream].append(delivery)
                delivery.running, delivery.since_ms = False, now_ms
                delivery.due_ms = now_ms + self._pipeline.retry(delivery, outcome)
                heapq.heappush(self._retries, (delivery.due_ms, next(self._number), delivery))
        for stream, deliveries in failed.items():
            self._report.retried_some(len(deliveries))
            self._note(stream, deliveries)
        if units:
            self._commit(units)
        self._report.ended(sum([len(deliveries) for deliveries, _ in found]))

    def _note(self, stream: ReliableStream, deliveries: Sequence[Delivery]) -> None:
        try:
            self._patiently(lambda: stream.note_failures(deliveries))
        except OutOfMemory as error:
            logger.warning("%d failed attempts are not counted beyond this worker: %s", len(deliveries), error)

    def _wait_s(self) -> float | None:
        due = [self._retries[0][0]] if self._retries else []
        if self._waits_for_memory:
            due.append(self._memory_due_ms)
        return max(0.0, min(due) - self._clock.monotonic_ms()) / 1000 if due else None

    def _wake_retries(self) -> None:
        now_ms = self._clock.monotonic_ms()
        while self._retries and self._retries[0][0] <= now_ms:
            _, _, delivery = heapq.heappop(self._retries)
            delivery.attempt += 1
            if delivery in self._hand:
                self._hand.take((delivery,), now_ms)

    def _commit(self, settled: Sequence[Settled]) -> None:
        by_stream: dict[ReliableStream, list[Settled]] = defaultdict(list)
        for one_unit in settled:
            by_stream[one_unit[0][0].stream].append(one_unit)
        for stream, some in by_stream.items():
            # Those of the streams to come are kept in hand meanwhile: it may take long where a server is away.
            for one in _deliveries(some):
                one.settling = True
            for portion in chunk_by_size(some, itemgetter(1)):
                try:
                    self._commit_some(stream, portion)
                except OutOfMemory as error:
                    self._wait_for_memory(stream, portion, error)

    def _commit_some(self, stream: ReliableStream, some: Sequence[Settled], *, allow_oom: bool = False) -> None:
        units = [unit for _, unit in some]
        began_ms = self._clock.monotonic_ms()
        call = stream.new_call()
        refused = self._patiently(lambda: stream.commit(units, allow_oom=allow_oom, call=call))
        took_s = (self._clock.monotonic_ms() - began_ms) / 1000
        missing = {id(unit) for unit in refused}
        written = [one for one in some if id(one[1]) not in missing] if missing else some
        dead = [reason for _, unit in written if unit.dead for reason in map(reason_of, unit.dead)]
        settled = _deliveries(some)
        self._report.committed_some(_deliveries(written) if missing else settled, dead, took_s)
        if refused:
            self._report.refused_some(len(refused))
            logger.warning(
                "%d messages of %s were not committed: another worker has taken them over, or they were committed "
                "before (first: %s)", len(refused), stream.stream, refused[0].first_id,
            )  # fmt: skip
        self._hand.drop(settled)
        for deliveries, unit in some if missing else ():
            if len(deliveries) > 1 and id(unit) in missing:
                self._rescue(stream, deliveries)

    def _rescue(self, stream: ReliableStream, deliveries: Sequence[Delivery]) -> None:
        """Run again what this worker still has of a batch that was refused, since some of it is another's by now."""
        try:
            lost = self._patiently(lambda: stream.extend([one.id for one in deliveries]))
        except OutOfMemory:
            return  # they are pending: somebody adopts them later
        self._run_again([one for one in deliveries if one.id not in lost], self._clock.monotonic_ms())

    def _run_again(self, deliveries: Sequence[Delivery], now_ms: float) -> None:
        for one in deliveries:
            one.running = one.ran = one.settling = False
        self._hand.take(deliveries, now_ms)

    def _patiently(self, operation: Callable[[], T]) -> T:
        """Wait while Redis is away; being out of memory is for the caller."""

        def attempt() -> T | OutOfMemory:
            try:
                return operation()
            except OutOfMemory as error:
                return error

        what = self._pipeline.handler.label
        result = self._client.patiently(attempt, what=what, give_up=self._give_up)
        if isinstance(result, OutOfMemory):
            raise result
        return result

    def _wait_for_memory(self, stream: ReliableStream, some: Sequence[Settled], error: OutOfMemory) -> None:
        """Acknowledge what writes nothing, which frees memory in the end; the rest waits, pending and counting no attempt."""
        plain = [one for one in some if not (one[1].outputs or one[1].dead)]
        if plain:
            self._commit_some(stream, plain, allow_oom=True)
        waiting = [one for one in some if one[1].outputs or one[1].dead]
        for one in _deliveries(waiting):
            one.settling = False  # it may take longer than a claim lasts
        self._without_memory += waiting
        self._say_that_memory_is_short(len(waiting), stream, error)

    def _say_that_memory_is_short(self, count: int, stream: ReliableStream, error: OutOfMemory) -> None:
        now_ms = self._clock.monotonic_ms()
        self._memory_due_ms = now_ms + _MEMORY_RETRY_MS
        if count and now_ms >= self._word_due_ms:
            logger.warning("%d messages of %s wait to be committed: %s", count, stream.stream, error)
            self._word_due_ms = now_ms + _WORD_EVERY_MS

    @property
    def _waits_for_memory(self) -> bool:
        return bool(self._without_memory)

    def _try_memory_again(self) -> None:
        waiting, self._without_memory = self._without_memory, []
        self._commit(waiting)

    def _report_times(self, found: Sequence[Ran]) -> None:
        if self._report.is_heard:
            self._report.ran([one.took_ms for deliveries, _ in found for one in deliveries])


def _deliveries(settled: Sequence[Settled]) -> list[Delivery]:
    return [one for deliveries, _ in settled for one in deliveries]
