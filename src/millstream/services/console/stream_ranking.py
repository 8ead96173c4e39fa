"""StreamRanking: which of all streams have most entries, the oldest, the largest lag or the highest rate."""

import logging
import threading
from collections.abc import Sequence

from millstream.admin.inspection import inspect_streams
from millstream.admin.stream_order import StreamOrder
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, RedisError
from millstream.redis_client.client import Client
from millstream.services.console.live_reads import LIVE_MS
from millstream.services.console.ranked_streams import RankedStreams, Ranking
from millstream.services.console.stream_names import StreamNames

logger = logging.getLogger(__name__)

MOST_PER_S = 2_000
_REST = 4
"""How many times as long as it read it rests, at least."""
_AT_ONCE = 100
_WATCHED_MS = 15_000.0
_KNOWN_MS = 300_000.0
_MOST_PREFIXES = 20
_NAMES_MS = 500.0
_BRIEF_WAIT_MS = 50.0
_TIMEOUT_MS = 10_000


class StreamRanking:
    """Ranks the streams of one Redis while viewers ask for rankings. May be used by any thread.

    A thread with a client of its own reads the streams that begin with what was asked for in the last 15 seconds, again
    and again, those first that were read the longest ago: at most 2,000 streams a second, for at most a fifth of the time,
    and none more often than every 5 seconds. It ends when no page asks. Figures are kept for 5 minutes after that.
    """

    def __init__(
        self, url: str, names: StreamNames, *, wait_ms: float = _BRIEF_WAIT_MS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._url = url
        self._names = names
        self._wait_ms = wait_ms
        self._clock = clock
        self._changed = threading.Condition()
        self._asked: dict[str, float] = {}
        self._streams = RankedStreams()
        self._running: threading.Thread | None = None

    def find(self, prefix: str, order: StreamOrder) -> Ranking:
        """The first streams whose names begin with `prefix`, as far as they are read.

        If none was read just before, it waits up to `wait_ms` milliseconds until all of them are.
        """
        with self._changed:
            now_ms = self._clock.monotonic_ms()
            if now_ms - max(self._asked.values(), default=now_ms) > _KNOWN_MS:
                self._streams = RankedStreams()
            self._asked.pop(prefix, None)
            self._asked[prefix] = now_ms
            while len(self._asked) > _MOST_PREFIXES:
                del self._asked[next(iter(self._asked))]
            if self._running is None:
                thread = threading.Thread(target=self._run, name="millstream-ranking", daemon=True)
                thread.start()
                self._running = thread  # not before: a thread that cannot start would leave it here for ever
                self._changed.wait_for(lambda: self._is_known(prefix) or self._running is None, self._wait_ms / 1_000)
            streams = self._streams
        return streams.rank(prefix, order, self._clock.monotonic_ms())

    def _is_known(self, prefix: str) -> bool:
        return bool(self._streams.names) and self._streams.is_read(prefix)

    def _run(self) -> None:
        try:
            with Client(self._url, timeout_ms=_TIMEOUT_MS) as client:
                while self._goes_on():
                    self._read_round(client)
        except RedisError as error:
            logger.debug("streams not ranked: %s; trying again when a page asks", error)
        finally:
            with self._changed:
                if self._running is threading.current_thread():
                    self._running = None
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Whether a viewer watches; if none does, the next to ask starts another thread."""
        with self._changed:
            if not self._watched():
                self._running = None
            return self._running is not None

    def _watched(self) -> Sequence[str]:
        """What was asked for in the last seconds."""
        with self._changed:
            since_ms = self._clock.monotonic_ms() - _WATCHED_MS
            return [prefix for prefix, asked_ms in self._asked.items() if asked_ms >= since_ms]

    def _read_round(self, client: Client) -> None:
        """Read each of these streams once, as long as a viewer watches."""
        began_ms = self._clock.monotonic_ms()
        known = self._names.find("")
        if known is None or known.is_partial:
            self._clock.sleep_ms(_NAMES_MS)
            return
        streams = self._streams if known.names == self._streams.names else RankedStreams(known.names, self._streams)
        with self._changed:
            self._streams = streams
        places = streams.places(self._watched())
        for at in range(0, len(places), _AT_ONCE):
            if not self._watched():
                return
            self._read(client, streams, places[at : at + _AT_ONCE])
        self._clock.sleep_ms(max(0.0, began_ms + LIVE_MS - self._clock.monotonic_ms()))

    def _read(self, client: Client, streams: RankedStreams, places: Sequence[int]) -> None:
        read_ms = self._clock.monotonic_ms()
        try:
            found = inspect_streams(client, [streams.names[place] for place in places])
        except AccessDenied as error:
            if not error.concerns_key:
                raise
            found = ()  # this user may read none of them
        streams.update(places, {one.name: one for one in found}, read_ms)
        with self._changed:
            self._changed.notify_all()
        took_ms = self._clock.monotonic_ms() - read_ms
        self._clock.sleep_ms(max(_REST * took_ms, len(places) * 1_000 / MOST_PER_S - took_ms))
