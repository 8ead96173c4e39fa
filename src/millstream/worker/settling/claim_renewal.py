"""Keeps what is in hand from being adopted by others, and adopts what others have let go of."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from millstream.clock import Clock
from millstream.delivery.commit_store import Effects
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck, OutOfMemory, Unavailable
from millstream.handlers.attempt import DeadLettered, overdue
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client, Reply
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.policy import WorkerPolicy
from millstream.worker.running.poison_isolation import isolated_after
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

_LOOK_MS_EACH = 2.0
_LOOKED_AT_ONCE = 100
_EXTENSIONS = 3
_GRACE_MS = 1_000.0
_MEASURE_MS = 5_000.0
_WORD_EVERY_MS = 60_000.0
_MOST_ADOPTED = 100
_SOON_S = 0.02
_RUNS_IN_HAND = 3
_CLAIMS_IN_HAND = 10


class ClaimRenewal:
    """The rounds that a worker makes beside its messages. Used by one thread, but for `recover`.

    `streams` are those that this worker has joined so far; others add to them. `on_suspect` takes an entry that was
    delivered so often that whoever ran it may have died of it.
    """

    def __init__(
        self, pipeline: HandlerSteps, hand: InFlight, report: LoopMetrics, clock: Clock, policy: WorkerPolicy, *,
        client: Client, streams: Mapping[str, ReliableStream], on_suspect: Callable[[Delivery], None],
    ) -> None:  # fmt: skip
        self._client = client
        self._streams = streams
        self._pipeline = pipeline
        self._hand = hand
        self._report = report
        self._clock = clock
        self._policy = policy
        self._on_suspect = on_suspect
        self._claiming = threading.Lock()
        self._extend_due_ms = 0.0
        self._longest_ms = _longest_in_hand_ms(pipeline.handler, policy)
        self._measure_due_ms = 0.0
        self._committed_when_noted = -1
        self._more_to_adopt = False
        self._said_ms: dict[str, float] = {}
        self.missed = threading.Event()
        """What this worker holds is to be read again: a reply was lost that may have been about entries, or a stream is
        paused no more."""

    @property
    def streams(self) -> list[ReliableStream]:
        """All that this worker has joined so far."""
        return list(self._streams.values())

    @property
    def _pause_ms(self) -> float:
        # The more streams there are, the less often each is looked at.
        sweep_ms = max(self._policy.sweep_ms, _LOOK_MS_EACH * len(self._streams))
        return min(sweep_ms, self._policy.claim_ms / _EXTENSIONS)

    def watch(self, over: threading.Event) -> None:
        """Entries that are not extended others may run: that is for their commits to find out, and needs no watch."""

    def run(self, stopping: threading.Event) -> None:
        """Make rounds until `stopping`. Raises HandlerStuck, StaleOwner, and RedisError but for Unavailable."""
        while not stopping.wait(self._pause_ms / 1000):
            try:
                self.round()
                due_ms = self._clock.monotonic_ms() + self._pause_ms
                while self._adopt() and self._clock.monotonic_ms() < due_ms and not stopping.wait(_SOON_S):
                    pass
            except Unavailable as error:
                self.missed.set()
                logger.debug("no round while Redis is away: %s", error)

    def hold(self, over: threading.Event) -> None:
        """Keep what still runs in hand until it is over. Raises StaleOwner, and RedisError but for Unavailable."""
        while not over.wait(self._pause_ms / 1000):
            if self._clock.monotonic_ms() >= self._extend_due_ms:
                self._extend_due_ms = self._clock.monotonic_ms() + self._policy.claim_ms / _EXTENSIONS
                try:
                    for stream in self.streams:
                        self._extend(stream)
                except Unavailable as error:
                    logger.debug("what still runs is not extended while Redis is away: %s", error)

    def round(self) -> None:
        """Extend, and note how far the work is."""
        self._tend_all()
        self._look_for_stuck()
        if self._report.is_heard and self._clock.monotonic_ms() >= self._measure_due_ms:
            self._measure_due_ms = self._clock.monotonic_ms() + _MEASURE_MS
            self._report.waiting([stream.waiting() for stream in self.streams if not stream.leaving])
        self._report.stands(in_flight=len(self._hand), buffered=self._hand.buffer.qsize())
        self._report.answered()
        self._report.paused(bool(self._streams) and all(stream.paused for stream in self.streams))

    def recover(self, stream: ReliableStream) -> None:
        """Take into the hand all that this worker holds and has not in hand: from its last life, or a lost reply.

        Not while the stream is paused; then it is done afterwards. Only for the thread that reads the stream, or before
        there is one: what it has just read is held, too, and not in hand yet.
        """
        while not stream.paused and self._take_over(stream, idle_ms=0, own=True, count=_MOST_ADOPTED):
            pass

    def _take_over(self, stream: ReliableStream, *, idle_ms: int, own: bool, count: int) -> int:
        with self._claiming:
            held = self._hand.ids(stream.stream)
            return self._put_in_hand(stream.read_pending(excluding=held, idle_ms=idle_ms, own=own, count=count))

    def _put_in_hand(self, found: Sequence[Delivery]) -> int:
        trusted = isolated_after(self._pipeline.handler.retry)
        self._hand.take([one for one in found if one.deliveries <= trusted], self._clock.monotonic_ms())
        for delivery in found:
            if delivery.deliveries > trusted:
                self._hand.keep(delivery)
                self._on_suspect(delivery)
        self._report.adopted_some(len(found))
        return len(found)

    def _tend_all(self) -> None:
        """Tend each stream; then raise what may have kept some from it, unless that was want of memory."""
        began_ms = self._clock.monotonic_ms()
        extends = began_ms >= self._extend_due_ms
        committed = self._report.committed
        away: Unavailable | None = None
        all_noted = True
        for stream, seen in self._look_at_all():
            try:
                with exclude_on_error(stream):
                    all_noted = self._tend(stream, seen, extends=extends) and all_noted
            except OutOfMemory as error:
                all_noted = False
                self._say("a round over %s is not complete: %s", stream.stream, error)
            except Unavailable as error:
                away = error  # perhaps only the server of this stream is
                if self._clock.monotonic_ms() - began_ms > self._policy.claim_ms / _EXTENSIONS:
                    break
        if away is not None:
            raise away
        if extends:
            self._extend_due_ms = began_ms + self._policy.claim_ms / _EXTENSIONS
        if all_noted:
            self._committed_when_noted = committed

    def _look_at_all(self) -> Iterator[tuple[ReliableStream, Reply]]:
        """Each stream and what a look at it says, many in one round trip."""
        streams = iter(self.streams)
        while some := list(islice(streams, _LOOKED_AT_ONCE)):
            replies: Sequence[Reply]
            try:
                replies = self._client.pipeline([one.to_look() for one in some])
            except Unavailable as error:  # perhaps only one server is
                replies = [error] * len(some)
            yield from zip(some, replies, strict=True)

    def _tend(self, stream: ReliableStream, seen: Reply, *, extends: bool) -> bool:
        """Look after one stream; False if it has to be noted later how far the work is."""
        if stream.leaving:  # only what runs is looked after
            if extends:
                self._extend(stream)
            return True
        was_paused = stream.paused
        stream.looked(seen)
        if was_paused and not stream.paused:
            self.missed.set()
        if extends:
            self._extend(stream)
            if not stream.paused:
                self._take_stuck(stream)
        if self._committed_when_noted == self._report.committed:
            return True
        noted = self._note(stream)
        if self._policy.trim:
            stream.trim()
        return noted

    def _take_stuck(self, stream: ReliableStream) -> None:
        with self._claiming:
            now_ms = self._clock.monotonic_ms()
            self._put_in_hand(stream.read_stuck(longest_ms=self._longest_ms, now_ms=now_ms))

    def _note(self, stream: ReliableStream) -> bool:
        noted = stream.checkpoint()
        if noted == "too many":
            self._say(
                "so many entries of %s are pending that marks in Redis grow until there are fewer: let fewer workers run "
                "at once, with a smaller prefetch", stream.stream,
            )  # fmt: skip
        return noted == "noted"

    def _adopt(self) -> bool:
        """Adopt what there is room for; True if there may be more."""
        for stream in self.streams:
            room = min(self._hand.room(), _MOST_ADOPTED)
            if room <= 0:
                return self._more_to_adopt
            if not stream.paused:
                found = self._take_over(stream, idle_ms=self._policy.claim_ms, own=False, count=room)
                self._more_to_adopt = found >= room
                if self._more_to_adopt:
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
        given_up: list[Delivery] = []
        try:
            for one in self._hand.deliveries:
                if one.running and not one.ran and now_ms - one.since_ms > limit_ms + _GRACE_MS:
                    self._give_up(one)
                    given_up.append(one)
        except Unavailable as error:
            if not given_up and not isinstance(error, OutOfMemory):
                raise
            # It goes on hanging, and others go on beside it, until its attempt can be counted.
            self._say("a run of %s that hangs cannot be given up yet: %s", self._pipeline.handler.label, error)
        if given_up:
            raise HandlerStuck(
                f"{self._pipeline.handler.label} has run on message {given_up[0].id.decode()} of "
                f"{given_up[0].stream.stream} for longer than its time limit of {limit_ms:,.0f} ms, and cannot be ended"
            )

    def _give_up(self, delivery: Delivery) -> None:
        """Note the failed attempt; what else it has in hand the process hands back when it ends."""
        stream = delivery.stream
        message = self._pipeline.decode(delivery)
        if message is not None:
            outcome = overdue(self._pipeline.handler, message, alone=not delivery.in_batch)
            if isinstance(outcome, DeadLettered):
                unit: Effects = self._pipeline.dead_letter(delivery, outcome)
                if not stream.commit([unit]):
                    self._report.committed_some([delivery], [outcome.reason], 0.0)
            else:
                stream.note_failures([delivery])
                self._report.retried_some(1)
                stream.end_isolation([delivery])
                stream.hand_back([delivery.id])
        self._hand.drop([delivery])

    def _say(self, text: str, *args: object) -> None:
        """Log a warning, but not each time."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._said_ms.get(text, now_ms):
            self._said_ms[text] = now_ms + _WORD_EVERY_MS
            logger.warning(text, *args)


def _longest_in_hand_ms(handler: Handler, policy: WorkerPolicy) -> float:
    """For how long a worker that goes by the rules may have one entry in hand.

    That is all its attempts, each after as long as some others take, the waits in between, and some claim times.
    """
    retry = handler.retry
    waits_ms = sum(map(retry.longest_delay_after, range(1, retry.attempts)))
    runs_ms = retry.attempts * _RUNS_IN_HAND * (handler.time_limit_ms + _GRACE_MS)
    return runs_ms + waits_ms + _CLAIMS_IN_HAND * policy.claim_ms
