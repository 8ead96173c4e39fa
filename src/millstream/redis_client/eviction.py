"""A warning about a Redis that throws keys away when its memory is full: everything here is meant to be kept."""

import logging

from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.redaction import redact

logger = logging.getLogger(__name__)

_LOOK_MS = 3_000


def warn_if_evicting(client: Client) -> None:
    """Log it if Redis evicts keys at `maxmemory`. What cannot be found out now is no reason not to begin."""
    try:
        reply = client.execute("INFO", "memory")
    except AccessDenied:
        logger.warning("cannot see whether this Redis evicts keys when it is full: its user has no right to `info`")
    except RedisError as error:
        logger.debug("cannot see whether this Redis evicts keys when it is full: %s", error)
    else:
        facts = dict(line.split(b":", 1) for line in reply.splitlines() if b":" in line)
        policy = facts.get(b"maxmemory_policy", b"noeviction").decode()
        if policy != "noeviction" and int(facts.get(b"maxmemory", 0)):
            logger.warning(
                "Redis at %s evicts keys when it is full (maxmemory-policy %s): messages, states and progress would be gone "
                "without a word; set maxmemory-policy noeviction",
                redact(client.url), policy,
            )  # fmt: skip


def warn_if_evicting_at(url: str) -> None:
    """The same, by a connection for no more than this. Raises ConfigError for a URL that is none."""
    with Client(url, timeout_ms=_LOOK_MS) as client:
        warn_if_evicting(client)
