"""Questions to Redis that many parts ask: many at once; what time it is."""

from collections.abc import Sequence

from millstream.redis_client.client import Client, Command, Reply, raise_if_error
from millstream.redis_client.resp import ReplySize

_PIPELINE = 1_000


def send_all(client: Client, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
    """Replies of many commands, errors among them, in round trips that fit into memory. Raises RedisError."""
    return [
        reply
        for start in range(0, len(commands), _PIPELINE)
        for reply in client.pipeline(commands[start : start + _PIPELINE], meter)
    ]


def call_all(client: Client, commands: Sequence[Command]) -> list[Reply]:
    """The same, but raises the first error among them."""
    return [raise_if_error(reply) for reply in send_all(client, commands)]


def server_time_ms(client: Client) -> int:
    """The time of the server, in Unix milliseconds. Raises RedisError."""
    seconds, microseconds = client.execute("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000
