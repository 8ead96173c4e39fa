"""The loop that millstream is compared with: redis-py alone, which reads a stream through a group and acknowledges."""

import time
from collections.abc import Callable
from typing import Any

import millstream.redis_client.redis_py  # noqa: F401 - before redis itself

# isort: split
import redis

from millstream.redis_client.deployments import parse_route
from millstream.redis_client.error_translation import REDIS_ERRORS, translate

_AT_ONCE = 1_000
_TIMEOUT_MS = 15_000


def read_and_acknowledge(url: str, stream: str, *, most_s: float, give_up: Callable[[], bool]) -> tuple[int, float]:
    """Read a stream from its beginning through the new group `raw`, 1,000 entries at a time, and acknowledge them.

    Returns how many entries that were, and the seconds that it took. It ends with the stream, after `most_s` seconds,
    or when `give_up` returns True. `url` is that of one server. Raises RedisError.
    """
    try:
        # With the settings of `Client`, such as no CLIENT SETINFO. Its annotations lack raw replies.
        connection: Any = redis.Redis(connection_pool=parse_route(url, _TIMEOUT_MS)().pool(None))
        try:
            connection.xgroup_create(stream, "raw", id="0")
            count, began_s, took_s = 0, time.perf_counter(), 0.0
            while took_s < most_s and not give_up():
                found = connection.xreadgroup("raw", "raw", {stream: ">"}, count=_AT_ONCE)
                if not found:
                    break
                ids = [entry_id for entry_id, _ in found[0][1]]
                connection.xack(stream, "raw", *ids)
                count += len(ids)
                took_s = time.perf_counter() - began_s
            return count, took_s
        finally:
            connection.connection_pool.disconnect()
    except REDIS_ERRORS as error:
        raise translate(error, url) from error
