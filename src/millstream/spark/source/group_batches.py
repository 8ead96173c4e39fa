"""Batches: batches of a consumer group's entries in Redis, fetched by the driver, pending with one consumer a portion,
and acknowledged as a whole.

A batch has a number. The script that claims its entries also records their ids, so a run after a crash finds the same
batch. Epochs fence runs: on each stream, only the newest run that has used it may change a batch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from millstream.errors import CommandFailed, GroupMissing, StaleOwner
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import GroupBatchKeys, from_wire, to_wire
from millstream.redis_client.pipelining import call_all, server_time_us
from millstream.redis_client.resp import Command, Reply
from millstream.redis_client.scripts import Script

_CLAIM_IDLE_BATCH = Script("groups/claim_idle_batch")
_FILL_BATCH = Script("groups/fill_batch")
# Scripts that shrink the list of pending entries, or keep its size, must run at maxmemory.
_RENEW_BATCH = Script("groups/renew_batch", allow_oom=True)
_ACK_BATCH = Script("groups/ack_batch", allow_oom=True)

_CALLS_PER_TRIP = 500
_READ_COUNT = 10_000  # blocks Redis for about 3 ms
_CLAIM_COUNT = 500
_EPOCHS_OF_A_RUN = 1_000_000
SCAN_START = "0-0"
"""The cursor at the beginning, and at the end, of a scan of pending entries."""


class BatchRecord(NamedTuple):
    """The last batch of a stream, as recorded in Redis.

    * `token`, `batch`: its checkpoint and number
    * `step`, `size`: number of entries in a portion, and in the batch
    * `gone`: pending entries found missing from the stream, and not yet reported
    """

    token: str
    batch: int
    step: int
    size: int
    gone: int


class PendingCounts(NamedTuple):
    """Numbers of pending entries: with our consumer and in no batch, per portion of our batches, and with others."""

    ours: int
    portions: Mapping[str, int]
    others: int


class NotAcknowledged(NamedTuple):
    """Numbers of entries of a batch that other consumers have claimed, and that are no longer pending."""

    claimed: int
    not_pending: int


class BatchFill(NamedTuple):
    """Number of entries in a batch, and of entries found missing from the stream and not yet reported."""

    size: int
    gone: int


class Batches:
    """The batches of one run, which reads the group `group` of some streams as the consumer `consumer`.

    Entries in no batch are pending with `consumer`, portion n of a batch with `<consumer>:<n>`. Every method may be
    repeated; each raises RedisError, GroupMissing among them, and StaleOwner once a newer run has begun on the stream.
    """

    def __init__(self, client: Client, *, group: str, consumer: str) -> None:
        self._client = client
        self._group = group
        self._consumer = consumer
        self._portion = re.compile(f"{re.escape(consumer)}:[0-9]+")
        self._epoch = ""

    def keys(self, stream: str) -> GroupBatchKeys:
        """The keys of the batches of `stream`."""
        return GroupBatchKeys(stream, self._group, self._consumer)

    @property
    def epoch(self) -> str:
        """The epoch of this run, greater than those of earlier runs; "" until `begin`."""
        return self._epoch

    def begin(self, streams: Iterable[str]) -> None:
        """Become the newest run. Older runs are fenced stream by stream, once this one changes a batch there.

        A further call fences this run's own scripts whose replies were lost: they may still arrive. The run stays older
        than runs that have begun since.
        """
        if self._epoch:
            self._epoch = str(int(self._epoch) + 1)
            return
        commands = [("HGET", self.keys(stream).record, "epoch") for stream in streams]
        now_us = server_time_us(self._client)
        epochs = [int(reply or 0) for reply in call_all(self._client, commands)]
        # At least the server's time, so that a failover to a replica that missed the last epoch cannot repeat it.
        self._epoch = str(max([now_us, *(epoch + _EPOCHS_OF_A_RUN for epoch in epochs)]))

    # --- state in Redis ---

    def records(self, streams: Iterable[str]) -> dict[str, BatchRecord]:
        """The last batch of each stream that has one."""
        names = list(streams)
        fields = ("token", "batch", "step", "gone")
        replies = call_all(self._client, [("HMGET", self.keys(stream).record, *fields) for stream in names])
        known = {
            stream: (token.decode(), int(batch), int(step), int(gone or 0))
            for stream, (token, batch, step, gone) in zip(names, replies, strict=True)
            if token is not None
        }
        sizes = call_all(
            self._client, [("LLEN", self.keys(name).ids(token, number)) for name, (token, number, *_) in known.items()]
        )
        return {
            stream: BatchRecord(token, batch, step, size, gone)
            for (stream, (token, batch, step, gone)), size in zip(known.items(), sizes, strict=True)
        }

    def pending_counts(self, streams: Iterable[str]) -> dict[str, PendingCounts]:
        """Count the pending entries of each stream by owner."""
        names = list(streams)
        replies = call_all(self._client, [("XPENDING", stream, self._group) for stream in names])
        return {stream: self._parse_pending(reply) for stream, reply in zip(names, replies, strict=True)}

    def _parse_pending(self, summary: Reply) -> PendingCounts:
        ours, portions, others = 0, {}, 0
        for raw, count in summary[3] or ():
            name = from_wire(raw)
            if name == self._consumer:
                ours = int(count)
            elif self._portion.fullmatch(name):
                portions[name] = int(count)
            else:
                others += int(count)
        return PendingCounts(ours, portions, others)

    # --- building a batch ---

    def check_read_access(self, stream: str) -> None:
        """Raise AccessDenied if the user may not run XREADGROUP: fetching switches replies off and shows no error."""
        reply = self._client.pipeline([("XREADGROUP", "GROUP", f"{self._group}:none", "-", "STREAMS", stream, ">")])[0]
        if not isinstance(reply, CommandFailed | GroupMissing):
            raise_if_error(reply)

    def fetch(self, shares: Mapping[str, int]) -> dict[str, PendingCounts]:
        """Fetch up to so many new entries of each stream into the pending list; their fields stay in Redis."""
        pairs: list[tuple[Command, Command]] = []
        for stream, share in shares.items():
            counts = [_READ_COUNT] * (share // _READ_COUNT) + [share % _READ_COUNT] * (share % _READ_COUNT > 0)
            read = ("XREADGROUP", "GROUP", self._group, self._consumer, "COUNT")
            pairs += [((*read, count, "STREAMS", stream, ">"), ("XPENDING", stream, self._group)) for count in counts]
        pending: dict[str, PendingCounts] = {}
        for at in range(0, len(pairs), _CALLS_PER_TRIP):
            some = pairs[at : at + _CALLS_PER_TRIP]
            for (_, count_command), reply in zip(some, self._client.pipeline_skipping(some), strict=True):
                pending[str(count_command[1])] = self._parse_pending(raise_if_error(reply))
        return pending

    def claim_idle(self, stream: str, cursor: str, *, min_idle_ms: int, count: int) -> tuple[str, int, int]:
        """Claim a page of entries that were idle for `min_idle_ms`, `count` at most.

        Returns the next cursor, the number of claimed entries, and of entries found missing and not yet reported.
        """
        (reply,) = self._run(_CLAIM_IDLE_BATCH, {stream: (min_idle_ms, cursor, min(count, _CLAIM_COUNT))})
        return reply[0].decode(), reply[1], reply[2]

    def reclaim(self, pending: Mapping[str, PendingCounts]) -> None:
        """Claim back, for our consumer, the entries in portions of former batches."""
        for stream, counts in pending.items():
            for portion in counts.portions:
                while self._run(_RENEW_BATCH, {stream: (self._consumer, "-")}, consumer=portion)[0]:
                    pass

    def add(self, token: str, batch: int, sizes: Mapping[str, int], *, step: int) -> dict[str, BatchFill]:
        """Add up to so many of our pending entries of each stream to a batch, in portions of `step`."""
        fills: dict[str, BatchFill] = {}
        left = {stream: (token, batch, step, size) for stream, size in sizes.items()}
        while left:
            for stream, (size, more, gone) in zip(
                list(left), self._run(_FILL_BATCH, left, batch=(token, batch)), strict=True
            ):
                fills[stream] = BatchFill(size, gone)
                if not more or size >= sizes[stream]:
                    del left[stream]
        return fills

    # --- renewing, and acknowledging ---

    def renew(self, streams: Iterable[str]) -> None:
        """Reset the idle time of our pending entries, so that other consumers do not claim them.

        Raises GroupMissing, but only after all other streams are renewed.
        """
        missing: GroupMissing | None = None
        for stream in streams:
            try:
                self._renew_stream(stream)
            except GroupMissing as error:
                missing = missing or error
        if missing is not None:
            raise missing

    def _renew_stream(self, stream: str) -> None:
        for name in (self._consumer, *self.pending_counts([stream])[stream].portions):
            after = "-"
            while after:
                (last,) = self._run(_RENEW_BATCH, {stream: (name, after)}, consumer=name)
                after = f"({last.decode()}" if last else ""

    def acknowledge(self, token: str, batch: int, streams: Iterable[str]) -> dict[str, NotAcknowledged]:
        """Acknowledge a batch; return the numbers of entries on each stream that were no longer ours."""
        not_acknowledged = dict.fromkeys(streams, NotAcknowledged(0, 0))
        left: dict[str, Sequence[Any]] = dict.fromkeys(not_acknowledged, ())
        while left:
            for stream, (more, claimed, not_pending) in zip(
                list(left), self._run(_ACK_BATCH, left, batch=(token, batch)), strict=True
            ):
                not_acknowledged[stream] = NotAcknowledged(
                    not_acknowledged[stream].claimed + claimed, not_acknowledged[stream].not_pending + not_pending
                )
                if not more:
                    del left[stream]
        return not_acknowledged

    def delete_ids(self, records: Mapping[str, BatchRecord]) -> None:
        """Delete the recorded ids of batches that will not be read again."""
        call_all(
            self._client,
            [("UNLINK", self.keys(stream).ids(record.token, record.batch)) for stream, record in records.items()],
        )

    def clear_reported(self, gone: Mapping[str, int]) -> None:
        """Subtract missing entries that were reported to the user from the records."""
        call_all(
            self._client,
            [("HINCRBY", self.keys(stream).record, "gone", -count) for stream, count in gone.items() if count],
        )

    # --- calls ---

    def _run(
        self,
        script: Script,
        args: Mapping[str, Sequence[Any]],
        *,
        consumer: str = "",
        batch: tuple[str, int] | None = None,
    ) -> list[Reply]:
        """Run a script on each stream; return the replies in order."""
        common = (self._epoch, to_wire(self._group), consumer or self._consumer)
        calls = []
        for stream, rest in args.items():
            keys = self.keys(stream)
            ids = (keys.ids(*batch),) if batch else ()
            calls.append((script, (stream, keys.record, *ids), (*common, *rest)))
        try:
            return [
                reply
                for at in range(0, len(calls), _CALLS_PER_TRIP)
                for reply in self._client.scripts(calls[at : at + _CALLS_PER_TRIP])
            ]
        except CommandFailed as error:
            if error.code == "STALE":
                raise StaleOwner(
                    f"a newer run reads the group {self._group!r} as the consumer {self._consumer!r}; this one stops. "
                    "If they are two queries, give each a consumer name of its own"
                ) from error
            raise
