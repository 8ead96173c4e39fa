"""EarlySeek: finds where the next batch may end while Spark processes this one.

Redis walks over the entries of a batch to find its end (`offset_seek`), and meanwhile no task has anything to do. So a
thread seeks on behind the batch that was planned last, in steps, and the next plan continues after the last step that
fits.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.spark.source.offset_seek import Seek, position_after, seek
from millstream.spark.source.offsets import Position
from millstream.spark.source.stream_info import StreamInfo

logger = logging.getLogger(__name__)

_FEWEST_ENTRIES = 10_000
_STEPS = 16
_STOP_S = 5.0


class Distance(NamedTuple):
    """How far to seek in a stream: so many entries behind `start`. `info` is older than the seek."""

    start: Position
    entries: int
    info: StreamInfo


class Reached(NamedTuple):
    """A position in a stream, and how many entries it is behind the start of the seek."""

    position: Position
    entries: int


class EarlySeek:
    """Seeks behind the end of a batch. What it finds only saves time; one thread uses it.

    Entries that are deleted after it has counted them make the next batch smaller, as entries do that are deleted
    between a plan and its tasks.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._distances: Mapping[str, Distance] = {}
        self._seek: _SeekThread | None = None

    def prepare(self, distances: Mapping[str, Distance]) -> None:
        """Note how far `begin` seeks, in place of all that was noted or found before. Few entries are not worth it."""
        self._seek = None
        self._distances = distances if sum(one.entries for one in distances.values()) >= _FEWEST_ENTRIES else {}

    def begin(self) -> None:
        """Begin to seek, as the batch begins that was planned last."""
        distances, self._distances = self._distances, {}
        if distances:
            self._seek = _SeekThread(self._client, distances)
            self._seek.start()

    def end(self) -> None:
        """End the seek after its current step. What it has found stays."""
        if self._seek is not None:
            self._seek.end()

    def furthest(self, stream: str, start: Position, most: int) -> Reached:
        """Return the furthest position it has found at most `most` entries behind `start`, or `start` itself."""
        found = self._seek.found.get(stream, ()) if self._seek is not None else ()
        if not found or found[0].position != start:
            return Reached(start, 0)
        return next(one for one in reversed(found) if one.entries <= most)


class _SeekThread(threading.Thread):
    """Seeks in each stream, step by step. `found`: the start and the end of each step, once the thread has ended."""

    def __init__(self, client: Client, distances: Mapping[str, Distance]) -> None:
        super().__init__(name="millstream-early-seek", daemon=True)
        self._client = client
        self._distances = distances
        self._ending = threading.Event()
        self.found: Mapping[str, Sequence[Reached]] = {}

    def end(self) -> None:
        self._ending.set()
        self.join(_STOP_S)

    def run(self) -> None:
        steps = {stream: -(-one.entries // _STEPS) for stream, one in self._distances.items()}
        seeks = {stream: Seek(one.start.id, steps[stream], _STEPS) for stream, one in self._distances.items()}
        found: dict[str, Sequence[Reached]] = {}
        try:
            results = seek(self._client, seeks, give_up=self._ending.is_set)
        except RedisError as error:
            logger.debug("cannot seek the end of the next batch: %s; the next plan seeks from its start", error)
            return
        for stream, (ids, info) in results.items():
            start, _, before = self._distances[stream]
            counts = count(steps[stream], steps[stream])
            ends = [Reached(position_after(start, n, at, before, info), n) for at, n in zip(ids, counts, strict=False)]
            found[stream] = [Reached(start, 0), *ends]
        self.found = found
