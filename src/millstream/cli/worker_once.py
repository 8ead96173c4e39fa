"""The option --once of `millstream worker`: stops the workers when they have processed what is there."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millstream.admin.draining import DrainWatch
from millstream.errors import MillstreamError, Unavailable
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client

logger = logging.getLogger(__name__)

_EVERY_S = 0.5
_TIMEOUT_MS = 15_000


@contextmanager
def stopped_when_drained(
    url: str, handlers: Sequence[Handler], stopping: threading.Event, *, once: bool
) -> Iterator[None]:
    """With `once`, set `stopping` within the block when the handlers have processed what is there.

    Raises ConfigError for handlers that it is impossible for; at the end of the block MillstreamError for paused
    handlers, which have left messages behind, and the error of Redis that ended the watch.
    """
    if not once:
        yield
        return
    with Client(url, timeout_ms=_TIMEOUT_MS) as client:
        watch = DrainWatch(client, handlers)
        failures: list[MillstreamError] = []

        def run() -> None:
            try:
                _wait(watch, stopping)
            except MillstreamError as error:
                failures.append(error)
            stopping.set()

        thread = threading.Thread(target=run, name="millstream-once", daemon=True)
        thread.start()
        yield
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]


def _wait(watch: DrainWatch, stopping: threading.Event) -> None:
    while not stopping.wait(_EVERY_S):
        try:
            is_drained = watch.check()
        except Unavailable as error:
            logger.debug("cannot read the remaining messages, Redis is unavailable: %s; retrying", error)
            continue
        if is_drained:
            if watch.paused:
                raise MillstreamError(
                    f"not all is processed: {', '.join(watch.paused)} is paused; to go on: millstream resume "
                    f"{watch.paused[0]}"
                )
            return
