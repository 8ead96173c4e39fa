"""CommitBuffer: the key runs that a task has processed and not yet committed, and those that it has still to defer."""

from collections.abc import Callable, Iterable, Sequence

from millstream.delivery.effects import MAX_COMMIT_OUTPUTS
from millstream.handlers.consecutive import Room
from millstream.spark.engine.key_run import KeyRun

COMMIT_MESSAGES = 500
COMMIT_BYTES = 1 << 20

Settle = Callable[[Sequence[KeyRun]], Iterable[KeyRun]]
"""Commits or defers runs in Redis; returns those that were refused."""


class CommitBuffer:
    """Collects runs, so that one call commits many messages. Used by one event loop.

    `refused`: the runs, in order, of which Redis has refused a commit or a deferral, as another execution of the task
    was faster. They have to be loaded again. A dict, since a slow execution may have thousands of them.
    """

    def __init__(self) -> None:
        self.refused: dict[KeyRun, None] = {}
        self._staged: list[KeyRun] = []
        self._deferred: list[KeyRun] = []
        self._message_count = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """True if a flush is due."""
        return self._message_count >= COMMIT_MESSAGES or self._bytes >= COMMIT_BYTES

    @property
    def has_deferrals(self) -> bool:
        """True if a deferral is staged."""
        return bool(self._deferred)

    def is_filled_by(self, run: KeyRun) -> bool:
        """Return True if a flush is due once the effects of this run are staged, which may go on."""
        return min(self.room_for(run)) <= 0

    def room_for(self, run: KeyRun) -> Room:
        """Return how much the effects of this run may grow until `is_filled_by` is true."""
        effects = run.effects
        return Room(
            COMMIT_MESSAGES - effects.message_count,
            COMMIT_BYTES - self._bytes,
            MAX_COMMIT_OUTPUTS - effects.output_count,
        )

    def count_bytes(self, size: int) -> None:
        """Note that the effects of a run have grown by so many bytes."""
        self._bytes += size

    def stage(self, run: KeyRun) -> None:
        """Stage the effects of a run for the next flush, if it has any."""
        if run.effects.message_count:
            run.add_state()
            self._staged.append(run)
            self._message_count += run.effects.message_count

    def stage_deferral(self, run: KeyRun) -> None:
        """Stage the effects of a run, and the deferral of its remaining entries."""
        self.stage(run)
        self._deferred.append(run)
        self._message_count += 1

    def flush(self, commit: Settle, defer: Settle) -> None:
        """Commit, then defer; a run whose commit was refused is not deferred.

        Repeating is safe: Redis refuses what is committed, and the reload drops it.
        """
        staged, self._staged, self._message_count, self._bytes = self._staged, [], 0, 0
        if staged:
            self.refuse(commit(staged))
        deferred, self._deferred = self._deferred, []
        if deferred:
            self.refused |= dict.fromkeys(defer([run for run in deferred if run not in self.refused]))

    def refuse(self, runs: Iterable[KeyRun]) -> None:
        """Note runs whose commit was refused, and those that it covers."""
        for run in runs:
            self.refused |= dict.fromkeys((run, *run.others))

    def pop_refused(self) -> list[KeyRun]:
        """Remove and return the refused runs."""
        refused, self.refused = list(self.refused), {}
        return refused
