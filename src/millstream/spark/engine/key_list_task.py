"""KeyListTask: the Spark task of a handler that takes lists of messages of one key.

The messages of a key in the task run in lists of at most `batch_size`, in order. If a list fails, each of its messages is
run again by itself, as for a handler that takes one message. The later ones wait for it.
"""

import asyncio
from collections.abc import Iterator

from millstream.handlers.attempt import Done, Outcome
from millstream.model import Message
from millstream.observability.failure_log import log_failed_list
from millstream.spark.engine.key_run import KeyRun
from millstream.spark.engine.task import PartitionTask


class KeyListTask(PartitionTask):
    """PartitionTask for a handler of lists with a key. A message without a key is a list of its own."""

    async def _run_next(self, run: KeyRun, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> bool:
        messages = self._next_list(run)
        if len(messages) < 2:
            return await super()._run_next(run, remaining, group)
        last_ids = [entry.id for entry, _ in zip(run.entries, messages, strict=False)]
        await self._rate_limit.acquire(run.stream, sum(one > run.admitted_until for one in last_ids))
        run.admitted_until = last_ids[-1]
        count, outcome = await self._attempts.run_list(messages, run.state)
        if count > 1 and not isinstance(outcome, Done):
            log_failed_list(self._handler.label, run.stream, messages[0].id, count, outcome.error)
            run.alone_until = last_ids[count - 1]
            return True
        # The effects of a run are committed together, so those of the list may be those of its last message.
        for message in messages[: count - 1]:
            self._admits(run, done := Done((), run.state))
            self._add_outcome(run, message, done)
        return await self._settle(run, messages[count - 1], outcome, remaining, group)

    def _next_list(self, run: KeyRun) -> list[Message]:
        """Return the next messages of a key that may run together; none if the next one has to run by itself."""
        messages: list[Message] = []
        if self._cautious.is_on or run.key is None or run.attempt > 1 or run.entries[0].id <= run.alone_until:
            return messages
        while len(messages) < min(self._handler.batch_size, len(run.entries)):
            message, is_meant = self._loader.next_message(run, self._token, after=len(messages))
            if not is_meant:
                break
            messages.append(message)
        return messages

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        _, outcome = await self._attempts.run_list([message], run.state)
        return outcome
