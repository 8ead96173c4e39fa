"""The steps of a message on a worker, for users to extend: decode, run, then commit, dead-letter or retry."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from millstream.delivery.cancellation import Cancellation
from millstream.delivery.effects import CANCELED, Effects
from millstream.delivery.keyed_stream import KeyLease, queue_of_key
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import DecodeError
from millstream.handlers.attempt import (
    BatchOutcome,
    DeadLettered,
    Done,
    ListOutcome,
    Outcome,
    Parked,
    RetryLater,
    attempt,
    attempt_batch,
    attempt_batch_plain,
    attempt_list,
    attempt_list_plain,
    attempt_plain,
    canceled_outcome,
    cancels_rest,
    check_key,
    dead_letter_of,
    is_limited,
)
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.deadlines import Deadlines
from millstream.handlers.handler import Handler
from millstream.model import EntryId, Message
from millstream.observability.failure_log import FailureLog
from millstream.observability.tracing import NO_TRACING, RETRY, TracedRun, tracing
from millstream.redis_client.key_names import REDRIVE_FIELD, own_pairs


class HandlerSteps:
    """The steps of a message of one handler: decode, run, then commit, dead-letter or retry.

    `failures` logs the attempts that fail, and the dead letters. A subclass may add code before or after a step: it
    calls the step itself, and returns its result. Several threads may call any step at once.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.failures = FailureLog(handler)
        self.deadlines: Deadlines | None = None
        """Of the event loop that runs the async attempts, set by its runner: asking asyncio for the loop is a system call.

        So each worker has steps of its own.
        """
        self._has_key = handler.key is not None
        self._label = handler.label.encode()
        self._tracing = tracing()

    @property
    def finds_keys_by_field(self) -> bool:
        """True if `queue_of` is the value of a field: of a subclass only if it adds nothing to that step."""
        return self.handler.key_field is not None and type(self).queue_of is HandlerSteps.queue_of

    def queue_of(self, stream: str, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """Return the key queue of an entry, for a handler with a key; b"" if it is for another one alone."""
        own = self._own_pairs(pairs)
        if own is None:
            return b""
        if self.handler.key_field is not None:
            return queue_of_key(self.handler.key_in(own), entry_id)
        try:
            key = self.handler.key_of(Message(stream, entry_id.decode(), own))
        except DecodeError:
            key = None  # running it dead-letters it
        return queue_of_key(key, entry_id)

    def refusal_of(self, stream: str, entry_id: bytes, pairs: Sequence[bytes]) -> DeadLettered | None:
        """Return the outcome of an entry that has no key; None if the handler may process it, or if it names its handler."""
        return None if pairs[0] == REDRIVE_FIELD else check_key(self.handler, Message(stream, entry_id.decode(), pairs))

    def decode(self, delivery: Delivery) -> Message | None:
        """Make a message of an entry; None if it is for another handler of the stream alone."""
        if delivery.pairs[0] != REDRIVE_FIELD:
            return _message(delivery, delivery.pairs)
        pairs = self._own_pairs(delivery.pairs)
        return None if pairs is None else _message(delivery, pairs)

    def _own_pairs(self, pairs: Sequence[bytes]) -> Sequence[bytes] | None:
        return None if self._is_for_other(pairs) else own_pairs(pairs)

    def _is_for_other(self, pairs: Sequence[bytes]) -> bool:
        """Whether an entry is for another handler of the stream alone."""
        return pairs[0] == REDRIVE_FIELD and pairs[1] != self._label

    def canceled(self, delivery: Delivery) -> DeadLettered | None:
        """Return the outcome of an entry that an earlier dead letter of its key has canceled; None if it may run."""
        cancellation = None if delivery.lease is None else delivery.lease.cancellation
        if cancellation is None or not cancellation.covers(EntryId.parse(delivery.id)):
            return None
        return canceled_outcome(cancellation.canceled_by)

    def cancel_rest(self, delivery: Delivery, outcome: Outcome) -> None:
        """Cancel the entries that are leased behind one that becomes a dead letter, if the handler asks for it."""
        if type(outcome) is Done:  # as nearly always
            return
        if delivery.lease is not None and delivery.lease.key is not None and cancels_rest(self.handler, outcome):
            delivery.lease.cancellation = Cancellation(delivery.id.decode())

    def run(self, message: Message, state: bytes = b"") -> Outcome:
        """Run a plain handler once. Its thread cannot be stopped: beyond the time limit, maintenance ends the process.

        `state`: the state of its key.
        """
        if self._has_key and (refusal := check_key(self.handler, message)) is not None:
            return refusal
        if self._tracing is NO_TRACING:
            return attempt_plain(self.handler, message, state)
        with self._tracing.process_span(self.handler.label, message) as span:
            return _traced(span, attempt_plain(self.handler, message, state))

    def run_async(self, message: Message, state: bytes = b"") -> Coroutine[Any, Any, Outcome]:
        """Run an async handler once. A coroutine, without one more around the attempt where there is nothing to add."""
        if self._has_key and (refusal := check_key(self.handler, message)) is not None:
            return _refused(refusal)
        if self._tracing is not NO_TRACING:
            return self._run_traced(message, state)
        return attempt(self.handler, message, state, self.deadlines)

    async def _run_traced(self, message: Message, state: bytes) -> Outcome:
        with self._tracing.process_span(self.handler.label, message) as span:
            return _traced(span, await attempt(self.handler, message, state, self.deadlines))

    def run_batch(self, messages: Sequence[Message]) -> BatchOutcome:
        """Run a plain handler once on a batch."""
        with self._tracing.process_span(self.handler.label, *messages) as span:
            dead, outcome = attempt_batch_plain(self.handler, messages)
            return dead, _traced(span, outcome)

    async def run_batch_async(self, messages: Sequence[Message]) -> BatchOutcome:
        """Run an async handler once on a batch."""
        with self._tracing.process_span(self.handler.label, *messages) as span:
            dead, outcome = await attempt_batch(self.handler, messages)
            return dead, _traced(span, outcome)

    def run_list(self, messages: Sequence[Message], state: bytes = b"") -> ListOutcome:
        """Run a plain handler once on a list of messages of one key, with the state of the key."""
        if (refusal := check_key(self.handler, messages[0])) is not None:
            return 1, refusal
        with self._tracing.process_span(self.handler.label, *messages) as span:
            count, outcome = attempt_list_plain(self.handler, messages, state)
            return count, _traced(span, outcome)

    async def run_list_async(self, messages: Sequence[Message], state: bytes = b"") -> ListOutcome:
        """Run an async handler once on a list of messages of one key, with the state of the key."""
        if (refusal := check_key(self.handler, messages[0])) is not None:
            return 1, refusal
        with self._tracing.process_span(self.handler.label, *messages) as span:
            count, outcome = await attempt_list(self.handler, messages, state)
            return count, _traced(span, outcome)

    def commit(self, delivery: Delivery, done: Done) -> Effects:
        """Return the effects of a message that the handler processed, to be committed with its acknowledgement."""
        effects = delivery.stream.effects_of(delivery)
        if done.outputs:
            effects.add_outputs(done.outputs)
        elif self._is_for_other(delivery.pairs):
            effects.skipped_count = 1
        return effects

    def commit_batch(self, deliveries: Sequence[Delivery], done: Done) -> Effects:
        """Return the outputs of a batch of several, to be committed with the acknowledgement of all of them, or not."""
        effects = deliveries[0].stream.effects_of(*deliveries)
        effects.add_outputs(done.outputs)
        return effects

    def commit_key(self, lease: KeyLease, outcomes: Sequence[tuple[Delivery, Done | DeadLettered]]) -> Effects:
        """Return the effects of messages of one key, run one after another or in lists, to be committed under its lease."""
        effects = lease.stream.key_effects_of(lease, [delivery for delivery, _ in outcomes])
        state = lease.committed_state
        outputs: list[bytes] = []
        for delivery, outcome in outcomes:
            if isinstance(outcome, DeadLettered):
                effects.add_dead_letter(self.dead_letter_of(delivery, outcome).items())
                if lease.key is not None and cancels_rest(self.handler, outcome):
                    effects.cancels = delivery.id.decode()
                elif outcome.reason == "canceled":
                    effects.cancels = effects.cancels or CANCELED
            else:
                state = outcome.state
                outputs += outcome.outputs
                effects.skipped_count += self._is_for_other(delivery.pairs)
                if outcome.timers:
                    effects.add_timers(outcome.timers)
        if outputs:
            effects.add_outputs(outputs)
        if self.handler.wants_state and lease.key is not None and state != lease.committed_state:
            effects.state = state
        return effects

    def dead_letter(self, delivery: Delivery, dead: DeadLettered) -> Effects:
        """Return the effects of a message that cannot be processed: its dead letter."""
        effects = delivery.stream.effects_of(delivery)
        effects.add_dead_letter(self.dead_letter_of(delivery, dead).items())
        return effects

    def dead_letter_of(self, delivery: Delivery, dead: DeadLettered) -> DeadLetter:
        """Return the dead letter of an entry."""
        return dead_letter_of(self.handler, _message(delivery, own_pairs(delivery.pairs)), dead)

    def retry(self, delivery: Delivery, retry_later: RetryLater) -> float:
        """Return how long a message waits before its next attempt, in milliseconds."""
        return retry_later.delay_ms

    def log_failure(self, delivery: Delivery, outcome: RetryLater | Parked, delay_ms: float = 0.0) -> None:
        """Log a failed attempt, after which the message waits for `delay_ms` milliseconds or its key is parked."""
        lease = delivery.lease
        self.failures.attempt_failed(
            delivery.stream.stream,
            delivery.id.decode(),
            None if lease is None else lease.key,
            delivery.attempt,
            outcome,
            delay_ms=delay_ms,
        )

    def log_dropped(self, delivery: Delivery, outcome: Outcome, action: str) -> None:
        """Log the failed attempt of a run whose outcome has no consequences; `action` says why, and what happens next."""
        ran = not (is_limited(outcome) or (isinstance(outcome, DeadLettered) and outcome.reason == "canceled"))
        if ran and not isinstance(outcome, Done):
            lease = delivery.lease
            key = None if lease is None else lease.key
            stream, entry_id = delivery.stream.stream, delivery.id.decode()
            self.failures.attempt_failed(stream, entry_id, key, delivery.attempt, outcome, action=action)


def _message(delivery: Delivery, pairs: Sequence[bytes]) -> Message:
    stream, lease = delivery.stream, delivery.lease
    # The handler may change its message; the next attempt and a dead letter use the pairs as they are in the stream.
    if lease is None:
        return Message(stream.stream, delivery.id.decode(), pairs[:], None, delivery.attempt, stream.token)
    return Message(stream.stream, delivery.id.decode(), pairs[:], lease.key, delivery.attempt, lease.fence)


async def _refused(refusal: DeadLettered) -> Outcome:
    return refusal


def _traced(span: TracedRun, outcome: Outcome) -> Outcome:
    if isinstance(outcome, DeadLettered):
        span.failed(outcome.reason, outcome.error)
    elif isinstance(outcome, Parked):
        span.failed("parked", outcome.error)
    elif isinstance(outcome, RetryLater):
        span.failed(RETRY, outcome.error)
    return outcome


MakeHandlerSteps = Callable[[Handler], HandlerSteps]
