"""Token files that change while a service runs."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from millstream.errors import ConfigError

logger = logging.getLogger(__name__)

_RELOAD_S = 1.0


async def reload_tokens(reload: Callable[[Path], None], path: Path) -> None:
    """Call `reload` within a second of each change of a token file, until it is cancelled.

    A mistake in the file changes nothing: it locks no client out and lets none in.
    """
    known: tuple[int, ...] | None = ()  # not the current version: that may be newer than the one read at the start
    while True:
        await asyncio.sleep(_RELOAD_S)
        if (version := _version(path)) != known:
            known = version
            try:
                reload(path)
            except ConfigError as error:
                logger.warning("token file not reloaded: %s; keeping the previous tokens", error)
            else:
                logger.info("token file reloaded")


def _version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file is written or replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
