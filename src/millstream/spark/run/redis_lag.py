"""RedisLag: the lag of queries by their progress groups, for Spark before 4.2, whose reports lack the newest offset."""

from collections.abc import Iterable, Mapping, Sequence

from millstream.clock import Clock
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.spark.source.progress_group import group_positions
from millstream.spark.source.stream_info import fetch

_MAX_AGE_MS = 2_000.0


class RedisLag:
    """Reads the lag of groups from Redis, at most once in two seconds."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._due_ms = float("-inf")
        self._last: int | None = None

    def total(self, streams_by_group: Iterable[tuple[str, Sequence[str]]]) -> int | None:
        """The entries that the groups have not read of their streams; None while unknown, or Redis unavailable.

        A stream without its group counts for nothing: its query has not begun.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._due_ms:
            try:
                lags = [entries_behind_group(self._client, group, streams) for group, streams in streams_by_group]
            except RedisError:
                lags = []
            known = [count for lag in lags for count in lag.values() if count is not None]
            self._last = sum(known) if known and len(known) == sum(map(len, lags)) else None
            self._due_ms = self._clock.monotonic_ms() + _MAX_AGE_MS
        return self._last


def entries_behind_group(client: Client, group: str, streams: Sequence[str]) -> Mapping[str, int | None]:
    """Return the entries after the position of `group`, of each stream that has it; None where unknown."""
    positions = group_positions(client, group, streams)
    infos = fetch(client, positions)
    return {
        stream: None if at.entries_added is None or info is None else max(0, info.entries_added - at.entries_added)
        for stream, (at, _) in positions.items()
        for info in (infos[stream],)
    }
