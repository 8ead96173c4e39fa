"""Warning about a Redis that evicts keys at maxmemory: none of millstream's keys may be lost."""

import logging

from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.redaction import redact_url

logger = logging.getLogger(__name__)

_TIMEOUT_MS = 3_000


def warn_if_evicting(client: Client) -> None:
    """Log a warning if Redis evicts keys at `maxmemory`. A failed check is only logged, so that it stops no start."""
    try:
        reply = client.execute("INFO", "memory")
    except AccessDenied:
        logger.warning("cannot check whether Redis evicts keys at maxmemory: the Redis user has no right to `info`")
    except RedisError as error:
        logger.debug("cannot check whether Redis evicts keys at maxmemory: %s", error)
    else:
        values = dict(line.split(b":", 1) for line in reply.splitlines() if b":" in line)
        policy = values.get(b"maxmemory_policy", b"noeviction").decode()
        if policy != "noeviction" and int(values.get(b"maxmemory", 0)):
            logger.warning(
                "Redis at %s evicts keys at maxmemory (maxmemory-policy %s): messages, states and progress would be "
                "lost silently; set maxmemory-policy noeviction",
                redact_url(client.url), policy,
            )  # fmt: skip


def warn_if_url_evicting(url: str) -> None:
    """Like `warn_if_evicting`, on a short-lived connection. Raises ConfigError for an invalid URL."""
    with Client(url, timeout_ms=_TIMEOUT_MS) as client:
        warn_if_evicting(client)
