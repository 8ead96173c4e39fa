"""Consumer removal: removes the consumers of a worker that leaves its streams."""

import logging
from collections.abc import Iterable

from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import RedisError
from millstream.groups import Group, delete_if_empty
from millstream.redis_client.client import Client

logger = logging.getLogger(__name__)


def remove_consumers(client: Client, streams: Iterable[ReliableStream]) -> None:
    """Remove a worker's consumers from the groups of its streams, except where entries are pending with it.

    Other workers claim those entries. If Redis does not answer, the consumer stays until another worker finds it idle.
    """
    by_name: dict[str, list[Group]] = {}
    for one in streams:
        by_name.setdefault(one.consumer, []).append(Group(client, one.stream, one.group))
    for consumer, groups in by_name.items():
        try:
            delete_if_empty(client, groups, consumer)
        except RedisError as error:
            logger.debug("consumer %s was not removed from its groups: %s; it stays until it is idle", consumer, error)
