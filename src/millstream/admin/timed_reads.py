"""TimedReads: reads about many things, which end after a time with a part of the replies."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, RedisError, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import send_all
from millstream.redis_client.resp import Command, Reply

T = TypeVar("T")

_AT_ONCE = 200


class TimedReads:
    """Reads that end about `budget_ms` milliseconds from now. `is_partial`: the time did not suffice for all."""

    def __init__(self, client: Client, budget_ms: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.client = client
        self.clock = clock
        self.is_partial = False
        self._end_ms = clock.monotonic_ms() + budget_ms

    @property
    def left_ms(self) -> float:
        """The time that is left, in milliseconds."""
        return self._end_ms - self.clock.monotonic_ms()

    def is_over(self) -> bool:
        """Whether the time is over, which leaves something unread."""
        self.is_partial |= (is_over := self.left_ms <= 0)
        return is_over

    def replies(self, commands: Sequence[tuple[T, Command]]) -> Iterator[tuple[T, Reply]]:
        """The replies to commands about many things, until the time is over, but always to the first 200.

        A reply that concerns one key alone, which holds something else or is not this user's, is its error. Raises
        other errors.
        """
        for at in range(0, len(commands), _AT_ONCE):
            if at and self.is_over():
                return
            some = commands[at : at + _AT_ONCE]
            for (one, _), reply in zip(some, send_all(self.client, [one for _, one in some]), strict=True):
                if isinstance(reply, RedisError) and not is_left_out(reply):
                    raise reply
                yield one, reply


def is_left_out(error: RedisError) -> bool:
    """Whether an error concerns one key alone, which is left out: it holds something else, or is not this user's."""
    return isinstance(error, WrongType) or (isinstance(error, AccessDenied) and error.concerns_key)
