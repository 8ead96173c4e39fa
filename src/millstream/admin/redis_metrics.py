"""RedisMetrics: reads the figures of handlers from Redis all the time, for Prometheus and for autoscalers.

It reads in its own thread, so that a scrape never waits for Redis, and at most a tenth of the time, so that handlers with
100,000 streams cost no more than others: their figures are only older.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from millstream.admin.handler_figures import AT_ONCE, REASONS, STATES, HandlerFigures, add_figures
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.handler import Handler
from millstream.observability import metrics as m
from millstream.observability.health import Progress
from millstream.observability.metrics import Recorder
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.redaction import redact_text

logger = logging.getLogger(__name__)

_EVERY_MS = 5_000.0
REST = 9
"""How many times as long as it read it rests, at least."""
_DISCOVERY_REST = 20

Places = Mapping[str, Sequence[HandlerKeys]]
"""The streams of each handler, by its label (`app.handler`)."""


def places_of(client: Client, handlers: Iterable[Handler]) -> Places:
    """The streams that these handlers read as of now. Raises RedisError."""
    return {one.label: [*_on_streams(one, streams_of(client, one))] for one in handlers}


def all_places(client: Client) -> Places:
    """The streams of all handlers that have keys or a group in Redis. Raises RedisError."""
    from millstream.admin.inspection import find_handlers  # imported here: workers do without the balancer

    return by_handler(find_handlers(client))


def by_handler(found: Iterable[HandlerKeys]) -> Places:
    """These handlers on streams, by handler."""
    places: dict[str, list[HandlerKeys]] = {}
    for keys in found:
        places.setdefault(keys.label, []).append(keys)
    return places


def streams_of(client: Client, handler: Handler) -> Sequence[str]:
    """The streams that a handler names, that match its pattern, its partitions, or the announced ones, as of now.

    Partitions that were never created are left out. Raises RedisError.
    """
    if handler.announced:
        from millstream.balancer.protocol import announced_streams  # imported here: most workers do without it

        return announced_streams(client, handler.announced)
    if handler.partitions:
        maps = [Partitions(client, base).load() for base in handler.streams]
        return [stream for one in maps if one is not None for stream in one.streams]
    return handler.streams or client.scan_streams(handler.pattern or "*")


def _on_streams(handler: Handler, streams: Iterable[str]) -> Iterator[HandlerKeys]:
    for stream in streams:
        with suppress(ConfigError):  # no handler can read this stream, which a pattern matches
            yield HandlerKeys(handler.app, handler.name, stream)


class KnownPlaces:
    """The streams of handlers, found anew from time to time: to find them may scan all keys of Redis.

    * `discover`: finds them
    * `every_ms`: how often it is called, in milliseconds, at most; it takes at most a twentieth of the time
    """

    def __init__(self, discover: Callable[[Client], Places], *, every_ms: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._discover = discover
        self._every_ms = every_ms
        self._clock = clock
        self._due_ms = float("-inf")
        self.places: Places = {}

    def refresh(self, client: Client) -> bool:
        """Find them anew, if that was long enough ago; False if not. Raises what `discover` raises."""
        began_ms = self._clock.monotonic_ms()
        if began_ms < self._due_ms:
            return False
        self.places = self._discover(client)
        took_ms = self._clock.monotonic_ms() - began_ms
        self._due_ms = began_ms + max(self._every_ms, (_DISCOVERY_REST + 1) * took_ms)
        return True


class RedisMetrics:
    """Reports the figures of handlers in Redis to `recorder`, and serves an autoscaler the work that waits.

    * `discover`: returns the handlers and their streams; called again from time to time, as streams come and go
    * `progress`: notified of each answer of Redis
    * `every_ms`: how often the figures are read, in milliseconds, unless there are too many streams for that

    While Redis cannot be read there are no figures, rather than old ones, and `millstream_redis_up` is 0.
    """

    def __init__(
        self,
        client: Client,
        discover: Callable[[Client], Places],
        recorder: Recorder,
        *,
        progress: Progress | None = None,
        every_ms: float = _EVERY_MS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client = client
        self._known = KnownPlaces(discover, every_ms=every_ms, clock=clock)
        self._recorder = recorder
        self._progress = progress
        self._every_ms = every_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: dict[str, HandlerFigures] = {}
        self._failure: str | None = None
        self._ever_read = False
        recorder.set(m.REDIS_UP, 0)

    def run(self, stopping: threading.Event) -> None:
        """Read the figures again and again, until `stopping`."""
        while not stopping.is_set():
            began_ms = self._clock.monotonic_ms()
            self.read_all(stopping)
            took_ms = self._clock.monotonic_ms() - began_ms
            stopping.wait(max(REST * min(took_ms, self._every_ms), self._every_ms - took_ms) / 1000)

    def read_all(self, stopping: threading.Event | None = None) -> None:
        """Read the figures of all handlers once. An error is logged, and shown by the figures."""
        try:
            self._find_places()
            for label, places in self._known.places.items():
                if not self._read(label, places, stopping or threading.Event()):
                    return
        except MillstreamError as error:
            self._fail(redact_text(str(error)))
        else:
            self._failure = None
            self._ever_read = True
            self._recorder.set(m.REDIS_UP, 1)

    def scale_page(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """The page `/scale?handler=APP.HANDLER`: how much work waits, as numbers for an autoscaler."""
        label = query.get("handler", "")
        with self._lock:
            figures = self._shown.get(label)
        if figures is not None:
            oldest_s = round((figures.oldest_ms or 0) / 1000, 3)
            answer = {
                "handler": label,
                "waiting": figures.waiting,
                "oldest_age_s": oldest_s,
                "keys_ready": figures.keys["ready"],
                "in_flight": figures.in_flight,
                "paused": 0 < figures.streams == figures.paused,
            }
            return 200, msgspec.json.encode(answer)
        if self._failure is not None or not self._ever_read:
            return 503, msgspec.json.encode({"error": self._failure or "the figures have not been read yet"})
        known = ", ".join(sorted(self._shown)) or "none"
        return 404, msgspec.json.encode({"error": f"give ?handler=APP.HANDLER, one of: {known}"})

    def _find_places(self) -> None:
        """Find the streams of each handler, if that was long enough ago."""
        if self._known.refresh(self._client):
            self._report_alive()
            for label in self._shown.keys() - self._known.places.keys():
                self._remove(label)

    def _report_alive(self) -> None:
        if self._progress is not None:
            self._progress.on_read()

    def _read(self, label: str, places: Sequence[HandlerKeys], stopping: threading.Event) -> bool:
        """Read the figures of one handler and show them; False if it was stopped before all its streams were read."""
        figures = HandlerFigures()
        for at in range(0, len(places), AT_ONCE):
            began_ms = self._clock.monotonic_ms()
            add_figures(self._client, places[at : at + AT_ONCE], figures, self._clock)
            took_ms = self._clock.monotonic_ms() - began_ms
            self._report_alive()
            if len(places) > AT_ONCE and stopping.wait(REST * took_ms / 1000):
                return False
        with self._lock:
            self._shown[label] = figures
        self._show(label, figures)
        return True

    def _show(self, label: str, figures: HandlerFigures) -> None:
        recorder = self._recorder
        recorder.set(m.LAG, figures.waiting, handler=label)
        recorder.set(m.OLDEST_MESSAGE, (figures.oldest_ms or 0) / 1000, handler=label)
        for reason in REASONS:
            recorder.set(m.DEAD_LETTERS, figures.dead_letters[reason], handler=label, reason=reason)
        recorder.set(m.DELAYED, figures.delayed, handler=label)
        for state in STATES:
            recorder.set(m.KEYS, figures.keys[state], handler=label, state=state)
            recorder.set(m.OLDEST_KEY, figures.oldest_key_ms.get(state, 0) / 1000, handler=label, state=state)
        recorder.set(m.LOOK_AHEAD_USED, figures.look_ahead_used, handler=label)
        recorder.set(m.PAUSED, float(0 < figures.streams == figures.paused), handler=label)
        recorder.set(m.BREAKER_OPEN, float(figures.paused_by_breaker > 0), handler=label)
        recorder.set(m.REDIS_READ_AT, time.time(), handler=label)

    def _fail(self, why: str) -> None:
        if self._failure is None:
            logger.warning(
                "cannot read the figures of handlers from Redis: %s; they are not exported until it can", why
            )
        self._failure = why
        self._recorder.set(m.REDIS_UP, 0)
        for label in list(self._shown):
            self._remove(label)

    def _remove(self, label: str) -> None:
        with self._lock:
            del self._shown[label]
        recorder = self._recorder
        for metric in (
            m.LAG,
            m.OLDEST_MESSAGE,
            m.DELAYED,
            m.LOOK_AHEAD_USED,
            m.PAUSED,
            m.BREAKER_OPEN,
            m.REDIS_READ_AT,
        ):
            recorder.remove(metric, handler=label)
        for reason in REASONS:
            recorder.remove(m.DEAD_LETTERS, handler=label, reason=reason)
        for state in STATES:
            recorder.remove(m.KEYS, handler=label, state=state)
            recorder.remove(m.OLDEST_KEY, handler=label, state=state)
