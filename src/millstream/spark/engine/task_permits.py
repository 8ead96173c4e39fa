"""TaskPermits: a task takes a permit of the handler's limit for each message before it runs, and returns it after."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.permits import Permits
from millstream.handlers.attempt import DeadLettered, Outcome, RetryLater
from millstream.handlers.handler import Handler
from millstream.handlers.limits import Share
from millstream.model import Message
from millstream.spark.engine.attempt_runner import CallRedis
from millstream.spark.engine.key_run import KeyRun


class TaskPermit(NamedTuple):
    """The permit of one run: its stream, its share of the limit, and its holder."""

    stream: str
    share: Share
    holder: bytes


class TaskPermits:
    """Takes and returns the permits of one task. `call`: calls Redis until it answers."""

    def __init__(self, permits: Permits, commit_store: CommitStore, call: CallRedis) -> None:
        self._permits = permits
        self._commit_store = commit_store
        self._call = call

    @classmethod
    def of(cls, handler: Handler, commit_store: CommitStore, call: CallRedis) -> "TaskPermits | None":
        """Return those of a task; None if the handler has no limit of single messages."""
        permits = Permits.of(handler)
        return None if permits is None else cls(permits, commit_store, call)

    @contextmanager
    def permitted(self, run: KeyRun, message: Message) -> Iterator[Outcome | None]:
        """Hold a permit for the first message of a run within the block: None, or else the outcome of the message."""
        permit = self.take(run, message)
        if not isinstance(permit, TaskPermit):
            yield permit
            return
        try:
            yield None
        finally:
            self.give_back(permit)

    def take(self, run: KeyRun, message: Message) -> TaskPermit | RetryLater | DeadLettered:
        """Take a permit for the first message of a run; return it, or else the outcome of the message."""
        share = self._permits.share_of(message)
        if isinstance(share, DeadLettered):
            return share
        # Another execution of the same message has a permit of its own: both run.
        permit = TaskPermit(run.stream, share, f"{uuid.uuid4().hex} {message.id}".encode())
        take = partial(self._permits.take, self._commit_store, run.stream, run.offset_field, share, permit.holder)
        wait_ms = self._call(take)
        return permit if wait_ms == 0 else self._permits.refusal_of(share, wait_ms)

    def give_back(self, permit: TaskPermit) -> None:
        """Return the permit of a message whose run is over."""
        stream, share, holder = permit
        self._call(partial(self._permits.give_back, self._commit_store, stream, share, holder))
