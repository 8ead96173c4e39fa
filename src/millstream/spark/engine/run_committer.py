"""RunCommitter: commits the effects of key runs in Redis, and defers what remains of them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import Deferral, defer
from millstream.delivery.effects import Effects, chunk_by_size
from millstream.observability.failure_log import FailureRecorder
from millstream.spark.engine.attempt_runner import CallRedis
from millstream.spark.engine.key_run import KeyRun
from millstream.spark.engine.task_metrics import TaskMetrics


class RunCommitter:
    """Commits and defers the runs of one task, and counts that in `metrics` and `failures`. `call`: calls Redis."""

    def __init__(
        self, commit_store: CommitStore, metrics: Mapping[str, TaskMetrics], failures: FailureRecorder, call: CallRedis
    ) -> None:
        self._commit_store = commit_store
        self._metrics = metrics
        self._failures = failures
        self._call = call

    def commit(self, runs: Sequence[KeyRun]) -> list[KeyRun]:
        """Commit the effects of `runs`, in as many calls as they need; return those that were refused."""
        return [one for some in chunk_by_size(runs, attrgetter("effects")) for one in self._commit_together(some)]

    def _commit_together(self, runs: Sequence[KeyRun]) -> list[KeyRun]:
        effects: dict[str, list[Effects]] = defaultdict(list)
        for run in runs:
            effects[run.stream].append(run.effects)
        refused_effects = {id(one) for one in self._call(lambda: self._commit_store.commit(effects))}
        refused: list[KeyRun] = []
        for run in runs:
            metrics = self._metrics[run.stream]
            if id(run.effects) in refused_effects:
                metrics.refused += 1
                refused.append(run)
            else:
                metrics.committed += run.effects.message_count
                metrics.head_of_line_avoided += run.effects.count_unblocked()
                metrics.dead += len(run.effects.dead_letters)
                self._failures.dead_lettered(run.effects.dead_letters)
                for other in run.others:
                    other.covered = []
                run.on_committed()
        return refused

    def defer(self, runs: Sequence[KeyRun]) -> list[KeyRun]:
        """Defer the remaining entries of `runs`, whose processed entries are all committed; return the refused runs."""
        by_stream: dict[str, list[tuple[KeyRun, Deferral]]] = defaultdict(list)
        for run in runs:
            by_stream[run.stream].append((run, run.deferral()))
        refused: list[KeyRun] = []
        for stream, some in by_stream.items():
            defer_all = partial(defer, self._commit_store, stream, [deferral for _, deferral in some])
            refused_deferrals = {id(deferral) for deferral in self._call(defer_all)}
            metrics = self._metrics[stream]
            for run, deferral in some:
                if id(deferral) in refused_deferrals:
                    metrics.refused += 1
                    refused.append(run)
                else:
                    metrics.deferred += len(deferral.ids)
                    run.entries.clear()
        return refused
