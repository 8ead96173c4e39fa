"""The task of a handler that takes lists: what a micro-batch has of a stream is run in lists of at most `batch_size`.

A message that has failed is run by itself, so that only the guilty one of a list dies. What a list has given is committed
as one unit, with the marks of all its messages, or not at all.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from millstream.handlers.attempt import (
    NOTHING,
    BatchOutcome,
    Done,
    Outcome,
    Parked,
    RetryLater,
    attempt_batch,
    attempt_batch_plain,
)
from millstream.model import Message
from millstream.spark.engine.task import DeferReason, KeyRun, PartitionTask


class BatchTask(PartitionTask):
    """PartitionTask for a handler that takes lists. Its messages have no keys: each is a run by itself."""

    async def _drive_all(self, runs: list[KeyRun]) -> None:
        if self._cautious_left or any(run.in_line for run in runs):
            await super()._drive_all(runs)
            return
        waiting = _gathered(runs, self._handler.batch_size)
        workers = self._handler.concurrency if self._handler.is_async else 1
        async with self._pulse.beating(), asyncio.TaskGroup() as group:
            for _ in range(min(workers, len(runs))):
                group.create_task(self._work_through(waiting, group))

    async def _work_through(self, waiting: Iterator[list[KeyRun]], group: asyncio.TaskGroup) -> None:
        for batch in waiting:
            await self._drive_batch(batch, waiting, group)

    async def _drive_batch(
        self, batch: list[KeyRun], waiting: Iterator[list[KeyRun]], group: asyncio.TaskGroup
    ) -> None:
        """Take a list through the handler; what has failed, message by message."""
        stream, opened = batch[0].stream, [(run, *self._opened(run)) for run in batch]
        wanted = [(run, message) for run, message, is_meant in opened if is_meant]
        for run, message, is_meant in opened:
            if not is_meant:
                self._finish([(run, message)], NOTHING)
        if not wanted:
            return
        await self._pace.wait(stream, len(wanted))
        dead, outcome = await self._attempt_all([message for _, message in wanted])
        judged = [(run, message, refusal or outcome) for (run, message), refusal in zip(wanted, dead, strict=True)]
        together = [(run, message) for run, message, one in judged if isinstance(one, Done)]
        has_outputs = isinstance(outcome, Done) and outcome.outputs
        for some in [together] * bool(together) if has_outputs else [[one] for one in together]:
            self._finish(some, outcome)
        for run, message, one in judged:
            if not isinstance(one, (Done, RetryLater)):
                self._finish([(run, message)], one)
        self._flush_if_full()
        failed = [run for run, _, one in judged if isinstance(one, RetryLater)]
        if failed and isinstance(outcome, RetryLater):
            self._tallies[stream].retries += len(failed)
            if self._has_to_leave(failed[0], outcome):
                for run in failed:
                    self._leave(run, DeferReason("later", round(outcome.delay_ms), run.attempt))
                return
            self._flush()
            group.create_task(self._work_through(waiting, group))  # other lists go on while these wait
            await self._wait(failed, outcome)
            for run in failed:
                await self._drive(run, iter(()), group)

    def _finish(self, some: Sequence[tuple[KeyRun, Message]], outcome: Outcome) -> None:
        """Post what is done as one unit: that of the first, which covers the others as well."""
        assert not isinstance(outcome, (RetryLater, Parked))
        ((lead, message), *rest) = some
        self._settle(lead, message, outcome)
        lead.unit.others = [other.id for _, other in rest]
        lead.unit.messages += len(rest)
        lead.others = [run for run, _ in rest]
        for run in lead.others:
            run.covered.append(run.entries.popleft())
        self._post(lead)

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        (dead,), outcome = await self._attempt_all([message])
        return dead or outcome

    async def _attempt_all(self, messages: Sequence[Message]) -> BatchOutcome:
        if self._handler.is_async:
            return await self._in_a_task(attempt_batch(self._handler, messages))
        return attempt_batch_plain(self._handler, messages, self._alarm.guard)


def _gathered(runs: Sequence[KeyRun], size: int) -> Iterator[list[KeyRun]]:
    """Lists of runs of one stream that have something to do."""
    for _, some in groupby((run for run in runs if run.entries), key=attrgetter("stream")):
        while batch := list(islice(some, size)):
            yield batch
