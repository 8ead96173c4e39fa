"""Shared key router: the elected worker routes entries of thousands of streams for all workers, by key tracking."""

import threading
from collections.abc import Sequence
from typing import Any

from millstream.delivery.keyed_stream import KeyedStream
from millstream.worker.fetching.owned_key_router import OwnedKeyRouter
from millstream.worker.fetching.shared_key_fetcher import ReadyHints


class SharedKeyRouter(OwnedKeyRouter):
    """An OwnedKeyRouter of the streams on which this worker is the router; it notifies the workers by hints."""

    _is_shared = True

    def __init__(self, *args: Any, hints: ReadyHints, **options: Any) -> None:
        super().__init__(*args, ready_streams=hints, **options)
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
        """See KeyRouter: runs where Redis tracks no keys."""
        try:
            super()._route_all(due)
        finally:
            self._hints.tell()

    def _route_some(self) -> None:
        try:
            super()._route_some()
        finally:
            self._hints.tell()
