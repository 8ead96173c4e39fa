"""CautiousMode: finds the message that kills its process, by running each in isolation.

See docs/decisions/0007-cautious-mode.md.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from millstream.delivery.commit_store import CommitStore
from millstream.handlers.attempt import DeadLettered, Outcome, RetryLater, outcome_after_last_attempt
from millstream.handlers.handler import Handler
from millstream.model import Message
from millstream.spark.engine.attempt_runner import CallRedis
from millstream.spark.engine.commit_buffer import COMMIT_MESSAGES

CAUTIOUS_MESSAGES = 8 * COMMIT_MESSAGES
"""Half of them a task with a plain handler may have left uncommitted: fewer than twice 500 in a commit on its way, 500 that are
staged, and 500 of the key that runs.
"""


class CautiousMode:
    """While it is on, any message may be the poison pill that killed an earlier attempt of the task.

    Each message is then run alone, with its crash count raised, and committed before the next.
    """

    def __init__(self, handler: Handler, commit_store: CommitStore, call: CallRedis) -> None:
        self._handler = handler
        self._commit_store = commit_store
        self._call = call
        self._left = 0
        self._lock = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        """True until so many messages have been committed that the poison pill was among them."""
        return self._left > 0

    def begin(self) -> None:
        """Run the next messages in isolation."""
        self._left = CAUTIOUS_MESSAGES

    def on_processed(self) -> None:
        """Note that a message was processed."""
        self._left = max(0, self._left - 1)

    async def run(self, message: Message, attempt: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Run an attempt on a message in isolation: its crash count goes up first, and stays up if the process dies."""
        async with self._lock:
            crashes = self._call(partial(self._commit_store.crash_count, message.stream, message.id))
            set_count = partial(self._commit_store.set_crash_count, message.stream, message.id)
            self._call(partial(set_count, crashes + 1))
            if crashes >= max(1, self._handler.retry.attempts - 1):
                message.attempt = crashes + 1
                dead = DeadLettered(
                    "crashed", f"the process ended in each of the {crashes + 1} attempts on this message"
                )
                return dead if self._handler.key is None else outcome_after_last_attempt(self._handler, dead)
            outcome = await attempt()
            if isinstance(outcome, RetryLater):  # while it backs off, another message may kill the process
                self._call(partial(set_count, crashes))
            return outcome
