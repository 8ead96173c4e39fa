"""Reader: the loop around a consumer that survives lost connections, lost groups and lost streams, and reports them.

A read whose reply was lost has delivered its entries all the same: they are in the consumer's own pending list, where a
loop that reads only new entries never sees them. So the reader begins with its own pending entries, and returns to them
after every connection error.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millstream.clock import SYSTEM_CLOCK, Backoff, Clock, Every
from millstream.errors import ConfigError, GroupMissing, Unavailable
from millstream.groups.consumer import Consumer
from millstream.groups.entries import BEGINNING, END, Batch, Id, check_position, wire_id
from millstream.groups.events import EntriesGone, Event, GroupRecreated, Repeated, Resumed
from millstream.groups.group import Group
from millstream.groups.processed_ids import ProcessedIds
from millstream.groups.stream import stream_info
from millstream.model import EntryId
from millstream.redis_client.client import Client

logger = logging.getLogger(__name__)

_WAITS_MS = (50.0, 1_000.0)
_LOG_EVERY_MS = 1000.0
_FIRST_CURSOR = b"0-0"


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """How a `Reader` reads.

    * `count`: entries of each stream in a read at most
    * `block_ms`: longest wait for new entries, in milliseconds; also how long a stop may take
    * `start`: where a group begins that this reader creates first: BEGINNING, END or an id
    * `heal`: where a lost group is recreated. "beginning" loses nothing and delivers all entries that the stream still
      has again. "last" goes on after the last entry this reader has read: entries that were pending with other
      consumers are not delivered again, unless those still process them. A callable gets the stream's name and returns
      the id to go on after: for callers that know what is committed.
    * `claim_after_ms`: claims entries that were pending with any consumer for so many milliseconds, checked twice in
      that time; None = never. Must be longer than the longest regular processing of a batch.
    * `noack`: entries count as acknowledged when they are delivered; entries in a lost reply stay lost

    Raises ConfigError for invalid options.
    """

    count: int = 100
    block_ms: int = 2_000
    start: Id = BEGINNING
    heal: Literal["beginning", "last"] | Callable[[str], Id] = "beginning"
    claim_after_ms: int | None = None
    noack: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or self.block_ms < 1:
            raise ConfigError("ReadPolicy: count and block_ms must be 1 or more")
        check_position("ReadPolicy: start", self.start, END)
        if self.heal not in ("beginning", "last") and not callable(self.heal):
            raise ConfigError(
                f'ReadPolicy: heal must be "beginning", "last", or a function that returns an id, not {self.heal!r}'
            )
        if self.claim_after_ms is not None and self.claim_after_ms < 1:
            raise ConfigError("ReadPolicy: claim_after_ms must be 1 or more, or None")
        if self.noack and self.claim_after_ms is not None:
            raise ConfigError(
                "ReadPolicy: with noack no entry is pending, so none can be claimed; choose noack or claim_after_ms"
            )


class Reader:
    """Reads `streams` as the consumer `consumer` of `group`, and creates the group, and streams, if they are missing.

    Iterating yields batches until `stop`; `read` takes one step. First come the entries that are pending with this
    consumer, then new ones and, by policy, claimed ones. Acknowledge a batch before reading the next, or name the
    entries still in flight by `excluding(stream, id)`, so that they are not returned twice after a lost connection.

    * `on_event`: called with each `Event`, in the thread that reads
    * `done`: stores on disk what was acknowledged through this reader; those entries are not returned again

    While Redis is unavailable the reader waits with back-off, 50 ms to 1 s, and logs at most one line a second. It
    reads over a connection of its own, and acknowledges over that of `client`. One thread may read; any may `ack` and
    `stop`. Raises WrongType, AccessDenied and CommandFailed, which waiting cannot repair.
    """

    def __init__(
        self,
        client: Client,
        *,
        group: str,
        consumer: str,
        streams: Sequence[str],
        policy: ReadPolicy = ReadPolicy(),
        on_event: Callable[[Event], None] = lambda event: None,
        excluding: Callable[[str, bytes], bool] | None = None,
        done: ProcessedIds | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client = client
        # A long poll must end before its socket times out.
        self._own_client = Client(client.url, timeout_ms=policy.block_ms + client.timeout_ms, clock=clock)
        self._consumer = Consumer(self._own_client, group=group, name=consumer, streams=streams)
        self._acks = Consumer(client, group=group, name=consumer, streams=streams)
        self._groups = {stream: Group(self._own_client, stream, group) for stream in streams}
        self._name = consumer
        self._policy = policy
        self._on_event = on_event
        self._excluding = excluding
        self._processed = done
        self._clock = clock
        self._stopped = threading.Event()
        self._opened = False
        self._last_ids: dict[str, Id] = {}
        self._reread_after: dict[str, Id] = {}
        self._claim_cursors: deque[tuple[str, bytes]] = deque()
        self._next_claim_ms = clock.monotonic_ms()
        self._backoff = Backoff(*_WAITS_MS, at_once=True)
        self._unavailable_since_ms: float | None = None
        self._last_error = ""
        self._log_interval = Every(_LOG_EVERY_MS)

    # Public methods

    def __iter__(self) -> Iterator[Batch]:
        while not self._stopped.is_set():
            yield from self.read()

    def read(self) -> list[Batch]:
        """Run one step, at most `block_ms` long while Redis answers: return batches; [] without entries to process."""
        try:
            try:
                batches = self._read_once()
            except GroupMissing as error:
                self._recreate_groups(error)
                return []
        except Unavailable as error:
            self._on_unavailable(error)
            return []
        self._end_outage()
        return batches

    def ack(self, stream: str, ids: Sequence[bytes]) -> int:
        """Acknowledge entries, as soon as Redis answers; return how many were pending.

        With a `done` file they are on disk before. Raises Unavailable only once the reader is stopped.
        """
        if self._processed is not None and ids:
            self._processed.add(stream, ids)
        what = f"consumer {self._name}"
        return self._client.retry_while_unavailable(
            lambda: self._acks.ack(stream, ids), what=what, give_up=self._stopped.is_set
        )

    def reread_pending(self) -> None:
        """Begin the next step with this consumer's own pending entries again, such as those that failed."""
        if not self._policy.noack:
            self._reread_after = dict.fromkeys(self._groups, BEGINNING)

    def stop(self) -> None:
        """End the iteration after the current step."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and close the reader's own connection."""
        self.stop()
        self._own_client.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A step

    def _read_once(self) -> list[Batch]:
        if not self._opened:
            self._open()
        if self._reread_after and (held := self._reread_pending()):
            return held
        if (claimed := self._claim_idle()) is not None:
            return [claimed]
        # While there is more to claim, do not block.
        block_ms = 0 if self._claim_cursors else self._policy.block_ms
        batches = self._consumer.read_new(count=self._policy.count, block_ms=block_ms, noack=self._policy.noack)
        self._backoff.reset()
        for batch in batches:
            self._last_ids[batch.stream] = batch.raw[-1][0]
        return (
            batches if self._processed is None else [kept for one in batches if (kept := self._filter_processed(one))]
        )

    def _open(self) -> None:
        for stream, group in self._groups.items():
            group.create(self._policy.start, mkstream=True)
            info = group.info()
            self._last_ids[stream] = info.last_delivered if info else BEGINNING
        self._opened = True
        self.reread_pending()

    def _reread_pending(self) -> list[Batch]:
        """Return the next page of this consumer's own pending entries; [] at their end."""
        while self._reread_after:
            kept = []
            for batch in self._consumer.read_pending(after=self._reread_after, count=self._policy.count):
                ends = [ids[-1] for ids in (batch.gone, batch.ids) if ids]
                if not ends:
                    del self._reread_after[batch.stream]
                    continue
                self._reread_after[batch.stream] = max(ends, key=EntryId.parse)
                if (wanted := self._filter_recovered(batch)) is not None:
                    kept.append(wanted)
            if kept:
                return kept
        return []

    def _claim_idle(self) -> Batch | None:
        """Claim the next page of entries that have been pending for too long, when a check is due."""
        after_ms, now_ms = self._policy.claim_after_ms, self._clock.monotonic_ms()
        if after_ms is None:
            return None
        if not self._claim_cursors and now_ms >= self._next_claim_ms:
            self._claim_cursors.extend((stream, _FIRST_CURSOR) for stream in self._groups)
            self._next_claim_ms = now_ms + after_ms / 2
        if not self._claim_cursors:
            return None
        stream, cursor = self._claim_cursors.popleft()
        pending = self._groups[stream].pending
        cursor, batch = pending.auto_claim_from(cursor, self._name, min_idle_ms=after_ms, count=self._policy.count)
        if cursor != _FIRST_CURSOR:
            self._claim_cursors.appendleft((stream, cursor))
        return self._filter_recovered(batch) if batch.raw or batch.gone else None

    # Filtering

    def _filter_recovered(self, batch: Batch) -> Batch | None:
        """Filter a batch that was delivered before; None if nothing is left for the caller."""
        if self._excluding is not None:
            is_held = self._excluding
            batch.raw = [entry for entry in batch.raw if not is_held(batch.stream, entry[0])]
            batch.gone = [one for one in batch.gone if not is_held(batch.stream, one)]
        if batch.gone:
            self._on_event(EntriesGone(stream=batch.stream, ids=batch.gone))
            self._log("%d pending entries of %s were trimmed or deleted: they are lost", len(batch.gone), batch.stream)
        kept = self._filter_processed(batch)
        if kept is not None:
            kept.delivery_counts = self._groups[kept.stream].pending.delivery_counts(kept.ids)
        return kept or (batch if batch.gone else None)

    def _filter_processed(self, batch: Batch) -> Batch | None:
        """Filter out entries that are processed already; None if nothing is left of the batch."""
        if self._processed is not None:
            done = self._processed
            repeated = [one for one in batch.ids if (batch.stream, one) in done]
            if repeated:
                self._consumer.ack(batch.stream, repeated)
                batch.raw = [entry for entry in batch.raw if (batch.stream, entry[0]) not in done]
                self._on_event(Repeated(stream=batch.stream, ids=repeated))
                self._log(
                    "Redis delivered %d processed entries of %s again; skipping them", len(repeated), batch.stream
                )
        return batch if batch.raw else None

    # Errors

    def _recreate_groups(self, cause: GroupMissing) -> None:
        if wait_ms := self._backoff.next_ms():
            self._clock.sleep_ms(wait_ms)
        for stream, group in self._groups.items():
            at = self._resume_id(stream)
            if group.create(at, mkstream=True):
                shown = at.decode() if isinstance(at, bytes) else str(at)
                self._on_event(GroupRecreated(stream=stream, group=group.name, at=shown, cause=str(cause)))
                self._log("group %s of %s was lost: %s; recreated after %s", group.name, stream, cause, shown)

    def _resume_id(self, stream: str) -> Id:
        """Return the id after which a lost group of `stream` goes on."""
        heal = self._policy.heal
        if callable(heal):
            return heal(stream)
        if heal == "beginning":
            return BEGINNING
        # A last id below ours means another stream: all of it is new.
        try:
            top = stream_info(self._own_client, stream).last_id
        except GroupMissing:
            return BEGINNING
        last = wire_id(self._last_ids.get(stream, BEGINNING))
        return last if EntryId.parse(top) >= EntryId.parse(last) else BEGINNING

    def _on_unavailable(self, error: Unavailable) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._unavailable_since_ms is None:
            self._unavailable_since_ms = now_ms
        self._last_error = str(error)
        self.reread_pending()
        waited_s = (now_ms - self._unavailable_since_ms) / 1000
        self._log("Redis is unavailable: %s; consumer %s waits, %.0f s so far", error, self._name, waited_s)
        # A lost group is recreated at once, but an outage waits from its first error on.
        self._clock.sleep_ms(self._backoff.next_ms() or self._backoff.next_ms())

    def _end_outage(self) -> None:
        if self._unavailable_since_ms is not None:
            away_ms = self._clock.monotonic_ms() - self._unavailable_since_ms
            self._unavailable_since_ms = None
            self._on_event(Resumed(away_ms=away_ms, cause=self._last_error))
            self._log("consumer %s resumes: Redis is available again after %.1f s", self._name, away_ms / 1000)

    def _log(self, message: str, *args: Any) -> None:
        if self._log_interval.is_due(self._clock.monotonic_ms()):
            logger.warning(message, *args)
