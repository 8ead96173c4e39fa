"""Permits of a handler's limit: a message takes one before it runs, and returns it after.

Both engines ask at the same place, right before an attempt. Redis holds the limit (`keys/take_permit`): it refuses the
permit, and times when the key queue of the message may ask again. Until then the key backs off, as after a failed attempt
but without one. A permit that is not returned ends with the worker's lease, or a minute after the time limit of a task's
attempt.
A worker sends what it asks and returns at the same time together (`take_call`, `give_back_call`).
"""

import logging
from typing import Final

import msgspec

from millstream.delivery.commit_store import CommitStore
from millstream.errors import CommandFailed, DecodeError, RedisError, Unavailable
from millstream.handlers.attempt import DeadLettered, RetryLater
from millstream.handlers.handler import Handler
from millstream.handlers.limits import Share, share_of
from millstream.model import Limit, Message
from millstream.redis_client.call import Call
from millstream.redis_client.resp import Arg
from millstream.redis_client.scripts import Script

logger = logging.getLogger(__name__)

TAKE_PERMIT = Script("keys/take_permit")
RETURN_PERMIT = Script("keys/return_permit")

_GRACE_MS: Final = 60_000
"""How long after its time limit an attempt may still run: less than this, or its process is killed."""

UNANSWERED_MS: Final = 1_000.0
"""How long a message waits, in milliseconds, whose question Redis has not answered: as if it was refused."""


class Permits(msgspec.Struct, frozen=True):
    """Takes and returns the permits of one limit; `hold_ms`: after so many milliseconds no run is left."""

    limit: Limit
    hold_ms: float

    @classmethod
    def of(cls, handler: Handler) -> "Permits | None":
        """Return those of a handler; None if it has no limit of single messages."""
        return None if handler.limit is None else cls(handler.limit, handler.time_limit_ms + _GRACE_MS)

    def share_of(self, message: Message) -> Share | DeadLettered:
        """Return what a message takes of the limit, or its outcome if its cost is no cost."""
        try:
            return share_of(self.limit, message.pairs)
        except DecodeError as error:
            return DeadLettered("undecodable", str(error))

    @staticmethod
    def refusal_of(share: Share, wait_ms: float) -> RetryLater:
        """Return the outcome of a message that was refused its permit, and may ask again in `wait_ms` milliseconds."""
        return RetryLater(wait_ms, "the limit is reached", limited=share.value)

    def take(self, store: CommitStore, stream: str, queue: bytes, share: Share, holder: bytes) -> float:
        """Take a permit for the first message of a key queue; return 0, or after how many milliseconds to ask again.

        `holder`: no other run has it. Raises StaleOwner if a newer run has begun, RedisError. A call that is repeated
        takes one permit.
        """
        return float(store.run_script(TAKE_PERMIT, stream, self._take_args(store, queue, share, holder)))

    def take_call(self, store: CommitStore, stream: str, queue: bytes, share: Share, holder: bytes) -> Call[float]:
        """Return the call that `take` makes, for callers that send several; its permit ends with the worker's lease.

        If Redis cannot grant it now, its result is UNANSWERED_MS.
        """
        args = self._take_args(store, queue, share, holder, leased=True)
        return Call(store.script_command(TAKE_PERMIT, stream, args), float, on_error=_wait_after)

    def give_back(self, store: CommitStore, stream: str, share: Share, holder: bytes) -> None:
        """Return a permit, and wake the key queues that wait for it. Raises RedisError. May be repeated."""
        if self.limit.at_once is not None:
            store.run_script(RETURN_PERMIT, stream, self._give_back_args(share, holder))

    def give_back_call(self, store: CommitStore, stream: str, share: Share, holder: bytes) -> Call[float]:
        """Return the call that `give_back` makes of a limit with `at_once`, for callers that send several.

        Its result: how many key queues were woken.
        """
        args = self._give_back_args(share, holder)
        return Call(store.script_command(RETURN_PERMIT, stream, args), float)

    def _take_args(
        self, store: CommitStore, queue: bytes, share: Share, holder: bytes, *, leased: bool = False
    ) -> tuple[Arg, ...]:
        takes_ms = "" if share.takes_ms is None else share.takes_ms
        longest_ms = max(self.limit.period_ms, share.takes_ms or 0.0) if self.limit.rate is not None else 0
        rate = (takes_ms, longest_ms)
        return (store.token, queue, share.value, self._at_once, *rate, holder, int(leased) or "", int(self.hold_ms))

    def _give_back_args(self, share: Share, holder: bytes) -> tuple[Arg, ...]:
        return (share.value, self._at_once, holder)

    @property
    def _at_once(self) -> int | str:
        return "" if self.limit.at_once is None else self.limit.at_once


def _wait_after(error: RedisError) -> float:
    """Return how long a message waits after an error that passes, or that the release of its lease raises, too."""
    if not isinstance(error, Unavailable) and not (isinstance(error, CommandFailed) and error.code == "STALE"):
        raise error
    logger.debug("a permit was neither taken nor returned: %s; retrying", error)
    return UNANSWERED_MS
