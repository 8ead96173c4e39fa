"""How one of the workers routes thousands of streams for all of them: told by Redis which have changed."""

import threading
from collections.abc import Sequence
from typing import Any

from millstream.delivery.keyed_stream import KeyedStream
from millstream.worker.fetching.owned_key_router import OwnedKeyRouter
from millstream.worker.fetching.shared_key_fetcher import ReadyHints


class SharedKeyRouter(OwnedKeyRouter):
    """An OwnedKeyRouter of the streams on which this worker is the router; the workers hear of new lines by hints."""

    _is_shared = True

    def __init__(self, *means: Any, hints: ReadyHints, **options: Any) -> None:
        super().__init__(*means, woken=hints, **options)
        self._hints = hints

    def _listen(self, stopping: threading.Event) -> None:
        before = self._held_names
        self._ask_for(self.streams.copy())
        self._to_route |= dict.fromkeys(self._held_names - before)
        super()._listen(stopping)

    def _is_mine(self, name: str) -> bool:
        return name in self._held_names

    def _tell(self, stream: KeyedStream) -> None:
        if stream.readied:
            self._hints.put(stream.stream)

    def _route_all(self, due: Sequence[KeyedStream]) -> None:
        """See Router, whose way is taken where Redis tells nothing."""
        try:
            super()._route_all(due)
        finally:
            self._hints.tell()

    def _route_some(self) -> None:
        try:
            super()._route_some()
        finally:
            self._hints.tell()
