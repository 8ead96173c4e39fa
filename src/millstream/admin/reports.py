"""Reports of an inspection: streams, their groups, and handlers. No I/O."""

from typing import Literal

import msgspec

from millstream.delivery.long_runs import LongRun
from millstream.delivery.pause import Pause
from millstream.delivery.rate_override import RateOverride
from millstream.delivery.restarts import RecentRestarts
from millstream.redis_client.key_names import HandlerKeys

Engine = Literal["workers", "spark"]


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer group.

    * `last_delivered_id`: last delivered id; `entries_read`: number of delivered entries, None if unknown to Redis
    * `consumers`, `pending`: numbers of its consumers and pending entries
    * `alive`: consumers active within a minute; of a stage, its run
    * `has_lag`: whether the fields below are known, which holds for all groups except those of handlers
    * `lag`, `lag_exact`, `oldest_age_ms`: as in HandlerReport
    * `shared`: a query on Spark is one of the consumers (readAs=group)
    """

    name: str
    consumers: int
    pending: int
    last_delivered_id: str
    entries_read: int | None
    alive: tuple[str, ...] = ()
    has_lag: bool = False
    lag: int | None = None
    lag_exact: bool = False
    oldest_age_ms: int | None = None
    shared: bool = False


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """A stream: its length, first and last id (None if it is empty), the age of its oldest entry, its groups.

    `added`: number of entries ever added.
    """

    name: str
    length: int
    added: int
    first_id: str | None
    last_id: str | None
    last_generated_id: str
    oldest_age_ms: int | None
    groups: tuple[GroupReport, ...] = ()


class HandlerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a handler on one stream.

    * `engine`: the engine that runs it, or ran it last; `keyed`: it has a key, as far as Redis shows
    * `committed_id`: all entries up to this id are committed, on workers except pending ones; None before the first
      commit
    * `lag`: uncommitted entries; None if unknown. A lower bound unless `lag_exact`
    * `oldest_age_ms`: age of the first uncommitted entry
    * `consumers`: number of live workers, or runs on Spark; `workers`: their names
    * `pending`: entries that workers have, that were nacked, that wait in key queues, or that are deferred by Spark;
      `in_flight`: those that workers have
    * `oldest_pending_age_ms`: age of the first pending entry
    * `processed`, `dead`: totals of messages that were processed, and that became dead letters; `committed`: both
    * `written`, `refused`: totals of written outputs, and of commits refused because another run had made them
    * `dead_letters`: dead letters in its queue now; `parked`: keys that are parked; `backing_off`: keys that wait for
      the next attempt; `blocked`: keys whose first message has failed all its attempts or waits for newer code, and is
      retried without end, of some hundred; one that is attempted again just now does not back off. `blocked_since_ms`:
      when the first attempt on one of these messages failed, in Unix milliseconds; None if none has
    * `paused`: its workers read no new entries; `pause`: why, and since when
    * `rate_override`: the rate that an operator has set; None: that in code holds
    * `problem`: unreadable data in its keys, which no handler of this version has written, so that the rest is unknown;
      None if readable
    * `stream_type`: the type of value that the key of its stream holds, if that is no stream
    * `stored_format`: number of the format of its keys; None if it has not started since there are such numbers
    """

    app: str
    handler: str
    stream: str
    engine: Engine
    keyed: bool
    committed_id: str | None
    lag: int | None
    lag_exact: bool
    oldest_age_ms: int | None
    consumers: int
    workers: tuple[str, ...]
    pending: int
    in_flight: int
    oldest_pending_age_ms: int | None
    committed: int
    processed: int
    written: int
    dead: int
    refused: int
    dead_letters: int
    parked: int
    backing_off: int
    blocked: int
    paused: bool
    pause: Pause | None = None
    rate_override: RateOverride | None = None
    problem: str | None = None
    stream_type: str = "stream"
    stored_format: int | None = None
    blocked_since_ms: int | None = None

    @property
    def keys(self) -> HandlerKeys:
        """The names of its keys in Redis."""
        return HandlerKeys(self.app, self.handler, self.stream)

    @property
    def mode(self) -> str:
        """How it reads: its engine, with "by key" if it has a key."""
        return f"{self.engine} by key" if self.keyed else self.engine

    @property
    def label(self) -> str:
        """The name of the handler that is shown to users."""
        return f"{self.app}.{self.handler}"


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Streams, sorted by name, and handlers on them, sorted by handler.

    `restarts`: recent restarts of the apps' worker processes. `long_runs`: messages that workers have been running for
    over a minute, or in isolation for some seconds.
    `hidden_streams`, `hidden_handlers`: numbers of those that this user may not access. `is_sample`: there may be more
    streams.
    """

    streams: tuple[StreamReport, ...]
    handlers: tuple[HandlerReport, ...]
    restarts: tuple[RecentRestarts, ...] = ()
    long_runs: tuple[LongRun, ...] = ()
    hidden_streams: int = 0
    hidden_handlers: int = 0
    is_sample: bool = False
