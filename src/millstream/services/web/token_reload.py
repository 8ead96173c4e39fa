"""Token files that change while a service runs."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from millstream.errors import ConfigError

logger = logging.getLogger(__name__)

_RELOAD_S = 1.0


async def reload_tokens(reload: Callable[[Path], None], path: Path) -> None:
    """Call `reload` within a second of each change of a token file, until it is cancelled.

    A mistake in the file changes nothing: it locks no client out and lets none in.
    """
    watched = WatchedTokens(reload, path)
    while True:
        await asyncio.sleep(_RELOAD_S)
        watched.reload_changed()


class WatchedTokens:
    """A token file that is reloaded when it has changed: for a service that has no task of its own.

    * `reload`: called with `path` after a change; a ConfigError is a warning, and changes nothing
    * `monotonic`: seconds
    """

    def __init__(
        self, reload: Callable[[Path], None], path: Path, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._reload = reload
        self._path = path
        self._monotonic = monotonic
        # not the current version: that may be newer than the one read at the start
        self._known: tuple[int, ...] | None = ()
        self._checked_s = float("-inf")

    def check(self) -> None:
        """`reload_changed`, at most once in a second: for every request."""
        if self._monotonic() - self._checked_s >= _RELOAD_S:
            self._checked_s = self._monotonic()
            self.reload_changed()

    def reload_changed(self) -> None:
        """Reload the file if it has changed."""
        if (version := _version(self._path)) == self._known:
            return
        self._known = version
        try:
            self._reload(self._path)
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
