"""Subscription: the streams that a query reads."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass

from millstream.clock import Clock
from millstream.errors import ConfigError, RedisError
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import ServiceKeys, check_stream, from_wire, to_wire
from millstream.spark.source.options import SourceOptions

logger = logging.getLogger(__name__)

_SCAN_INTERVAL_MS = 1000.0
_RECHECK_MS = 30_000.0
_SLICE_MS = 10.0
_SCAN_WAIT_FACTOR = 20.0
_NAMED = 3


@dataclass(frozen=True, slots=True)
class SubscribedStreams:
    """The streams of a subscription at one time. `version`: where two of one subscription are equal, the names are."""

    version: int
    names: KeysView[str]


class Subscription:
    """The streams that are listed, or those that match a glob pattern, found by a SCAN about once a second.

    A SCAN of 100,000 keys takes as long as planning may. So after the first one it runs in slices, of 10 ms or a
    twentieth of the time since the last slice.
    """

    def __init__(self, client: Client, listed: tuple[str, ...], pattern: str | None, *, clock: Clock) -> None:
        self.pattern = pattern
        self._client = client
        self._streams = SubscribedStreams(0, dict.fromkeys(listed).keys())
        self._clock = clock
        self._pages: Iterator[list[str]] | None = None
        self._found: set[str] = set()
        self._due_ms = self._scanned_ms = float("-inf")
        self._left_out: set[str] = set()

    def names(self) -> KeysView[str]:
        """The names of `streams()`."""
        return self.streams().names

    def streams(self) -> SubscribedStreams:
        """The streams, with a version that changes with their names. Listed streams need not exist.

        Leaves out names that are not UTF-8 text, with a warning.
        """
        if self.pattern is not None and (self._pages is not None or self._clock.monotonic_ms() >= self._due_ms):
            self._scan(self.pattern)
        return self._streams

    def _scan(self, pattern: str) -> None:
        """Continue the SCAN for one slice; its end replaces the names."""
        now_ms = self._clock.monotonic_ms()
        until_ms = now_ms + max(_SLICE_MS, (now_ms - self._scanned_ms) / _SCAN_WAIT_FACTOR)
        if self._pages is None:
            self._pages, self._found = self._client.scan_pages(pattern), set()
        try:
            for page in self._pages:
                self._found.update(page)
                if self._clock.monotonic_ms() >= until_ms:
                    break
            else:
                self._pages = None
                self._due_ms = now_ms + _SCAN_INTERVAL_MS
                self._set_names(self._found)
        except RedisError:
            self._pages = None  # a continued SCAN would miss keys
            raise
        self._scanned_ms = self._clock.monotonic_ms()

    def _set_names(self, found: set[str]) -> None:
        unusable = {name for name in found - self._streams.names if not is_text(name)}
        if new := unusable - self._left_out:
            # Any client may create such a key; Spark has no string for it.
            examples = ", ".join(map(repr, sorted(new)[:_NAMED]))
            logger.warning("%d streams are left out, as their names are not UTF-8 text: %s", len(new), examples)
        self._left_out = unusable
        found -= unusable
        if found != self._streams.names:
            self._streams = SubscribedStreams(self._streams.version + 1, dict.fromkeys(sorted(found)).keys())


class _ListedInRedis(Subscription):
    """The streams of a list in Redis, fetched about once a second, less often if that is slow."""

    def __init__(self, client: Client, *, clock: Clock) -> None:
        super().__init__(client, (), None, clock=clock)

    def streams(self) -> SubscribedStreams:
        """See Subscription."""
        began_ms = self._clock.monotonic_ms()
        if began_ms >= self._due_ms:
            self._set_names(set(self._fetch_names()))
            ended_ms = self._clock.monotonic_ms()
            self._due_ms = ended_ms + max(_SCAN_INTERVAL_MS, (ended_ms - began_ms) * _SCAN_WAIT_FACTOR)
        return self._streams

    @abstractmethod
    def _fetch_names(self) -> Iterable[str]: ...


class AnnouncedSubscription(_ListedInRedis):
    """The streams that were announced to `service`, whose consumers lease them, until they are done.

    Leaves out names that cannot be streams, with a warning, and checks them again after 30 s: any client may announce
    any name.
    """

    def __init__(self, client: Client, service: str, *, clock: Clock) -> None:
        super().__init__(client, clock=clock)
        self._key = ServiceKeys(service).streams
        self._usable: dict[str, bool] = {}
        self._recheck_due_ms = 0.0

    def _fetch_names(self) -> list[str]:
        names = [from_wire(name) for name in self._client.execute("HKEYS", self._key)]
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._recheck_due_ms:
            self._recheck_due_ms = now_ms + _RECHECK_MS
            self._usable = {name: True for name, usable in self._usable.items() if usable}
        new = [name for name in names if name not in self._usable]
        for name, why in zip(new, self._reasons_unreadable(new), strict=True):
            self._usable[name] = why is None
            if why is not None:
                logger.warning("the announced stream %r is left out: %s", name, why)
        self._usable = {name: self._usable[name] for name in names}
        return [name for name, usable in self._usable.items() if usable]

    def _reasons_unreadable(self, names: Sequence[str]) -> list[str | None]:
        """Why each stream cannot be read; None if it can."""
        types = self._client.pipeline([("TYPE", to_wire(name)) for name in names]) if names else []
        return [_why_unreadable(name, raise_if_error(kind)) for name, kind in zip(names, types, strict=True)]


class PartitionSubscription(_ListedInRedis):
    """The partitions of `partitioned_streams`, whose number may grow at any time."""

    def __init__(self, client: Client, partitioned_streams: Sequence[str], *, clock: Clock) -> None:
        super().__init__(client, clock=clock)
        self._partitioned_streams = partitioned_streams

    def _fetch_names(self) -> list[str]:
        return [
            stream for base in self._partitioned_streams for stream in Partitions(self._client, base).require().streams
        ]


def subscription(client: Client, options: SourceOptions, *, clock: Clock) -> Subscription:
    """The subscription of `options`."""
    if options.service is not None:
        return AnnouncedSubscription(client, options.service, clock=clock)
    if options.partitioned_streams:
        return PartitionSubscription(client, options.partitioned_streams, clock=clock)
    return Subscription(client, options.streams, options.pattern, clock=clock)


def _why_unreadable(name: str, kind: bytes) -> str | None:
    if not is_text(name):
        return "its name is not UTF-8 text"
    try:
        check_stream(name)
    except ConfigError as error:
        return str(error)
    return None if kind in (b"stream", b"none") else f"its key holds a {kind.decode()}"


def is_text(name: str) -> bool:
    """Whether the name of a stream is UTF-8 text, as Spark needs it."""
    # Python decodes bytes that are not UTF-8 to these surrogates.
    return name.isascii() or not any("\udc80" <= char <= "\udcff" for char in name)
