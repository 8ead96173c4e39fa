"""ReadyStreamsRouter: routes entries of thousands of streams for all workers, and reports the ready streams to them."""

from collections.abc import Mapping, Sequence

from millstream.delivery.keyed_stream import KeyedStream
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.ready_streams_fetcher import ReadyStreams
from millstream.worker.fetching.router_role import RouterRole
from millstream.worker.fetching.tracked_key_router import TrackedKeyRouter


class ReadyStreamsRouter(TrackedKeyRouter):
    """A TrackedKeyRouter that reports to the workers, by `ReadyStreams`, the streams whose key queues became ready."""

    def __init__(
        self, context: WorkerContext, client: Client, joined: Mapping[str, KeyedStream], role: RouterRole
    ) -> None:
        self._shared_ready = ReadyStreams(client, context.handler)
        super().__init__(context, client, joined, role, ready_streams=self._shared_ready)

    def _notify(self, stream: KeyedStream) -> None:
        if stream.newly_ready:
            self._shared_ready.put(stream.stream)

    def _route_all(self, due: Sequence[KeyedStream]) -> None:
        """See KeyRouter: runs where Redis tracks no keys."""
        try:
            super()._route_all(due)
        finally:
            self._shared_ready.publish()

    def _route_batch(self) -> None:
        try:
            super()._route_batch()
        finally:
            self._shared_ready.publish()
