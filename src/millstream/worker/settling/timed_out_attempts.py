"""TimedOutAttempts: attempts of runs that exceeded their time limit and cannot be ended, as their worker gives them up."""

from millstream.delivery.effects import Effects
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import OutOfMemory, Unavailable
from millstream.handlers.attempt import Outcome, Parked, RetryLater, timed_out
from millstream.handlers.dead_letter import reason_of
from millstream.worker.context import WorkerContext


class TimedOutAttempts:
    """The steps of a give-up that claims and key leases share. Used by one thread.

    A step that fails, as Redis is unavailable, is repeated by the caller until it is done: what it logs and counts comes
    after it, so that it does so once.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._unanswered: set[Delivery] = set()
        """Entries whose dead letter may be written: the reply was lost."""

    def outcome_of(self, delivery: Delivery) -> Outcome | None:
        """Return the outcome of a run that is given up; None for an entry that is meant for another handler alone."""
        message = self._context.steps.decode(delivery)
        if message is None:
            return None
        where = self._context.traceback_of_run(delivery)
        return timed_out(self._context.handler, message, where=where, alone=not delivery.in_batch)

    def write_dead_letter(self, delivery: Delivery, effects: Effects) -> None:
        """Commit the dead letter of an entry; log and count it if it is written. Raises RedisError."""
        try:
            refused = delivery.stream.commit([effects])
        except OutOfMemory:
            raise
        except Unavailable:
            self._unanswered.add(delivery)
            raise
        # Redis refuses what it has written already.
        if not refused or delivery in self._unanswered:
            loop_metrics, letters = self._context.loop_metrics, effects.dead_letters
            avoided = effects.count_unblocked() if delivery.lease is not None else 0
            loop_metrics.count_committed([delivery], list(map(reason_of, letters)), 0.0, head_of_line_avoided=avoided)
            self._note_logged(delivery)
            self._context.steps.failures.dead_lettered(letters)

    def log_failure(self, delivery: Delivery, outcome: RetryLater | Parked) -> None:
        """Log the failed attempt of a run that is given up, once it is recorded."""
        self._note_logged(delivery)
        self._context.steps.log_failure(delivery, outcome)

    def _note_logged(self, delivery: Delivery) -> None:
        """Note it before the entry leaves flight: from then on the committer drops how the run ends."""
        entries = [delivery]
        if delivery.lease is not None and delivery.in_batch:  # a list of its key, whose run any of its messages may end
            entries += [one for one in delivery.lease.entries if one.in_batch and one.running and not one.finished]
        self._context.in_flight.logged.update(entries)
