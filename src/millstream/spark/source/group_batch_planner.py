"""GroupBatchPlanner: plans, on the driver, the batches that a query reads from a consumer group that it shares.

A batch has two steps. First the query's consumer fetches new entries and claims idle ones of other consumers, so that
they are pending with it. Then they are added to a batch, whose ids Redis records in the same step. If the driver dies
between the steps, the next one finds all of them.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import CommandFailed, ConfigError, DataLoss, GroupMissing, Unavailable
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.spark.source.claim_renewal import ClaimRenewal
from millstream.spark.source.committed_offsets import CommittedOffsets
from millstream.spark.source.data_loss import LossPolicy
from millstream.spark.source.fair_shares import divide
from millstream.spark.source.group_batches import FIRST, Batches, PendingCounts
from millstream.spark.source.group_offsets import GroupOffset
from millstream.spark.source.group_partition_reader import GroupPartition
from millstream.spark.source.offset_ranges import Spread
from millstream.spark.source.options import Sharing, SourceOptions
from millstream.spark.source.progress_group import GroupPosition, group_positions
from millstream.spark.source.starting_offsets import StartingOffsets
from millstream.spark.source.stream_info import StreamInfo, fetch, fetch_calls
from millstream.spark.source.subscription import Subscription
from millstream.spark.source.trigger_delay import TriggerDelay

logger = logging.getLogger(__name__)


class GroupBatch(NamedTuple):
    """The end offset of a batch, and the longest time that it is still delayed, in milliseconds; 0 if it is not."""

    place: GroupOffset
    held_ms: float = 0.0


class GroupBatchPlanner:
    """Plans batches of `options.group`, fetched as `sharing.consumer` and spread over about `cores` tasks.

    Every method may be repeated: call them through `Client.patiently`. Each raises StaleOwner once a newer run uses the
    same consumer name, and DataLoss, with `failOnDataLoss`, for entries that are gone.
    """

    def __init__(
        self, client: Client, options: SourceOptions, sharing: Sharing, *, cores: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._client = client
        self._options = options
        self._sharing = sharing
        self._clock = clock
        limits = options.limits
        self._most = limits.per_trigger or 1
        self._spread = Spread(min_partitions=limits.min_partitions, max_records=limits.per_partition, cores=cores)
        self._subscription = Subscription(client, options.streams, options.pattern, clock=clock)
        losses = LossPolicy(fail=options.fail_on_data_loss)
        self._starts = StartingOffsets(client, options, CommittedOffsets(client, None, clock=clock), losses)
        self._holding = TriggerDelay(limits.least_per_trigger, limits.most_delay_ms, clock=clock)
        self._batches = Batches(client, group=options.group, consumer=sharing.consumer)
        self._keeper = ClaimRenewal(self._batches, idle_ms=sharing.adopt_after_ms)
        self._concluded: tuple[str, int] | None = None
        self._planned: GroupOffset | None = None
        self._looked = False
        self._begun = False
        self._sure = False
        self._token = ""
        self._cursors: dict[str, str] = {}
        self._sweep_due_ms = float("-inf")
        self._last_served = ""

    def close(self) -> None:
        """Stop renewing claims: once its entries are idle for long enough, other consumers may claim them."""
        self._keeper.close()

    def tails(self) -> dict[str, EntryId]:
        """The last id of each subscribed stream that exists."""
        infos = fetch(self._client, self._subscription.names())
        return {name: info.last for name, info in infos.items() if info is not None}

    # --- a batch ---

    def advance(self, start: GroupOffset, *, target: Mapping[str, EntryId] | None, may_delay: bool) -> GroupBatch:
        """Acknowledge the batch that ends at `start`, and plan the next one; an empty one ends at `start` itself.

        `target`: fetch new entries until the group has reached these ids. `may_delay`: a small batch may be delayed.
        """
        sure, self._sure = self._sure, False
        try:
            planned = self._advance(start, target, may_delay, sure)
        except Unavailable:
            self._begun = False
            raise
        except GroupMissing as error:
            self._begun = False
            raise Unavailable(f"{error}; planning again") from error
        self._sure = planned.place == start  # else a repeated call from Spark must return the same batch
        return planned

    def _advance(
        self, start: GroupOffset, target: Mapping[str, EntryId] | None, may_delay: bool, sure: bool
    ) -> GroupBatch:
        infos = self._look(start)
        positions = group_positions(self._client, self._options.group, (name for name, info in infos.items() if info))
        self._begin(positions)
        self._conclude(start, positions)
        positions |= self._join(start, infos, positions)
        known = dict.fromkeys(positions, 0)
        token, number = start.token or self._token, start.batch + 1
        pending = self._batches.held(name for name, position in positions.items() if position.pending)
        if not sure:
            if recovered := self._recover(token, number, positions, pending):
                return GroupBatch(GroupOffset(token, number, known | recovered))
            pending = self._batches.held(pending)
        own = {name: counts.ours for name, counts in pending.items() if counts.ours}
        backlogs = self._waiting(infos, positions, target)
        delay_ms = self._holding.left_ms(sum(backlogs.values())) if may_delay and not own else 0.0
        if delay_ms:
            return GroupBatch(start, delay_ms)
        self._adopt(pending, own)
        self._draw(backlogs, own)
        end = GroupOffset(token, number, known | self._fill(token, number, own))
        if end.filled:
            self._planned = end
            self._holding.began()
        return GroupBatch(end if end.filled or known.keys() != start.taken.keys() else start)

    def _look(self, start: GroupOffset) -> dict[str, StreamInfo | None]:
        """Fetch the info of the subscribed streams, and of those in `start` that a pattern no longer finds: None."""
        names = self._subscription.names()
        infos = fetch(self._client, names)
        if self._subscription.pattern is not None and (others := start.taken.keys() - infos.keys()):
            infos |= {name: info for name, info in fetch(self._client, others).items() if info is None}
        return infos

    def _conclude(self, start: GroupOffset, streams: Iterable[str]) -> None:
        """Acknowledge the batch that the sink has committed."""
        if self._concluded == (start.token, start.batch):
            return
        self._keeper.hold(())
        ours = start.filled.keys() & set(streams)
        for stream, not_ours in self._batches.acknowledge(start.token, start.batch, ours).items():
            if not_ours.others or not_ours.settled:
                logger.warning(
                    "of the %d entries of %s in batch %d, %d were claimed by other consumers and %d were no longer "
                    "pending: they may be processed twice. adoptAfter is for entries of dead consumers: set the idle "
                    "time of all consumers of the group longer than a batch, or a restart, takes",
                    start.taken[stream], stream, start.batch, not_ours.others, not_ours.settled,
                )  # fmt: skip
        self._concluded = (start.token, start.batch)

    def _begin(self, streams: Iterable[str]) -> None:
        if not self._begun:
            self._batches.begin(streams)
            self._token = self._token or self._batches.epoch
            self._begun = True

    # --- groups ---

    def _join(
        self, start: GroupOffset, infos: Mapping[str, StreamInfo | None], positions: Mapping[str, GroupPosition]
    ) -> dict[str, GroupPosition]:
        """Create the group on the streams that do not have it."""
        missing = {name: info for name, info in infos.items() if name not in positions}
        for name in missing.keys() & start.taken.keys():
            self._lose(
                f"the group {self._options.group!r} of stream {name!r} is gone, or the whole stream, and with it the "
                "pending entries and the last delivered id",
                "the query then reads the stream from its beginning",
            )
        new = {name: info for name, info in missing.items() if info is not None}
        if self._looked or start.token:
            starts = {name: info.earliest() for name, info in new.items()}
        else:
            starts = self._starts.of(new, "latest")
        group = self._options.group
        replies = fetch_calls(
            self._client,
            [
                ("XGROUP", "CREATE", name, group, str(at.id), *(() if at.added is None else ("ENTRIESREAD", at.added)))
                for name, at in starts.items()
            ],
        )
        for reply in replies:
            if not (isinstance(reply, CommandFailed) and reply.code == "BUSYGROUP"):
                raise_if_error(reply)
        if not self._looked and (names := [*positions, *starts]):
            self._batches.may_read(names[0])
        self._looked = True
        return {name: GroupPosition(at, 0) for name, at in starts.items()}

    def _recover(
        self, token: str, number: int, streams: Iterable[str], pending: Mapping[str, PendingCounts]
    ) -> dict[str, int]:
        """Return the sizes of this batch if a restart or error interrupted it; reclaim entries of other batches."""
        records = self._batches.records(streams)
        self._tell({name: one.gone for name, one in records.items()})
        ours = {name: one for name, one in records.items() if (one.token, one.batch) == (token, number)}
        foreign = {name: one for name, one in records.items() if one.size and name not in ours}
        if foreign:
            logger.warning(
                "%d entries belong to batches of another checkpoint that used the consumer %r, or to a first batch "
                "that was never checkpointed, and are not acknowledged; reading them again",
                sum(one.size for one in foreign.values()),
                self._sharing.consumer,
            )
        begun = [name for name, one in ours.items() if one.size]
        self._batches.recall({name: one for name, one in pending.items() if name not in begun})
        self._batches.forget(foreign)
        # The renewal fences older runs, and calls whose reply was lost: from here on neither adds to the batch.
        self._batches.keep(begun)
        return {name: one.size for name, one in self._batches.records(begun).items()}

    # --- fetching ---

    def _waiting(
        self,
        infos: Mapping[str, StreamInfo | None],
        positions: Mapping[str, GroupPosition],
        target: Mapping[str, EntryId] | None,
    ) -> dict[str, int]:
        """Estimate the number of entries of each stream that the group has not delivered yet."""
        backlogs = {}
        for name, position in positions.items():
            info, at = infos[name], position.at
            if info is None or at.id >= info.last or (target is not None and at.id >= target.get(name, at.id)):
                continue
            lag = 0 if at.added is None else info.added - at.added
            backlogs[name] = max(1, min(lag, info.length) if lag > 0 else info.length)
        return backlogs

    def _adopt(self, pending: Mapping[str, PendingCounts], own: dict[str, int]) -> None:
        """Claim idle entries of other consumers while the batch has room, with two scans in every `adoptAfter`."""
        # A scan continues from batch to batch; a stream may be deleted meanwhile.
        self._cursors = {name: cursor for name, cursor in self._cursors.items() if name in pending}
        now_ms = self._clock.monotonic_ms()
        if not self._cursors and now_ms >= self._sweep_due_ms:
            self._cursors = {name: FIRST for name, counts in pending.items() if counts.others}
            self._sweep_due_ms = now_ms + self._sharing.adopt_after_ms / 2
        while self._cursors and (room := self._most - sum(own.values())) > 0:
            name, cursor = next(iter(self._cursors.items()))
            next_cursor, count, gone = self._batches.adopt(
                name, cursor, min_idle_ms=self._sharing.adopt_after_ms, count=room
            )
            self._cursors[name] = next_cursor
            if next_cursor == FIRST:
                del self._cursors[name]
            if count:
                own[name] = own.get(name, 0) + count
                logger.info("claimed %d idle entries of %s from other consumers", count, name)
            self._tell({name: gone})

    def _draw(self, backlogs: Mapping[str, int], own: dict[str, int]) -> None:
        """Fetch new entries while the batch has room, divided among the streams by their backlogs."""
        room = self._most - sum(own.values())
        if not backlogs or room <= 0:
            return
        shares = divide(backlogs, room, self._last_served)
        self._last_served = list(shares)[-1] if len(shares) < len(backlogs) else ""
        own.update({name: counts.ours for name, counts in self._batches.draw(shares).items()})

    def _fill(self, token: str, number: int, own: Mapping[str, int]) -> dict[str, int]:
        """Add the query's pending entries to a batch."""
        sizes = divide({name: count for name, count in own.items() if count}, self._most)
        if not sizes:
            return {}
        step = self._spread.target(sum(sizes.values()))
        fills = self._batches.fill(token, number, sizes, step=step)
        self._tell({name: fill.gone for name, fill in fills.items()})
        return {name: fill.size for name, fill in fills.items() if fill.size}

    # --- the tasks of a batch ---

    def tasks(self, start: GroupOffset, end: GroupOffset) -> list[list[GroupPartition]]:
        """Plan the tasks of the batch from `start` to `end`; its claims are renewed until it is acknowledged."""
        if end.batch == start.batch or not end.filled:
            return []
        if end.batch != start.batch + 1:
            raise ConfigError(
                f"Spark asks for the batches {start.batch + 1} to {end.batch} at once, of which all but the last are "
                "acknowledged. readAs=group needs each batch in the checkpoint: remove asyncProgressTrackingEnabled"
            )
        if end != self._planned:
            self._resume(end)
        records = self._batches.records(end.filled)
        portions: list[GroupPartition] = []
        for name, count in end.filled.items():
            record = records.get(name)
            size = record.size if record is not None and (record.token, record.batch) == (end.token, end.batch) else 0
            if size != count:
                self._lose(
                    f"Redis has lost the ids of {count - size:,} of the {count:,} entries that batch {end.batch} has "
                    f"of stream {name!r}: it lost its last writes, its keys were deleted, or another checkpoint now "
                    f"uses the consumer {self._sharing.consumer!r}",
                    "the batch has the entries that are left; the group delivers the others again",
                )
            if record is not None:
                ids = self._batches.keys(name).ids(end.token, end.batch)
                portions += [
                    GroupPartition(name, at, min(record.step, size - at), ids) for at in range(0, size, record.step)
                ]
        self._keeper.hold(end.filled)
        return _pack(portions, self._spread.target(max(1, sum(portion.size for portion in portions))))

    def _resume(self, end: GroupOffset) -> None:
        """Resume a batch that an earlier run has planned: its claims have not been renewed since."""
        self._begin(end.filled)
        try:
            self._batches.keep(end.filled)
        except GroupMissing as error:
            logger.warning("cannot renew the claims on a stream: %s", error)

    # --- losses ---

    def _tell(self, gone: Mapping[str, int]) -> None:
        for name, count in gone.items():
            if count:
                self._lose(
                    f"{count:,} pending entries of stream {name!r} were trimmed or deleted before they were read",
                    "they are lost",
                )
        self._batches.told(gone)

    def _lose(self, what: str, consequence: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(f"{what}. To go on ({consequence}) set failOnDataLoss=false, which logs the loss")
        logger.warning("%s; %s", what, consequence)


def _pack(portions: Iterable[GroupPartition], max_size: int) -> list[list[GroupPartition]]:
    """Pack portions into tasks of at most `max_size` entries: one portion of about that size, or several small ones."""
    tasks: list[list[GroupPartition]] = []
    room = 0
    for portion in sorted(portions, key=lambda portion: (-portion.size, portion.stream, portion.after)):
        if portion.size > room:
            tasks.append([])
            room = max_size
        tasks[-1].append(portion)
        room -= portion.size
    return tasks
