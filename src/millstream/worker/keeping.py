"""Keeps what is in hand from being adopted by others, and adopts what others have let go of."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from millstream.clock import Clock
from millstream.errors import HandlerStuck, Unavailable
from millstream.ledger import Unit
from millstream.lifecycle import Dead, overdue
from millstream.reliable import Delivery, ReliableStream
from millstream.worker.hand import Hand
from millstream.worker.pipeline import Pipeline
from millstream.worker.policy import WorkerPolicy
from millstream.worker.report import Report

logger = logging.getLogger(__name__)

_EXTENSIONS = 3
_GRACE_MS = 1_000.0
_MEASURE_MS = 5_000.0
_MOST_ADOPTED = 100
_SOON_S = 0.02
_TRUSTED_DELIVERIES = 2


class Keeper:
    """The rounds that a worker makes beside its messages. Used by one thread.

    `discover` joins streams that are new. `on_suspect` takes an entry that was delivered so often that whoever ran it may have died of it.
    """

    def __init__(
        self, pipeline: Pipeline, hand: Hand, report: Report, clock: Clock, policy: WorkerPolicy, *,
        streams: Mapping[str, ReliableStream], discover: Callable[[], None], on_suspect: Callable[[Delivery], None],
    ) -> None:  # fmt: skip
        self._streams = streams
        self._discover = discover
        self._pipeline = pipeline
        self._hand = hand
        self._report = report
        self._clock = clock
        self._policy = policy
        self._on_suspect = on_suspect
        self._extend_due_ms = 0.0
        handler = pipeline.handler
        waits_ms = sum(map(handler.retry.longest_delay_after, range(1, handler.retry.attempts)))
        # No worker that goes by the rules has an entry in hand for longer than all its attempts may take.
        self._longest_ms = handler.retry.attempts * (handler.time_limit_ms + _GRACE_MS) + waits_ms + policy.claim_ms
        self._measure_due_ms = 0.0
        self._noted = -1
        self._behind = False
        self.missed = threading.Event()
        """A reply was lost that may have been about entries: what this worker holds is to be read again."""

    @property
    def streams(self) -> list[ReliableStream]:
        """All that this worker has joined so far."""
        return list(self._streams.values())

    def run(self, stopping: threading.Event) -> None:
        """Make rounds until `stopping`. Raises HandlerStuck, StaleOwner, and RedisError but for Unavailable."""
        pause_ms = min(self._policy.sweep_ms, self._policy.claim_ms / _EXTENSIONS)
        while not stopping.wait(pause_ms / 1000):
            try:
                self.round()
                due_ms = self._clock.monotonic_ms() + pause_ms
                while self._adopt() and self._clock.monotonic_ms() < due_ms and not stopping.wait(_SOON_S):
                    pass
            except Unavailable as error:
                self.missed.set()
                logger.debug("no round while Redis is away: %s", error)

    def round(self) -> None:
        """Extend, and note how far the work is."""
        self._look_for_stuck()
        self._discover()
        for stream in self.streams:
            self._tend(stream)
        if self._clock.monotonic_ms() >= self._extend_due_ms:
            self._extend_due_ms = self._clock.monotonic_ms() + self._policy.claim_ms / _EXTENSIONS
        self._noted = self._report.committed
        if self._report.is_heard and self._clock.monotonic_ms() >= self._measure_due_ms:
            self._measure_due_ms = self._clock.monotonic_ms() + _MEASURE_MS
            self._report.waiting([stream.waiting() for stream in self.streams])
        self._report.stands(in_flight=len(self._hand), buffered=self._hand.buffer.qsize())
        self._report.answered()
        self._report.paused(bool(self._streams) and all(stream.paused for stream in self.streams))

    def recover(self, stream: ReliableStream) -> None:
        """Take into the hand all that this worker holds and has not in hand: from its last life, or a lost reply.

        Not while the stream is paused; then it is done afterwards.
        """
        while not stream.paused and self._take_over(stream, idle_ms=0, own=True, count=_MOST_ADOPTED):
            pass

    def _take_over(self, stream: ReliableStream, *, idle_ms: int, own: bool, count: int) -> int:
        held = self._hand.ids(stream.stream)
        return self._put_in_hand(stream.read_pending(excluding=held, idle_ms=idle_ms, own=own, count=count))

    def _put_in_hand(self, found: Sequence[Delivery]) -> int:
        self._hand.take([one for one in found if one.deliveries <= _TRUSTED_DELIVERIES], self._clock.monotonic_ms())
        for delivery in found:
            if delivery.deliveries > _TRUSTED_DELIVERIES:
                self._hand.keep(delivery)
                self._on_suspect(delivery)
        self._report.adopted_some(len(found))
        return len(found)

    def _tend(self, stream: ReliableStream) -> None:
        was_paused = stream.paused
        stream.look()
        if was_paused and not stream.paused:
            self.recover(stream)
        if self._clock.monotonic_ms() >= self._extend_due_ms:
            self._extend(stream)
            if not stream.paused:
                now_ms = self._clock.monotonic_ms()
                self._put_in_hand(stream.read_stuck(longest_ms=self._longest_ms, now_ms=now_ms))
        if self._noted != self._report.committed:
            stream.checkpoint()
            if self._policy.trim:
                stream.trim()

    def _adopt(self) -> bool:
        """Adopt what there is room for; True if there may be more."""
        for stream in self.streams:
            room = min(self._hand.room(), _MOST_ADOPTED)
            if room <= 0:
                return self._behind
            if not stream.paused:
                found = self._take_over(stream, idle_ms=self._policy.claim_ms, own=False, count=room)
                self._behind = found >= room
                if self._behind:
                    self._hand.found(found, room)
                    return True
        return False

    def _extend(self, stream: ReliableStream) -> None:
        mine = {one.id: one for one in self._hand.deliveries if one.stream is stream and not one.settling}
        # Those that are being committed meanwhile are not pending any more either.
        lost = [mine[entry_id] for entry_id in stream.extend(list(mine)) if not mine[entry_id].settling]
        if lost:
            logger.warning("%d messages of %s are not this worker's any more", len(lost), stream.stream)
            stream.report_trimmed([one.id for one in lost])
            self._hand.drop(lost)
            self._report.refused_some(len(lost))

    def _look_for_stuck(self) -> None:
        limit_ms = self._pipeline.handler.time_limit_ms
        now_ms = self._clock.monotonic_ms()
        stuck = [
            one
            for one in self._hand.deliveries
            if one.running and not one.settling and now_ms - one.since_ms > limit_ms + _GRACE_MS
        ]
        for delivery in stuck:
            self._give_up(delivery)
        if stuck:
            raise HandlerStuck(
                f"{self._pipeline.handler.label} has run on message {stuck[0].id.decode()} of {stuck[0].stream.stream} "
                f"for longer than its time limit of {limit_ms:,.0f} ms, and cannot be ended"
            )

    def _give_up(self, delivery: Delivery) -> None:
        """Note the failed attempt; what else it has in hand the process hands back when it ends."""
        message = self._pipeline.decode(delivery)
        if message is not None:
            outcome = overdue(self._pipeline.handler, message, alone=not delivery.in_batch)
            if isinstance(outcome, Dead):
                unit: Unit = self._pipeline.dead_letter(delivery, outcome)
                delivery.stream.commit([unit])
            else:
                delivery.stream.note_failures([delivery])
                delivery.stream.hand_back([delivery.id])
        self._hand.drop([delivery])
