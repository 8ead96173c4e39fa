"""BatchTask: the Spark task of a batch handler, which runs a stream's messages in lists of at most `batch_size`.

After a failure each message of the list runs by itself, so only the failing one becomes a dead letter. The outputs of a
list are committed together with the offsets of all its messages, or not at all.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from millstream.handlers.attempt import (
    NO_EFFECTS,
    BatchOutcome,
    Done,
    Outcome,
    Parked,
    RetryLater,
    attempt_batch,
    attempt_batch_plain,
)
from millstream.model import Message
from millstream.spark.engine.key_run import KeyRun
from millstream.spark.engine.task import PartitionTask, make_defer_reason


class BatchTask(PartitionTask):
    """PartitionTask for a batch handler. Its messages have no keys: each is a run of its own."""

    async def _run_all(self, runs: list[KeyRun]) -> None:
        if self._isolated_left or any(run.from_queue for run in runs):
            await super()._run_all(runs)
            return
        remaining = _batches(runs, self._handler.batch_size)
        coroutines = self._handler.concurrency if self._handler.is_async else 1
        async with self._heartbeat.watched(), asyncio.TaskGroup() as group:
            for _ in range(min(coroutines, len(runs))):
                group.create_task(self._run_batches(remaining, group))

    async def _run_batches(self, remaining: Iterator[list[KeyRun]], group: asyncio.TaskGroup) -> None:
        for batch in remaining:
            if self._breaker.is_open:
                return
            await self._run_batch(batch, remaining, group)

    async def _run_batch(
        self, batch: list[KeyRun], remaining: Iterator[list[KeyRun]], group: asyncio.TaskGroup
    ) -> None:
        """Run the handler on a batch, then on each failed message by itself."""
        stream, unpacked = batch[0].stream, [(run, *self._unpack_next(run)) for run in batch]
        wanted = [(run, message) for run, message, is_meant in unpacked if is_meant]
        for run, message, is_meant in unpacked:
            if not is_meant:
                self._stage_together([(run, message)], NO_EFFECTS)
        if not wanted:
            return
        await self._rate_limit.acquire(stream, len(wanted))
        dead, outcome = await self._attempt_batch([message for _, message in wanted])
        outcomes = [(run, message, refusal or outcome) for (run, message), refusal in zip(wanted, dead, strict=True)]
        outcomes = [one for one in outcomes if self._admits(one[0], one[2])]
        done = [(run, message) for run, message, one in outcomes if isinstance(one, Done)]
        has_outputs = isinstance(outcome, Done) and outcome.outputs
        for some in [done] * bool(done) if has_outputs else [[one] for one in done]:
            self._stage_together(some, outcome)
        for run, message, one in outcomes:
            if not isinstance(one, (Done, RetryLater)):
                self._stage_together([(run, message)], one)
        self._flush_if_full()
        failed = [run for run, _, one in outcomes if isinstance(one, RetryLater)]
        if failed and isinstance(outcome, RetryLater):
            self._metrics[stream].retries += len(failed)
            for run, message, one in outcomes:
                if isinstance(one, RetryLater):
                    self._failures.attempt_failed(
                        stream, message.id, run.key, message.attempt, one, delay_ms=one.delay_ms
                    )
            if self._must_defer(failed[0], outcome):
                for run in failed:
                    self._defer_later(run, make_defer_reason(outcome, run.attempt, self._handler.retry))
                return
            self._flush()
            group.create_task(self._run_batches(remaining, group))  # other batches go on while these back off
            await self._back_off(failed, outcome)
            for run in failed:
                await self._run_key(run, iter(()), group)

    def _stage_together(self, some: Sequence[tuple[KeyRun, Message]], outcome: Outcome) -> None:
        """Stage processed messages as one commit: the effects of the first run cover the others too."""
        assert not isinstance(outcome, (RetryLater, Parked))
        ((lead, message), *rest) = some
        self._add_outcome(lead, message, outcome)
        lead.effects.other_ids = [other.id for _, other in rest]
        lead.effects.message_count += len(rest)
        lead.others = [run for run, _ in rest]
        for run in lead.others:
            run.covered.append(run.entries.popleft())
        self._stage_commit(lead)

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        (dead,), outcome = await self._attempt_batch([message])
        return dead or outcome

    async def _attempt_batch(self, messages: Sequence[Message]) -> BatchOutcome:
        if self._handler.is_async:
            return await self._run_in_task(attempt_batch(self._handler, messages))
        return attempt_batch_plain(self._handler, messages, self._time_limit.guard)


def _batches(runs: Sequence[KeyRun], size: int) -> Iterator[list[KeyRun]]:
    """Yield batches of up to `size` runs of one stream, without finished runs."""
    for _, some in groupby((run for run in runs if run.entries), key=attrgetter("stream")):
        while batch := list(islice(some, size)):
            yield batch
