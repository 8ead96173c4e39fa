"""Stream calls: one call on each of many streams, a hundred of them in a round trip."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import RedisError, Unavailable
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Command, Reply

T = TypeVar("T")

Query = Callable[[Mapping[str, Command]], Iterable[tuple[str, Reply]]]
"""Sends one command for each stream, and returns the name of each with the reply, in any order."""

Step = tuple[ReliableStream, Callable[[], object]]
"""A stream, and what is to be done on it: it raises RedisError."""

_AT_ONCE = 100


def ask_all(calls: Mapping[str, Call[T]], query: Query) -> Iterator[tuple[str, Callable[[], T | RedisError]]]:
    """Make one call for each stream; yield its name and a function that returns the result of the call, in order.

    A round trip carries a hundred calls. If it fails, the function gets the error as the reply of its call.
    """
    names = list(calls)
    for at in range(0, len(names), _AT_ONCE):
        some = names[at : at + _AT_ONCE]
        replies: dict[str, Reply]
        try:
            replies = dict(query({name: calls[name].command for name in some}))
        except Unavailable as error:  # perhaps only one server is unavailable
            replies = dict.fromkeys(some, error)
        for name in some:
            yield name, partial(calls[name].resolve, replies[name])


def query_by(client: Client) -> Query:
    """Return the query that sends its commands by `client`."""
    return lambda commands: zip(commands, client.pipeline(list(commands.values())), strict=True)
