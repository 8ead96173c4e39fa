"""StreamInfoCache: the stream info of a query, fetched again only for streams that Redis reports as changed."""

from collections.abc import Iterable, Mapping
from itertools import islice

from millstream.clock import Clock
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.spark.source.stream_info import StreamInfo, parse_info

_SWEEP_MS = 300_000.0
"""Interval in which each stream is fetched at least once: Redis does not report every change (SWAPDB, XSETID)."""
_MAX_SWEPT_MS = 1_000.0


class StreamInfoCache:
    """The info of streams as of the last refresh. It only saves time: in doubt, all of it counts as stale."""

    def __init__(self, client: Client, *, clock: Clock) -> None:
        self._key_tracker = KeyTracker(client)
        self._clock = clock
        self._infos: dict[str, StreamInfo | None] = {}  # those fetched longest ago come first
        self._stale: set[str] = set()
        self._swept_ms = clock.monotonic_ms()
        self._to_sweep = 0.0
        self.version = 0

    @property
    def all_known(self) -> Mapping[str, StreamInfo | None]:
        """The last info of all streams, also where it is stale; `version` grows with every change."""
        return self._infos

    def refresh(self) -> set[str] | None:
        """Mark changed streams as stale, and return them; None: all streams. Raises RedisError."""
        changed = self._key_tracker.changed()
        if changed is None:
            self._stale.update(self._infos)
            return None
        changed |= self._sweep_due()
        self._stale |= changed
        return changed

    def get(self, names: Iterable[str]) -> Mapping[str, StreamInfo | None]:
        """The info of `names`, as of the last refresh or later, and older info of others; None: no such stream.

        Raises WrongType if a key holds another type, RedisError for other errors.
        """
        infos, stale = self._infos, self._stale
        unknown = [name for name in names if name in stale or name not in infos]
        for name, reply in self._key_tracker.read_each(("XINFO", "STREAM"), unknown):
            found = parse_info(name, reply)
            if infos.pop(name, None) != found:
                self.version += 1
            infos[name] = found
        stale.difference_update(unknown)
        return infos

    def _sweep_due(self) -> set[str]:
        now_ms = self._clock.monotonic_ms()
        self._to_sweep += len(self._infos) * min(now_ms - self._swept_ms, _MAX_SWEPT_MS) / _SWEEP_MS
        self._swept_ms = now_ms
        share = int(self._to_sweep)
        self._to_sweep -= share
        return set(islice(self._infos, share))
