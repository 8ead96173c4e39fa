"""BatchTask: the Spark task of a batch handler, which runs a stream's messages in lists of at most `batch_size`.

After a failure each message of the list runs by itself, so only the failing one becomes a dead letter. The outputs of a
list are committed together with the offsets of all its messages, or not at all.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

from millstream.handlers.attempt import NO_EFFECTS, Done, Outcome, Parked, RetryLater
from millstream.model import Message
from millstream.spark.engine.key_run import KeyRun
from millstream.spark.engine.task import PartitionTask


class BatchTask(PartitionTask):
    """PartitionTask for a batch handler. Its messages have no keys: each is a run of its own."""

    async def _run_all(self, runs: list[KeyRun]) -> None:
        if self._cautious.is_on or any(run.from_queue for run in runs):
            await super()._run_all(runs)
            return
        remaining = _batches(runs, self._handler.batch_size)
        coroutines = self._handler.concurrency if self._handler.is_async else 1
        async with self._attempts.watched(), asyncio.TaskGroup() as group:
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
        unpacked = [(run, *self._loader.next_message(run, self._token)) for run in batch]
        wanted = [(run, message) for run, message, is_meant in unpacked if is_meant]
        for run, message, is_meant in unpacked:
            if not is_meant:
                run.effects.skipped_count = 1
                self._stage_together([(run, message)], NO_EFFECTS)
        if not wanted:
            return
        await self._rate_limit.acquire(batch[0].stream, len(wanted))
        dead, outcome = await self._attempts.run_batch([message for _, message in wanted])
        outcomes = [(run, message, refusal or outcome) for (run, message), refusal in zip(wanted, dead, strict=True)]
        outcomes = [one for one in outcomes if self._admits(one[0], one[2])]
        self._stage_processed(outcomes, outcome)
        self._flush_if_full()
        failed = [(run, message) for run, message, one in outcomes if isinstance(one, RetryLater)]
        if failed and isinstance(outcome, RetryLater):
            await self._retry_singly(failed, outcome, remaining, group)

    async def _retry_singly(
        self,
        failed: Sequence[tuple[KeyRun, Message]],
        outcome: RetryLater,
        remaining: Iterator[list[KeyRun]],
        group: asyncio.TaskGroup,
    ) -> None:
        """Run each message of a batch that failed by itself, after a back-off, or defer all of them."""
        for run, message in failed:
            self._on_failed(run, message, outcome)
        runs = [run for run, _ in failed]
        if self._must_defer(runs[0], outcome):
            for run in runs:
                self._defer_later(run, outcome, run.attempt)
            return
        self._flush()
        group.create_task(self._run_batches(remaining, group))  # other batches go on while these back off
        await self._back_off(runs, outcome.delay_ms)
        for run in runs:
            await self._run_key(run, iter(()), group)

    def _stage_processed(self, outcomes: Sequence[tuple[KeyRun, Message, Outcome]], common: Outcome) -> None:
        """Stage what need not run again. The outputs of a batch belong to all its messages, which commit together."""
        done = [(run, message) for run, message, one in outcomes if isinstance(one, Done)]
        if done and isinstance(common, Done) and common.outputs:
            self._stage_together(done, common)
        else:
            for one in done:
                self._stage_together([one], common)
        for run, message, outcome in outcomes:
            if not isinstance(outcome, (Done, RetryLater)):
                self._stage_together([(run, message)], outcome)

    def _stage_together(self, some: Sequence[tuple[KeyRun, Message]], outcome: Outcome) -> None:
        """Stage processed messages as one commit: the effects of the first run cover the others too."""
        assert not isinstance(outcome, (RetryLater, Parked))
        ((lead, message), *rest) = some
        self._add_outcome(lead, message, outcome)
        lead.effects.other_ids = [run.next_id for run, _ in rest]
        lead.effects.message_count += len(rest)
        lead.others = [run for run, _ in rest]
        for run in lead.others:
            run.entries[0].add_copy_to(lead.effects)
            run.covered.append(run.entries.popleft())
        self._buffer.stage(lead)

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        (dead,), outcome = await self._attempts.run_batch([message])
        return dead or outcome


def _batches(runs: Sequence[KeyRun], size: int) -> Iterator[list[KeyRun]]:
    """Yield batches of up to `size` runs of one stream, without finished runs."""
    for _, some in groupby((run for run in runs if run.entries), key=attrgetter("stream")):
        while batch := list(islice(some, size)):
            yield batch
