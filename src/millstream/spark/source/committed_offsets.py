"""CommittedOffsets: compares what the handler engine has committed in Redis with Spark's checkpoint.

They differ after Redis has lost its last writes: the checkpoint then counts on commits that Redis no longer has. The
entries between are processed again.
"""

import logging
from collections.abc import Sequence

from millstream.clock import Clock
from millstream.delivery.commit_store import CommitStore
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.offsets import Position, Positions
from millstream.spark.source.stream_info import fetch_calls

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_MS = 1000.0
_STREAMS_PER_CHECK = 2_000
_PAUSED_WAIT_FACTOR = 20


class CommittedOffsets:
    """The committed ids of the handler `handler` (app, name) on its streams; None = no handler, no commits."""

    def __init__(self, client: Client, handler: tuple[str, str] | None, *, clock: Clock) -> None:
        self._client = client
        self._commit_store = CommitStore(client, app=handler[0], handler=handler[1]) if handler is not None else None
        self._clock = clock
        self._check_due_ms = float("-inf")
        self._next_check = 0
        self._paused: dict[str, bool] = {}
        self._paused_due_ms = float("-inf")

    def committed_ids(self, streams: Sequence[str]) -> dict[str, EntryId]:
        """The committed id of each stream that has one."""
        return self._commit_store.committed_ids(streams) if self._commit_store is not None and streams else {}

    def paused(self, streams: Sequence[str]) -> set[str]:
        """Those of `streams` on which the handler is paused, as of a second ago at most; longer if the call is slow."""
        if self._commit_store is None:
            return set()
        began_ms = self._clock.monotonic_ms()
        if began_ms >= self._paused_due_ms:
            self._paused, self._paused_due_ms = {}, began_ms + _CHECK_INTERVAL_MS
        if new := [stream for stream in streams if stream not in self._paused]:
            found = self._commit_store.paused_streams(new)
            self._paused |= {stream: stream in found for stream in new}
            self._paused_due_ms += (self._clock.monotonic_ms() - began_ms) * _PAUSED_WAIT_FACTOR
        return {stream for stream in streams if self._paused[stream]}

    def lost_commits(self, offsets: Positions) -> dict[str, EntryId]:
        """The committed ids below `offsets` with entries in between. A missing committed id counts as 0-0: a query that
        begins later commits its start first.
        """
        if self._commit_store is None:
            return {}
        found = self.committed_ids(list(offsets))
        committed = {stream: found.get(stream, ZERO_ID) for stream in offsets}
        lower = {
            stream: committed_id for stream, committed_id in committed.items() if committed_id < offsets[stream].id
        }
        between = [("XRANGE", name, f"({at}", str(offsets[name].id), "COUNT", 1) for name, at in lower.items()]
        replies = fetch_calls(self._client, between)
        return {
            name: lower[name] for name, reply in zip(lower, replies, strict=True) if isinstance(reply, list) and reply
        }

    def rewind(self, offsets: Positions) -> Positions:
        """Return `offsets`, moved back to the committed id, with a warning, where Redis has lost commits."""
        lowered = dict(offsets)
        for stream, committed_id in self.lost_commits(offsets).items():
            logger.warning(
                "Redis has lost commits on stream %r: they end at %s, Spark's checkpoint is at %s; processing the "
                "entries between again",
                stream,
                committed_id,
                offsets[stream].id,
            )
            lowered[stream] = Position(committed_id, None)
        return lowered

    def positions_to_reprocess(self, offsets: Positions) -> Positions:
        """Return those of `offsets` with lost commits before them, without their counts; checks up to 2,000 a second.

        Spark starts a batch only if an offset has changed, and a dropped count changes it. That happens once: the
        position stays without a count until the stream goes on.
        """
        if self._commit_store is None or self._clock.monotonic_ms() < self._check_due_ms:
            return {}
        self._check_due_ms = self._clock.monotonic_ms() + _CHECK_INTERVAL_MS
        counted = [stream for stream, position in offsets.items() if position.entries_added is not None]
        checked = counted[self._next_check :][:_STREAMS_PER_CHECK]
        self._next_check = self._next_check + len(checked) if self._next_check + len(checked) < len(counted) else 0
        return {
            stream: Position(offsets[stream].id, None)
            for stream in self.lost_commits({name: offsets[name] for name in checked})
        }
