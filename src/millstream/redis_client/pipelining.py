"""Pipelining: sends many commands in few round trips; and the time of the server."""

from collections.abc import Sequence

from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.replies import time_us_of
from millstream.redis_client.resp import Command, Reply, ReplySize

_COMMANDS_PER_TRIP = 1_000


def send_all(client: Client, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
    """Replies to many commands, errors among them, in round trips of bounded size. Raises RedisError."""
    return [
        reply
        for start in range(0, len(commands), _COMMANDS_PER_TRIP)
        for reply in client.pipeline(commands[start : start + _COMMANDS_PER_TRIP], meter)
    ]


def call_all(client: Client, commands: Sequence[Command]) -> list[Reply]:
    """As `send_all`, but raises the first error reply."""
    return [raise_if_error(reply) for reply in send_all(client, commands)]


def server_time_ms(client: Client) -> int:
    """The time of the server, in Unix milliseconds. Raises RedisError."""
    return server_time_us(client) // 1000


def server_time_us(client: Client) -> int:
    """The time of the server, in Unix microseconds. Raises RedisError."""
    return time_us_of(client.execute("TIME"))
