"""What a message goes through on a worker, step by step, for users to extend."""

from collections.abc import Callable, Sequence

from millstream.delivery.commit_store import Effects
from millstream.delivery.keyed_stream import KeyLease, queue_of_key
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import DecodeError
from millstream.handlers.attempt import (
    BatchOutcome,
    DeadLettered,
    Done,
    Outcome,
    Parked,
    RetryLater,
    attempt,
    attempt_batch,
    attempt_batch_plain,
    attempt_plain,
    letter,
    refuse_unkeyed,
)
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.handler import Handler
from millstream.model import Message
from millstream.observability.tracing import UNTRACED, TracedRun, tracing
from millstream.redis_client.key_names import REDRIVE_FIELD


class HandlerSteps:
    """The steps of a message of one handler: decode, run, then commit, dead-letter or retry.

    Subclass it to do something before or after a step; call the step itself, and return what it returns. All of
    them may be called from several threads at once.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._has_key = handler.key is not None
        self._label = handler.label.encode()
        self._tracing = tracing()

    def line_of(self, stream: str, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """The line of an entry of a handler with a key; b"" if it was redriven for another handler of the stream."""
        opened = self._open(pairs)
        if opened is None:
            return b""
        try:
            key = self.handler.key_of(Message(stream, entry_id.decode(), opened))
        except DecodeError:
            key = None  # it is a dead letter as soon as it is run
        return queue_of_key(key, entry_id)

    def decode(self, delivery: Delivery) -> Message | None:
        """Make a message of an entry; None if it was redriven for another handler of the stream."""
        pairs: Sequence[bytes] | None = delivery.pairs
        if delivery.pairs[0] == REDRIVE_FIELD:
            pairs = self._open(delivery.pairs)
        return None if pairs is None else _message(delivery, pairs)

    def _open(self, pairs: Sequence[bytes]) -> Sequence[bytes] | None:
        if pairs[0] != REDRIVE_FIELD:
            return pairs
        return pairs[2:] if pairs[1] == self._label else None

    def run(self, message: Message, state: bytes = b"") -> Outcome:
        """Run a plain handler once. It cannot be stopped in its thread: the loop's watchdog ends the process.

        `state`: that of its key.
        """
        if self._has_key and (refusal := refuse_unkeyed(self.handler, message)) is not None:
            return refusal
        if self._tracing is UNTRACED:
            return attempt_plain(self.handler, message, state)
        with self._tracing.processing(self.handler.label, message) as span:
            return _traced(span, attempt_plain(self.handler, message, state))

    async def run_async(self, message: Message, state: bytes = b"") -> Outcome:
        """Run an async handler once."""
        if self._has_key and (refusal := refuse_unkeyed(self.handler, message)) is not None:
            return refusal
        if self._tracing is UNTRACED:
            return await attempt(self.handler, message, state)
        with self._tracing.processing(self.handler.label, message) as span:
            return _traced(span, await attempt(self.handler, message, state))

    def run_batch(self, messages: Sequence[Message]) -> BatchOutcome:
        """Run a plain handler once on a batch."""
        with self._tracing.processing(self.handler.label, *messages) as span:
            dead, outcome = attempt_batch_plain(self.handler, messages)
            return dead, _traced(span, outcome)

    async def run_batch_async(self, messages: Sequence[Message]) -> BatchOutcome:
        """Run an async handler once on a batch."""
        with self._tracing.processing(self.handler.label, *messages) as span:
            dead, outcome = await attempt_batch(self.handler, messages)
            return dead, _traced(span, outcome)

    def commit(self, delivery: Delivery, done: Done) -> Effects:
        """The effects of a message that the handler has done, to be committed with its acknowledgement."""
        unit = delivery.stream.unit(delivery)
        if done.outputs:
            unit.add_outputs(done.outputs)
        return unit

    def commit_batch(self, deliveries: Sequence[Delivery], done: Done) -> Effects:
        """The outputs of a batch of several, to be committed with the acknowledgement of all of them, or not at all."""
        unit = deliveries[0].stream.unit(*deliveries)
        unit.add_outputs(done.outputs)
        return unit

    def commit_turn(self, lease: KeyLease, ran: Sequence[tuple[Delivery, Done | DeadLettered]]) -> Effects:
        """The effects of messages of one key that were run one after another, to be committed under its lease."""
        unit = lease.stream.unit_of(lease, [delivery for delivery, _ in ran])
        state = lease.committed_state
        for delivery, outcome in ran:
            if isinstance(outcome, DeadLettered):
                unit.add_dead(self.letter(delivery, outcome).items())
            else:
                state = outcome.state
                if outcome.outputs:
                    unit.add_outputs(outcome.outputs)
        if self.handler.wants_state and lease.key is not None and state != lease.committed_state:
            unit.state = state
        return unit

    def dead_letter(self, delivery: Delivery, dead: DeadLettered) -> Effects:
        """The effects of a message that cannot be processed: its dead letter."""
        unit = delivery.stream.unit(delivery)
        unit.add_dead(self.letter(delivery, dead).items())
        return unit

    def letter(self, delivery: Delivery, dead: DeadLettered) -> DeadLetter:
        """The dead letter of an entry."""
        pairs = delivery.pairs[2:] if delivery.pairs[0] == REDRIVE_FIELD else delivery.pairs
        return letter(self.handler, _message(delivery, pairs), dead)

    def retry(self, delivery: Delivery, again: RetryLater) -> float:
        """How long a message waits before its next attempt, in milliseconds."""
        return again.delay_ms


def _message(delivery: Delivery, pairs: Sequence[bytes]) -> Message:
    stream, lease = delivery.stream, delivery.lease
    key, fence = (None, stream.token) if lease is None else (lease.key, lease.fence)
    # The handler may change its message: the next attempt, and a dead letter, are of what stands in the stream.
    return Message(stream.stream, delivery.id.decode(), pairs[:], key, delivery.attempt, fence)


def _traced(span: TracedRun, outcome: Outcome) -> Outcome:
    if isinstance(outcome, DeadLettered):
        span.failed(outcome.reason, outcome.error)
    elif isinstance(outcome, Parked):
        span.failed("parked", outcome.error)
    elif isinstance(outcome, RetryLater):
        span.failed("retry", outcome.error)
    return outcome


MakePipeline = Callable[[Handler], HandlerSteps]
