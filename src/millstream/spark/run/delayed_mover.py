"""Delayed mover of a run on Spark: adds delayed messages that are due to the streams of all its queries."""

import logging
from collections.abc import Callable, Sequence
from threading import Event

from millstream.delivery.delayed_messages import DelayedMessages
from millstream.errors import ConfigError, MillstreamError, RedisError, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import can_share_slot

logger = logging.getLogger(__name__)


def move_delayed(url: str, reads: Sequence[Callable[[], Sequence[str]]], ended: Event) -> None:
    """Move due delayed messages to their streams until `ended`; each of `reads` returns the streams of one query.

    A refusal is logged once for each cause, and the move tried again: it may concern one stream, or end with a new ACL
    rule.
    """
    logged: set[str] = set()

    def on_refused(error: MillstreamError) -> None:
        if str(error) not in logged:
            logged.add(str(error))
            logger.warning(
                "cannot move delayed messages of some streams: %s; moving the others, and trying again", error
            )

    def streams() -> list[str]:
        names: set[str] = set()
        for read in reads:
            try:
                names.update(filter(can_share_slot, read()))  # no other stream has delayed messages
            except Unavailable:
                raise
            except (RedisError, ConfigError) as error:
                on_refused(error)
        return sorted(names)

    with Client(url) as client:
        DelayedMessages(client).move_until_stopped(streams, ended, on_refused=on_refused)
