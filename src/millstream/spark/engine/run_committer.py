"""RunCommitter: commits the effects of key runs in Redis, and defers what remains of them.

A commit may be on its way while the task runs other keys: one at a time, in a thread that only calls Redis. What its reply
changes, the task changes once it takes the reply.
"""

import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
    """Commits and defers the runs of one task, and counts that in `metrics` and `failures`.

    * `call`: calls Redis until it answers, while nothing runs; `call_behind`: does so in another thread
    """

    def __init__(
        self,
        commit_store: CommitStore,
        metrics: Mapping[str, TaskMetrics],
        failures: FailureRecorder,
        call: CallRedis,
        call_behind: CallRedis,
    ) -> None:
        self._commit_store = commit_store
        self._metrics = metrics
        self._failures = failures
        self._call = call
        self._call_behind = call_behind
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[Sequence[KeyRun], Future[set[int]]] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let commits begin within the block; its end waits for the last of them, whose reply nothing may need any more."""
        # The signal of a time limit must interrupt the thread that runs the handler.
        block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGALRM})
        with ThreadPoolExecutor(1, "millstream-commit", initializer=block) as self._thread:
            try:
                yield
            finally:
                self._begun = None

    def commit(self, runs: Sequence[KeyRun]) -> list[KeyRun]:
        """Commit the effects of `runs`, in as many calls as they need; return those that were refused."""
        return self._settle(runs, self._send(runs, self._call))

    @property
    def has_reply(self) -> bool:
        """True if the commit that has begun is answered, and `finish` does not wait."""
        return self._begun is not None and self._begun[1].done()

    def begin(self, runs: Sequence[KeyRun]) -> Sequence[KeyRun]:
        """Begin to commit the effects of `runs`, which must not change until `finish`. Refuses none by itself."""
        assert self._thread is not None
        assert self._begun is None
        self._begun = runs, self._thread.submit(self._send, runs, self._call_behind)
        return ()

    def finish(self) -> list[KeyRun]:
        """Wait for the commit that has begun, if any; return the runs that were refused. Raises RedisError as `commit`."""
        if self._begun is None:
            return []
        (runs, reply), self._begun = self._begun, None
        return self._settle(runs, reply.result() if reply.done() else self._call(reply.result))

    def _send(self, runs: Sequence[KeyRun], call: CallRedis) -> set[int]:
        """Commit in as many calls as needed; return which effects were refused, by their identity."""
        refused: set[int] = set()
        for some in chunk_by_size(runs, attrgetter("effects")):
            effects: dict[str, list[Effects]] = defaultdict(list)
            for run in some:
                effects[run.stream].append(run.effects)
            refused.update(map(id, call(partial(self._commit_store.commit, effects))))
        return refused

    def _settle(self, runs: Sequence[KeyRun], refused_effects: set[int]) -> list[KeyRun]:
        refused: list[KeyRun] = []
        for run in runs:
            metrics = self._metrics[run.stream]
            if id(run.effects) in refused_effects:
                metrics.refused += 1
                refused.append(run)
            else:
                metrics.committed += run.effects.message_count - run.effects.skipped_count
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
