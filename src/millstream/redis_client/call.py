"""Call: a command and the parser of its reply, so that callers can send many calls in one round trip."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from millstream.redis_client.resp import Command, Reply

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One command, and `parse`, which turns its reply into a result. Who makes the call says what an error reply means."""

    command: Command
    parse: Callable[[Reply], T]
