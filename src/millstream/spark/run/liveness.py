"""Says in Redis that a run is alive, for people who ask who is at work: in the way that workers hold their names."""

import logging
from collections.abc import Callable, Iterable
from threading import Event

from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import held_name, run_name

logger = logging.getLogger(__name__)

_HELD_MS, _EVERY_S = 30_000, 10.0


def announce_run(client: Client, app: str, pipelines: Iterable[str]) -> None:
    """Hold the names of these handlers and stages for half a minute. Raises RedisError."""
    for reply in client.pipeline([("SET", held_name(app, run_name(one)), 1, "PX", _HELD_MS) for one in pipelines]):
        raise_if_error(reply)


def keep_announced(url: str, app: str, pipelines: Callable[[], Iterable[str]], over: Event) -> None:
    """Hold them until `over`. Nothing depends on it: where it cannot be, the log says so at most."""
    with Client(url) as client:
        while not over.is_set():
            try:
                announce_run(client, app, pipelines())
            except AccessDenied as error:
                logger.warning("millstream info will not show that %s is run here: %s", app, error)
                return
            except RedisError as error:
                logger.debug("millstream info may not show that %s is run here: %s", app, error)
            over.wait(_EVERY_S)
