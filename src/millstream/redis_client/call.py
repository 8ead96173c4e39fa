"""Call: a command and the parser of its reply, so that callers can send many calls in one round trip, or send one and
read its reply later.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from millstream.errors import RedisError, Unavailable
from millstream.redis_client.resp import Command, Reply

T_co = TypeVar("T_co", covariant=True)


class Call(msgspec.Struct, Generic[T_co], frozen=True):
    """One command, and what its reply means.

    * `parse`: turns a reply into a result
    * `on_error`: turns an error reply into a result, or raises; without it the error is the result
    """

    command: Command
    parse: Callable[[Reply], T_co]
    on_error: Callable[[RedisError], T_co] | None = None

    def resolve(self, reply: Reply) -> T_co | RedisError:
        """Return the result of a reply of `Client.pipeline`."""
        if not isinstance(reply, RedisError):
            return self.parse(reply)
        return reply if self.on_error is None else self.on_error(reply)


class SentCall(Generic[T_co]):
    """A call that `Client.send` has sent. Redis executes it while the caller goes on."""

    def __init__(self, call: Call[T_co], await_reply: "Callable[[SentCall[T_co]], None]") -> None:
        self.call = call
        # Until it is read: a result that was never read must not count as a good one.
        self.reply: Reply = Unavailable("the reply was not read: an exception has interrupted the call")
        self._await_reply = await_reply

    def result(self) -> T_co | RedisError:
        """Wait for the reply; return its result, or the RedisError. After Unavailable it may have been executed."""
        self._await_reply(self)
        return self.call.resolve(self.reply)
