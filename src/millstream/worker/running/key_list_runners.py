"""Key list runners: run handlers that take lists of messages of one key.

The entries of a key that are leased together run as one list, in order. If that fails, each of them is run again by
itself, as for a handler that takes one message. The later ones wait for it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from millstream.delivery.keyed_stream import lease_of
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import Done, ListOutcome, Outcome
from millstream.model import Message
from millstream.observability.failure_log import log_failed_list
from millstream.worker.running.async_runner import GATE_POLL_S, AsyncRunner
from millstream.worker.running.runner import _Start
from millstream.worker.running.thread_runner import ThreadRunner


class _KeyLists(_Start):
    """How a runner splits the entries of a lease into lists."""

    def _messages_of(self, deliveries: Sequence[Delivery]) -> list[Message]:
        """Return the messages of the first entries, up to one that is for another handler alone."""
        messages: list[Message] = []
        for delivery in deliveries:
            if (message := self._steps.decode(delivery)) is None:
                break
            messages.append(message)
        return messages

    def _canceled(self, deliveries: Sequence[Delivery]) -> ListOutcome | None:
        """Return the outcome of the first entry if it was canceled before the handler took lists; None if it may run.

        Canceled entries come first in their queue: if this one was not, none of the list was.
        """
        dead = self._steps.canceled(deliveries[0])
        return None if dead is None else (1, dead)

    def _most(self, alone: int) -> int:
        return 1 if alone else self._steps.handler.batch_size

    def _settle(self, started: Sequence[Delivery], ended: ListOutcome, alone: int) -> tuple[Delivery | None, int]:
        """Complete the entries that the outcome is of, and put the others back.

        Return the key's next entry, for the same runner to run, and how many entries from it on have to run alone;
        `alone`: how many had to so far.
        """
        count, outcome = ended
        run, rest = started[:count], started[count:]
        now_ms = self._clock.monotonic_ms()
        has_failed = False
        if len(run) > 1 and not isinstance(outcome, Done):
            has_failed = True
            first = run[0]
            log_failed_list(self._steps.handler.label, first.stream.stream, first.id.decode(), len(run), outcome.error)
            rest = started
        if rest:
            self._in_flight.put_back(rest, now_ms)
            self._loop_metrics.on_runs_settled(len(rest))
        if has_failed:
            return lease_of(started[0]).queued.popleft(), len(run)
        for delivery in run:
            # An equal share of the time, so that the times of all messages add up to that of the handler.
            delivery.attempt_ms = (now_ms - delivery.state_since_ms) / len(run)
            delivery.finished = True
        return self._in_flight.complete_list(run, outcome), max(0, alone - len(run))


class ThreadKeyListRunner(_KeyLists, ThreadRunner):
    """Threads as of ThreadRunner, each of which runs the entries of a key in lists."""

    def _run_next(self) -> bool:
        following, alone = self._next_delivery(), 0
        if following is None:
            return False
        while following is not None:
            while (started := self._start_list(following, self._most(alone))) is None:
                self._in_flight.gate.wait()
            if not started:
                break
            began_ms = self._clock.monotonic_ms()
            ended = self._run_list(started)
            self._took_ms += self._clock.monotonic_ms() - began_ms
            self._finished += 1
            following, alone = self._settle(started, ended, alone)
        return True

    def _run_list(self, deliveries: Sequence[Delivery]) -> ListOutcome:
        if (canceled := self._canceled(deliveries)) is not None:
            return canceled
        messages, state = self._messages_of(deliveries), lease_of(deliveries[0]).state
        return self._steps.run_list(messages, state) if messages else (1, Done((), state))

    def _run_message(self, delivery: Delivery) -> Outcome:
        _, outcome = self._run_list((delivery,))
        self._finish(delivery)
        return outcome


class AsyncKeyListRunner(_KeyLists, AsyncRunner):
    """An event loop as of AsyncRunner, in which each task runs the entries of a key in lists."""

    async def _run_one(self, delivery: Delivery, task: asyncio.Task[Any], iteration: int) -> None:
        following: Delivery | None = delivery
        alone = 0
        while following is not None and not self._is_cancelled:
            self._tasks[task] = following
            while (started := self._start_list(following, self._most(alone))) is None:  # noqa: ASYNC110 - rare
                await asyncio.sleep(GATE_POLL_S)
            ended = await self._run_list(started) if started else None
            if ended is None or self._is_cancelled:
                break
            following, alone = self._settle(started, ended, alone)
        self._runs_wait = True  # each list has a task of its own

    async def _run_list(self, deliveries: Sequence[Delivery]) -> ListOutcome:
        if (canceled := self._canceled(deliveries)) is not None:
            return canceled
        messages, state = self._messages_of(deliveries), lease_of(deliveries[0]).state
        return await self._steps.run_list_async(messages, state) if messages else (1, Done((), state))

    async def _run_message(self, delivery: Delivery) -> Outcome:
        _, outcome = await self._run_list((delivery,))
        self._finish(delivery)
        return outcome
