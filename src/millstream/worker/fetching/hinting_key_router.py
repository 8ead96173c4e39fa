"""Hinting key router: routes entries of thousands of streams for all workers, which it notifies by hints."""

from collections.abc import Mapping, Sequence

from millstream.delivery.keyed_stream import KeyedStream
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.hinted_key_fetcher import ReadyHints
from millstream.worker.fetching.router_role import RouterRole
from millstream.worker.fetching.tracked_key_router import TrackedKeyRouter


class HintingKeyRouter(TrackedKeyRouter):
    """A TrackedKeyRouter that reports to the workers, by `ReadyHints`, the streams whose key queues became ready."""

    def __init__(
        self, context: WorkerContext, client: Client, joined: Mapping[str, KeyedStream], role: RouterRole
    ) -> None:
        self._hints = ReadyHints(client, context.handler)
        super().__init__(context, client, joined, role, ready_streams=self._hints)

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
