"""ClaimRenewal: renews the claims on a batch in progress, so that no other consumer claims its entries as idle."""

import logging
import threading
from collections.abc import Iterable

from millstream.errors import MillstreamError, StaleOwner
from millstream.spark.source.group_batches import Batches

logger = logging.getLogger(__name__)

_RENEWALS_PER_IDLE_TIME = 3.0


class ClaimRenewal:
    """Renews the claims on the entries of some streams in a thread, three times in `idle_ms` milliseconds.

    The thread ends with its process, which ends with the query: other consumers then claim the entries of a dead
    driver.
    """

    def __init__(self, batches: Batches, *, idle_ms: float) -> None:
        self._batches = batches
        self._every_s = idle_ms / _RENEWALS_PER_IDLE_TIME / 1000
        self._closed = threading.Event()
        self._streams: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None

    def set_streams(self, streams: Iterable[str]) -> None:
        """Renew the claims on entries of `streams`, and of no others, from now on."""
        self._streams = tuple(streams)
        if self._streams and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="millstream-renewal", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the renewal."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                self._batches.renew(self._streams)
            except StaleOwner:
                pass  # the next plan raises it; or this run has just begun a new epoch itself
            except MillstreamError as error:
                logger.warning(
                    "cannot renew the claims of this query: %s; other consumers may claim its entries", error
                )
