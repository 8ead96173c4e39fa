"""WorkerReport: what one worker has, and when it made progress last, over all its handlers and streams."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from millstream.admin.lease_overview import ServiceLeases
from millstream.admin.reports import HandlerReport
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.running_code import WorkersCode, read_worker_code
from millstream.errors import ConfigError, RedisError
from millstream.groups.group import consumers_of
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, HandlerKeys, from_wire
from millstream.redis_client.pipelining import send_all

_AT_ONCE = 100

WorkerName = tuple[str, str]
"""An app, and the name of one of its workers."""


@dataclass(kw_only=True)
class WorkerReport:
    """A worker: one that is alive, or that has pending entries.

    * `handlers`: how many handlers it runs
    * `leased_streams`: streams that it has leased whole; `leased_keys`: keys of which it runs messages now
    * `pending`: entries that it has
    * `idle_ms`: milliseconds since its last command on any of its groups; `inactive_ms`: since it last got entries; None
      if unknown. Both grow while nothing comes
    * `code`: the code that it runs, one for each of its handlers
    """

    app: str
    name: str
    is_alive: bool = False
    handlers: int = 0
    leased_streams: int = 0
    leased_keys: int = 0
    pending: int = 0
    idle_ms: int | None = None
    inactive_ms: int | None = None
    code: set[WorkersCode] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class WorkerReports:
    """The workers by app and name; `searched`: on how many of the `total` streams of handlers their entries were counted."""

    workers: Sequence[WorkerReport]
    searched: int
    total: int


def read_workers(
    client: Client,
    handlers: Sequence[HandlerReport],
    services: Iterable[ServiceLeases],
    *,
    budget_ms: float = 1_000.0,
    clock: Clock = SYSTEM_CLOCK,
) -> WorkerReports:
    """The workers of these handlers on their streams, and of these services.

    Those of streams with pending entries are read first, for about `budget_ms` milliseconds. Raises RedisError.
    """
    end_ms = clock.monotonic_ms() + budget_ms
    on_workers = [one for one in handlers if one.engine == "workers"]
    found = _Workers()
    found.add_alive(on_workers, services)
    reports = sorted(on_workers, key=lambda one: not one.pending)
    searched = 0
    while searched < len(reports) and (not searched or clock.monotonic_ms() < end_ms):
        some = reports[searched : searched + _AT_ONCE]
        found.add_entries(client, some)
        searched += len(some)
    codes = read_worker_code(client, {(one.app, one.handler) for one in on_workers})
    return WorkerReports(workers=found.reports(codes), searched=searched, total=len(reports))


class _Workers:
    """Collects what is known of each worker."""

    def __init__(self) -> None:
        self._known: dict[WorkerName, WorkerReport] = {}

    def _of(self, app: str, name: str) -> WorkerReport:
        return self._known.setdefault((app, name), WorkerReport(app=app, name=name))

    def add_alive(self, reports: Sequence[HandlerReport], services: Iterable[ServiceLeases]) -> None:
        """Live workers, and the streams that they have leased."""
        running = Counter({(one.app, name, one.handler): 1 for one in reports for name in one.workers})
        for app, name, _ in running:
            worker = self._of(app, name)
            worker.is_alive, worker.handlers = True, worker.handlers + 1
        for service in services:
            app = service.asked.partition(".")[0]
            for one in service.state.consumers:
                self._of(app, one.name).leased_streams += one.streams

    def add_entries(self, client: Client, reports: Sequence[HandlerReport]) -> None:
        """The entries and keys that workers have on some streams. Raises RedisError."""
        places: dict[HandlerKeys, bool] = {}
        for one in reports:
            with suppress(ConfigError):  # no handler can read this stream
                places[HandlerKeys(one.app, one.handler, one.stream)] = one.keyed
        consumers = consumers_of(client, [(keys.stream, keys.group) for keys in places])
        for keys in places:
            for consumer in consumers.get((keys.stream, keys.group), ()):
                if consumer.name != WAITING:
                    worker = self._of(keys.app, consumer.name)
                    worker.pending += consumer.pending
                    worker.idle_ms = _least(worker.idle_ms, consumer.idle_ms)
                    worker.inactive_ms = _least(worker.inactive_ms, consumer.inactive_ms)
        keyed = [keys for keys, is_keyed in places.items() if is_keyed]
        replies = send_all(client, [("HGETALL", keys.owners) for keys in keyed])
        for keys, reply in zip(keyed, replies, strict=True):
            for owner in () if isinstance(reply, RedisError) else reply[1::2]:
                for name in owner.split(b" ", 2)[2:]:  # behind the number of the lease and the incarnation
                    self._of(keys.app, from_wire(name)).leased_keys += 1

    def reports(self, codes: Mapping[WorkerName, set[WorkersCode]]) -> list[WorkerReport]:
        """Those that are alive or have something, by app and name."""
        found = [self._known[one] for one in sorted(self._known)]
        for one in found:
            one.code = codes.get((one.app, one.name), set())
        return [one for one in found if one.is_alive or one.pending or one.leased_keys or one.leased_streams]


def _least(known: int | None, found: int | None) -> int | None:
    if found is None or found < 0:  # Redis has -1 where the consumer has never got an entry
        return known
    return found if known is None else min(known, found)
