"""What a message goes through on a worker, step by step, for users to extend."""

from collections.abc import Callable, Sequence

from millstream.errors import ConfigError
from millstream.handlers import Handler
from millstream.ledger import Unit
from millstream.lifecycle import (
    Again,
    BatchOutcome,
    Dead,
    Done,
    Outcome,
    attempt,
    attempt_batch,
    attempt_batch_plain,
    attempt_plain,
    letter,
)
from millstream.model import Message
from millstream.naming import REDRIVE_FIELD
from millstream.reliable import Delivery
from millstream.telemetry import UNTRACED, Run, tracing


class Pipeline:
    """The steps of a message of one handler: decode, run, then commit, dead-letter or retry.

    Subclass it to do something before or after a step; call the step itself, and return what it returns. All of
    them may be called from several threads at once. Raises ConfigError for a handler that a worker cannot run.
    """

    def __init__(self, handler: Handler) -> None:
        if handler.key is not None:
            raise ConfigError(
                f"{handler.label} has a key, and order per key is not kept by workers yet: use millstream run"
            )
        self.handler = handler
        self._label = handler.label.encode()
        self._tracing = tracing()

    def decode(self, delivery: Delivery) -> Message | None:
        """Make a message of an entry; None if it was redriven for another handler of the stream."""
        pairs = delivery.pairs
        if pairs[0] == REDRIVE_FIELD:
            if pairs[1] != self._label:
                return None
            pairs = pairs[2:]
        stream = delivery.stream
        return Message(stream.stream, delivery.id.decode(), pairs, None, delivery.attempt, stream.token)

    def run(self, message: Message) -> Outcome:
        """Run a plain handler once. It cannot be stopped in its thread: the loop's watchdog ends the process."""
        if self._tracing is UNTRACED:
            return attempt_plain(self.handler, message, b"")
        with self._tracing.processing(self.handler.label, message) as span:
            return _traced(span, attempt_plain(self.handler, message, b""))

    async def run_async(self, message: Message) -> Outcome:
        """Run an async handler once."""
        if self._tracing is UNTRACED:
            return await attempt(self.handler, message, b"")
        with self._tracing.processing(self.handler.label, message) as span:
            return _traced(span, await attempt(self.handler, message, b""))

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

    def commit(self, delivery: Delivery, done: Done) -> Unit:
        """The effects of a message that the handler has done, to be committed with its acknowledgement."""
        unit = delivery.stream.unit(delivery)
        if done.outputs:
            unit.add_outputs(done.outputs)
        return unit

    def commit_batch(self, deliveries: Sequence[Delivery], done: Done) -> Unit:
        """The outputs of a batch of several, to be committed with the acknowledgement of all of them, or not at all."""
        unit = deliveries[0].stream.unit(*deliveries)
        unit.add_outputs(done.outputs)
        return unit

    def dead_letter(self, delivery: Delivery, dead: Dead) -> Unit:
        """The effects of a message that cannot be processed: its dead letter."""
        unit = delivery.stream.unit(delivery)
        pairs = delivery.pairs[2:] if delivery.pairs[0] == REDRIVE_FIELD else delivery.pairs
        stream = delivery.stream
        message = Message(stream.stream, delivery.id.decode(), pairs, None, delivery.attempt, stream.token)
        unit.add_dead(letter(self.handler, message, dead).items())
        return unit

    def retry(self, delivery: Delivery, again: Again) -> float:
        """How long a message waits before its next attempt, in milliseconds."""
        return again.delay_ms


def _traced(span: Run, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Dead):
        span.failed(outcome.reason, outcome.error)
    elif isinstance(outcome, Again):
        span.failed("retry", outcome.error)
    return outcome


MakePipeline = Callable[[Handler], Pipeline]
