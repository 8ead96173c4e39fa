"""Liveness: a key in Redis for each running query, read by `millstream info`, as workers hold their names."""

import logging
from collections.abc import Callable, Iterable
from threading import Event

from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import run_name, worker_name_key

logger = logging.getLogger(__name__)

_TTL_MS, _INTERVAL_S = 30_000, 10.0


def announce_run(client: Client, app: str, names: Iterable[str]) -> None:
    """Set the liveness keys of these handlers and stages for half a minute. Raises RedisError."""
    for reply in client.pipeline([("SET", worker_name_key(app, run_name(one)), 1, "PX", _TTL_MS) for one in names]):
        raise_if_error(reply)


def keep_announced(url: str, app: str, names: Callable[[], Iterable[str]], ended: Event) -> None:
    """Renew the liveness keys until `ended`. Processing does not depend on them: a failure is only logged."""
    with Client(url) as client:
        while not ended.is_set():
            try:
                announce_run(client, app, names())
            except AccessDenied as error:
                logger.warning(
                    "cannot write liveness keys, millstream info will not show this run of %s: %s", app, error
                )
                return
            except RedisError as error:
                logger.debug("cannot write liveness keys of %s now, trying again: %s", app, error)
            ended.wait(_INTERVAL_S)
