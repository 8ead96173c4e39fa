"""Call: a command and the parser of its reply, so that callers can send many calls in one round trip."""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from millstream.errors import RedisError
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
