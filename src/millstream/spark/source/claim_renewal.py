"""Keeps a batch that is being worked on from being taken over by others, however long that takes."""

import logging
import threading
from collections.abc import Iterable

from millstream.errors import MillstreamError, StaleOwner
from millstream.spark.source.group_batches import Batches

logger = logging.getLogger(__name__)

_SHARE = 3.0


class ClaimRenewal:
    """Renews what is held of some streams, in a thread, so often that `idle_ms` never pass in between.

    The thread ends with its process, which ends with the query: what a dead driver held is taken over by others.
    """

    def __init__(self, batches: Batches, *, idle_ms: float) -> None:
        self._batches = batches
        self._every_s = idle_ms / _SHARE / 1000
        self._closed = threading.Event()
        self._streams: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def hold(self, streams: Iterable[str]) -> None:
        """Keep what is held of `streams`, and of no others, from now on."""
        self._streams = tuple(streams)
        if self._streams and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="millstream-keep", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Keep nothing any more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._batches.keep(self._streams)
            except StaleOwner:
                pass  # the next plan says so, or it was the last one that has begun anew
            except MillstreamError as error:
                logger.warning("what this query holds was not renewed, others may take it over: %s", error)
