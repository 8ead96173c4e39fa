"""Shared key router: the elected worker routes entries of thousands of streams for all workers, by key tracking."""

import threading
from collections.abc import Mapping, Sequence

from millstream.delivery.keyed_stream import KeyedStream
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.owned_key_router import OwnedKeyRouter
from millstream.worker.fetching.shared_key_fetcher import ReadyHints


class SharedKeyRouter(OwnedKeyRouter):
    """An OwnedKeyRouter of the streams on which this worker is the router; it notifies the workers by hints."""

    _is_shared = True

    def __init__(self, context: WorkerContext, client: Client, joined: Mapping[str, KeyedStream]) -> None:
        self._hints = ReadyHints(client, context.handler)
        super().__init__(context, client, joined, ready_streams=self._hints)

    def _collect(self, stopping: threading.Event) -> None:
        before = self._owned_names
        self._acquire_roles(self.streams.copy())
        self._to_route |= dict.fromkeys(self._owned_names - before)
        super()._collect(stopping)

    def _is_owned(self, name: str) -> bool:
        return name in self._owned_names

    def _notify(self, stream: KeyedStream) -> None:
        if stream.newly_ready:
            self._hints.put(stream.stream)

    def _route_all(self, due: Sequence[KeyedStream]) -> None:
        """See KeyRouter: runs where Redis tracks no keys."""
        try:
            super()._route_all(due)
        finally:
            self._hints.publish()

    def _route_batch(self) -> None:
        try:
            super()._route_batch()
        finally:
            self._hints.publish()
