"""Claim renewal: renews claims on entries in flight, claims idle entries of other workers, and checkpoints progress."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from millstream.delivery.effects import Effects
from millstream.delivery.long_runs import report_long_runs
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck, OutOfMemory, Unavailable
from millstream.handlers.attempt import DeadLettered, RetryLater, timed_out
from millstream.handlers.handler import Handler
from millstream.redis_client.resp import Reply
from millstream.worker.context import WorkerContext
from millstream.worker.policy import TIME_LIMIT_GRACE_MS, WorkerPolicy
from millstream.worker.running.poison_isolation import isolated_after
from millstream.worker.settling.hang_detector import HangDetector
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

_REFRESH_MS_EACH = 2.0
_REFRESHED_AT_ONCE = 100
_RENEWALS_PER_CLAIM = 3
_WARN_EVERY_MS = 60_000.0
_CLAIMED_AT_ONCE = 100
_SOON_S = 0.02
_RUNS_IN_FLIGHT = 3
_CLAIMS_IN_FLIGHT = 10


class ClaimRenewal:
    """The maintenance loop of a worker. Used by one thread, except `recover`.

    * `streams`: the streams that this worker has joined; other threads add to it
    * `release`: returns entries to the group, so that other workers get them
    """

    def __init__(
        self, context: WorkerContext, streams: Mapping[str, ReliableStream], *,
        release: Callable[[Sequence[Delivery]], None],
    ) -> None:  # fmt: skip
        self._context = context
        self._client = context.client
        self._streams = streams
        self._steps = context.steps
        self._in_flight = context.in_flight
        self._loop_metrics = context.loop_metrics
        self._clock = context.clock
        self._policy = context.policy
        self._release = release
        self._breaker = context.breaker
        self._hang_detector = HangDetector(context.handler, context.consumer, context.traceback_of_run)
        self._claim_lock = threading.Lock()
        self._renew_due_ms = 0.0
        self._longest_in_flight_ms = _longest_in_flight_ms(context.handler, context.policy)
        self._committed_at_checkpoint = -1
        self._more_to_claim = False
        self._warn_due_ms: dict[str, float] = {}
        self.reread_pending = threading.Event()
        """Set when the pending entries of this worker have to be read again: a reply that may have held entries was
        lost, or a stream is no longer paused."""

    @property
    def streams(self) -> list[ReliableStream]:
        """All streams that this worker has joined so far."""
        return list(self._streams.values())

    @property
    def _interval_ms(self) -> float:
        # The more streams there are, the less often each is refreshed.
        sweep_ms = max(self._policy.sweep_ms, _REFRESH_MS_EACH * len(self._streams))
        return min(sweep_ms, self._policy.claim_ms / _RENEWALS_PER_CLAIM)

    def run_watchdog(self, over: threading.Event) -> None:
        """Nothing to watch: another worker may run an entry that is not renewed; the commit here is then refused."""

    def run(self, stopping: threading.Event) -> None:
        """Do maintenance until `stopping`. Raises HandlerStuck, StaleOwner, and RedisError except Unavailable."""
        while not stopping.wait(self._interval_ms / 1000):
            try:
                self.run_once()
                due_ms = self._clock.monotonic_ms() + self._interval_ms
                while self._claim_idle() and self._clock.monotonic_ms() < due_ms and not stopping.wait(_SOON_S):
                    pass
            except Unavailable as error:
                self.reread_pending.set()
                logger.debug("claim renewal failed, Redis is unavailable: %s; retrying", error)

    def run_until_ended(self, over: threading.Event) -> None:
        """Renew the claims on running entries until `over`. Raises StaleOwner, and RedisError except Unavailable."""
        while not over.wait(self._interval_ms / 1000):
            if self._clock.monotonic_ms() >= self._renew_due_ms:
                self._renew_due_ms = self._clock.monotonic_ms() + self._policy.claim_ms / _RENEWALS_PER_CLAIM
                try:
                    for stream in self.streams:
                        with exclude_on_error(stream):
                            self._renew(stream)
                except Unavailable as error:
                    logger.debug("cannot renew the claims of running messages, Redis is unavailable: %s", error)

    def run_once(self) -> None:
        """Renew claims, checkpoint, check time limits, and report figures, once."""
        self._release_surplus()
        unavailable = self._maintain_all()  # perhaps of one node only: the time limits hold all the same
        self._check_time_limits()
        self._loop_metrics.set_in_flight(in_flight=len(self._in_flight), buffered=self._in_flight.buffer.qsize())
        self._loop_metrics.on_reply()
        self._steps.failures.report_omitted()
        runs, ended = self._hang_detector.due_reports(self._clock.monotonic_ms())
        report_long_runs(self._client, self._steps.handler.app, runs, ended)
        if unavailable is not None:
            raise unavailable

    def _release_surplus(self) -> None:
        """Release what waits for the end of a run in isolation, which may take as long as the handler's time limit."""
        if not self._in_flight.gate.is_set():
            self._release(self._in_flight.remove_unstarted(but_suspects=True))

    def recover(self, stream: ReliableStream) -> None:
        """Add to flight the entries that this worker holds in Redis only: from before a restart, or from a lost reply.

        Skips a paused stream; it is done when the stream resumes. Call it only in the thread that reads the stream, or
        before there is one: entries that thread has just read are held in Redis, too, and not in flight yet.
        """
        while not stream.paused and self._claim(stream, idle_ms=0, own=True, count=_CLAIMED_AT_ONCE):
            pass

    def _claim(self, stream: ReliableStream, *, idle_ms: int, own: bool, count: int) -> int:
        with self._claim_lock:
            in_flight = self._in_flight.entry_ids(stream.stream)
            return self._add_in_flight(stream.claim_idle(excluding=in_flight, idle_ms=idle_ms, own=own, count=count))

    def _add_in_flight(self, claimed: Sequence[Delivery]) -> int:
        trusted_count = isolated_after(self._steps.handler.retry)
        self._in_flight.add([one for one in claimed if one.deliveries <= trusted_count], self._clock.monotonic_ms())
        for delivery in claimed:
            if delivery.deliveries > trusted_count:
                self._in_flight.add_suspect(delivery)
                self._context.on_suspect(delivery)
        self._loop_metrics.count_claimed(len(claimed))
        return len(claimed)

    def _maintain_all(self) -> Unavailable | None:
        """Maintain each stream. Return the error that kept some streams from it, except OutOfMemory."""
        began_ms = self._clock.monotonic_ms()
        renews = began_ms >= self._renew_due_ms
        committed = self._loop_metrics.committed
        unavailable: Unavailable | None = None
        all_checkpointed = True
        for stream, refresh in self._refresh_all():
            try:
                with exclude_on_error(stream):
                    all_checkpointed = self._maintain(stream, refresh, renews=renews) and all_checkpointed
            except OutOfMemory as error:
                all_checkpointed = False
                self._warn("maintenance of %s is incomplete: %s; retrying", stream.stream, error)
            except Unavailable as error:
                unavailable = error  # perhaps only the server of this stream is unavailable
                if self._clock.monotonic_ms() - began_ms > self._policy.claim_ms / _RENEWALS_PER_CLAIM:
                    break
        if unavailable is not None:
            return unavailable
        if renews:
            self._renew_due_ms = began_ms + self._policy.claim_ms / _RENEWALS_PER_CLAIM
        if all_checkpointed:
            self._committed_at_checkpoint = committed
        return None

    def _refresh_all(self) -> Iterator[tuple[ReliableStream, Callable[[], None]]]:
        """Yield each stream with a function that applies the reply to its refresh; a round trip carries many."""
        streams = iter(self.streams)
        while some := list(islice(streams, _REFRESHED_AT_ONCE)):
            calls = [one.refresh_call() for one in some]
            replies: Sequence[Reply]
            try:
                replies = self._client.pipeline([call.command for call in calls])
            except Unavailable as error:  # perhaps only one server is unavailable
                replies = [error] * len(some)
            for stream, call, reply in zip(some, calls, replies, strict=True):
                yield stream, partial(call.parse, reply)

    def _maintain(self, stream: ReliableStream, refresh: Callable[[], None], *, renews: bool) -> bool:
        """Maintain one stream; return False if its checkpoint has to be repeated."""
        if stream.leaving:  # only entries that still run are kept
            if renews:
                self._renew(stream)
            return True
        before = stream.pause
        refresh()
        if self._breaker.follow(stream, before):
            self.reread_pending.set()
        if renews:
            self._renew(stream)
            if not stream.paused:
                self._claim_stuck(stream)
        if self._committed_at_checkpoint == self._loop_metrics.committed:
            return True
        checkpoint = self._checkpoint(stream)
        if self._policy.trim:
            stream.trim()
        return checkpoint

    def _claim_stuck(self, stream: ReliableStream) -> None:
        with self._claim_lock:
            now_ms = self._clock.monotonic_ms()
            self._add_in_flight(stream.claim_stuck(longest_ms=self._longest_in_flight_ms, now_ms=now_ms))

    def _checkpoint(self, stream: ReliableStream) -> bool:
        checkpoint = stream.checkpoint()
        if checkpoint == "too many":
            self._warn(
                "cannot checkpoint %s: too many entries are pending, so the key offsets in Redis grow until there are "
                "fewer; run fewer workers at once, or use a smaller prefetch", stream.stream,
            )  # fmt: skip
        return checkpoint == "noted"

    def _claim_idle(self) -> bool:
        """Claim as many idle entries as there is room for; return True if there may be more."""
        for stream in self.streams:
            room = min(self._in_flight.free_slots(), _CLAIMED_AT_ONCE)
            if room <= 0:
                return self._more_to_claim
            if not stream.paused:
                claimed = self._claim(stream, idle_ms=self._policy.claim_ms, own=False, count=room)
                self._more_to_claim = claimed >= room
                if self._more_to_claim:
                    self._in_flight.on_fetched(claimed, room)
                    return True
        return False

    def _renew(self, stream: ReliableStream) -> None:
        in_flight = {one.id: one for one in self._in_flight.deliveries if one.stream is stream and not one.committing}
        # Entries whose commit runs meanwhile are not pending any more either, and are not lost.
        lost = [
            in_flight[entry_id]
            for entry_id in stream.renew_claims(list(in_flight))
            if not in_flight[entry_id].committing
        ]
        if lost:
            logger.warning(
                "%s: claims on %d messages of %s lost: another worker claimed them, or they were deleted; dropping them",
                self._steps.handler.label, len(lost), stream.stream,
            )  # fmt: skip
            stream.report_trimmed([one.id for one in lost])
            self._in_flight.remove(lost)
            self._loop_metrics.count_refused(len(lost))

    def _check_time_limits(self) -> None:
        limit_ms = self._steps.handler.time_limit_ms
        now_ms = self._clock.monotonic_ms()
        given_up: list[Delivery] = []
        try:
            runs = self._in_flight.runs
            self._hang_detector.check(runs, now_ms)
            for one in runs:
                if now_ms - one.state_since_ms > limit_ms + TIME_LIMIT_GRACE_MS:
                    if one in self._in_flight:  # else another worker, or an operator, has taken the entry meanwhile
                        self._give_up_run(one)
                    given_up.append(one)
        except Unavailable as error:
            if not given_up and not isinstance(error, OutOfMemory):
                raise
            # The run hangs on, and others go on beside it, until its attempt can be recorded.
            self._warn("cannot give up a run that hangs: %s; retrying", error)
        if given_up:
            raise HandlerStuck(
                f"{self._steps.handler.label} has run on message {given_up[0].id.decode()} of "
                f"{given_up[0].stream.stream} for longer than its time limit of {limit_ms:,.0f} ms, and cannot be ended"
            )

    def _give_up_run(self, delivery: Delivery) -> None:
        """Record the failed attempt. The process releases its other entries when it ends."""
        stream = delivery.stream
        message = self._steps.decode(delivery)
        if message is not None:
            where = self._context.traceback_of_run(delivery)
            outcome = timed_out(self._steps.handler, message, where=where, alone=not delivery.in_batch)
            if isinstance(outcome, DeadLettered):
                effects: Effects = self._steps.dead_letter(delivery, outcome)
                if not stream.commit([effects]):
                    self._loop_metrics.count_committed([delivery], [outcome.reason], 0.0)
                    self._steps.failures.dead_lettered(effects.dead_letters)
            else:
                assert isinstance(outcome, RetryLater)  # entries without a key are never parked
                self._steps.log_failure(delivery, outcome)
                stream.record_failures([delivery])
                self._loop_metrics.count_retried(1)
                stream.end_isolation([delivery])
                stream.nack([delivery.id])
        self._in_flight.remove([delivery])

    def _warn(self, text: str, *args: object) -> None:
        """Log a warning, each text once a minute at most."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._warn_due_ms.get(text, now_ms):
            self._warn_due_ms[text] = now_ms + _WARN_EVERY_MS
            logger.warning("%s: %s", self._steps.handler.label, text % args)


def _longest_in_flight_ms(handler: Handler, policy: WorkerPolicy) -> float:
    """Return for how long a healthy worker may have one entry in flight, in milliseconds.

    The sum of all its attempts, each after as long as some other runs take, of the waits in between, and of some claim
    times.
    """
    retry = handler.retry
    waits_ms = sum(map(retry.max_delay_after, range(1, retry.attempts)))
    runs_ms = retry.attempts * _RUNS_IN_FLIGHT * (handler.time_limit_ms + TIME_LIMIT_GRACE_MS)
    return runs_ms + waits_ms + _CLAIMS_IN_FLIGHT * policy.claim_ms
