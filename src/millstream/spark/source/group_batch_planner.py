"""GroupBatchPlanner: plans, on the driver, the batches that a query reads from a consumer group that it shares.

A batch has two steps. First the query's consumer fetches new entries and claims idle ones of other consumers, so that
they are pending with it. Then they are added to a batch, whose ids Redis records in the same step. If the driver dies
between the steps, the next one finds all of them.
"""

import logging
from collections.abc import Iterable, Mapping

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import CommandFailed, ConfigError, GroupMissing, Unavailable
from millstream.redis_client.client import Client, raise_if_error
from millstream.spark.source.batch_limits import Advance, BatchLimits, NoAdvance
from millstream.spark.source.claim_renewal import ClaimRenewal
from millstream.spark.source.committed_offsets import CommittedOffsets
from millstream.spark.source.data_loss import LossPolicy, report_loss
from millstream.spark.source.fair_shares import Rotation, divide
from millstream.spark.source.group_batches import SCAN_START, Batches, PendingCounts
from millstream.spark.source.group_offsets import GroupOffset
from millstream.spark.source.group_partition_reader import GroupPartition
from millstream.spark.source.offset_ranges import TaskSizing
from millstream.spark.source.offsets import Positions
from millstream.spark.source.options import Sharing, SourceOptions
from millstream.spark.source.progress_group import GroupPosition, group_positions
from millstream.spark.source.starting_offsets import StartingOffsets
from millstream.spark.source.stream_info import StreamInfo, fetch, fetch_calls
from millstream.spark.source.subscription import Subscription
from millstream.spark.source.trigger_delay import TriggerDelay

logger = logging.getLogger(__name__)


class GroupBatchPlanner:
    """Plans batches of `sharing.group`, fetched as `sharing.consumer` and spread over about `cores` tasks.

    Every method may be repeated: call them through `Client.retry_while_unavailable`. Each raises StaleOwner once a
    newer run uses the same consumer name, and DataLoss, with `failOnDataLoss`, for entries that are gone.
    """

    def __init__(
        self, client: Client, options: SourceOptions, sharing: Sharing, *, cores: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._client = client
        self._options = options
        self._sharing = sharing
        self._clock = clock
        limits = options.limits
        self._task_sizing = TaskSizing(
            min_partitions=limits.min_partitions, max_records=limits.max_per_partition, cores=cores
        )
        self._subscription = Subscription(client, options.streams, options.pattern, clock=clock)
        losses = LossPolicy(fail=options.fail_on_data_loss)
        self._starting = StartingOffsets(client, options, CommittedOffsets(client, None, clock=clock), losses)
        self._trigger_delay = TriggerDelay(limits.min_per_trigger, limits.max_delay_ms, clock=clock)
        self._batches = Batches(client, group=sharing.group, consumer=sharing.consumer)
        self._claim_renewal = ClaimRenewal(self._batches, idle_ms=sharing.claim_idle_ms)
        self._acknowledged: tuple[str, int] | None = None
        self._planned: GroupOffset | None = None
        self._groups_checked = False
        self._run_begun = False
        self._nothing_to_recover = False
        self._token = ""
        self._cursors: dict[str, str] = {}
        self._scan_due_ms = float("-inf")
        self._rotation = Rotation()

    def close(self) -> None:
        """Stop renewing claims: once its entries are idle for long enough, other consumers may claim them."""
        self._claim_renewal.close()

    def latest_offsets(self) -> Positions:
        """The newest entry of each subscribed stream that exists."""
        infos = fetch(self._client, self._subscription.names())
        return {name: info.tail for name, info in infos.items() if info is not None}

    # --- a batch ---

    def plan_next(self, start: GroupOffset, limits: BatchLimits) -> Advance[GroupOffset] | NoAdvance:
        """Acknowledge the batch that ends at `start`, and plan the next one.

        New entries are fetched until the group has reached `limits.target`.
        """
        sure, self._nothing_to_recover = self._nothing_to_recover, False
        try:
            planned = self._plan_next(start, limits, sure)
        except Unavailable:
            self._run_begun = False
            raise
        except GroupMissing as error:
            self._run_begun = False
            raise Unavailable(f"{error}; planning again") from error
        # A repeated call from Spark must return the same batch.
        self._nothing_to_recover = isinstance(planned, NoAdvance)
        return planned

    def _plan_next(self, start: GroupOffset, limits: BatchLimits, sure: bool) -> Advance[GroupOffset] | NoAdvance:
        infos = self._fetch_infos(start)
        positions = group_positions(self._client, self._sharing.group, (name for name, info in infos.items() if info))
        self._begin_run(positions)
        self._acknowledge(start, positions)
        positions |= self._create_groups(start, infos, positions)
        known = dict.fromkeys(positions, 0)
        token, number = start.token or self._token, start.batch + 1
        pending = self._batches.pending_counts(name for name, position in positions.items() if position.pending)
        if not sure:
            if recovered := self._recover_batch(token, number, positions, pending):
                return _advance(GroupOffset(token, number, known | recovered))
            pending = self._batches.pending_counts(pending)
        own = {name: counts.ours for name, counts in pending.items() if counts.ours}
        backlogs = self._backlogs(infos, positions, limits.target)
        delay_ms = self._trigger_delay.remaining_ms(sum(backlogs.values())) if limits.may_delay and not own else 0.0
        if delay_ms:
            return NoAdvance(delay_ms)
        max_entries = limits.max_entries
        assert max_entries is not None, "what is fetched stays pending, so readAs=group always has a limit"
        self._claim_idle(pending, own, max_entries)
        self._fetch_new(backlogs, own, max_entries)
        end = GroupOffset(token, number, known | self._add_to_batch(token, number, own, max_entries))
        if end.non_empty:
            self._planned = end
            self._trigger_delay.on_batch()
        return _advance(end) if end.non_empty or known.keys() != start.counts.keys() else NoAdvance()

    def _fetch_infos(self, start: GroupOffset) -> dict[str, StreamInfo | None]:
        """Fetch the info of the subscribed streams, and of those in `start` that a pattern no longer finds: None."""
        names = self._subscription.names()
        infos = fetch(self._client, names)
        if self._subscription.pattern is not None and (others := start.counts.keys() - infos.keys()):
            infos |= {name: info for name, info in fetch(self._client, others).items() if info is None}
        return infos

    def _acknowledge(self, start: GroupOffset, streams: Iterable[str]) -> None:
        """Acknowledge the batch that the sink has committed."""
        if self._acknowledged == (start.token, start.batch):
            return
        self._claim_renewal.set_streams(())
        ours = start.non_empty.keys() & set(streams)
        for stream, not_acknowledged in self._batches.acknowledge(start.token, start.batch, ours).items():
            if not_acknowledged.claimed or not_acknowledged.not_pending:
                logger.warning(
                    "of the %d entries of %s in batch %d, %d were claimed by other consumers and %d were no longer "
                    "pending: they may be processed twice. claimAfter is for entries of dead consumers: set the idle "
                    "time of all consumers of the group longer than a batch, or a restart, takes",
                    start.counts[stream],
                    stream,
                    start.batch,
                    not_acknowledged.claimed,
                    not_acknowledged.not_pending,
                )
        self._acknowledged = (start.token, start.batch)

    def _begin_run(self, streams: Iterable[str]) -> None:
        if not self._run_begun:
            self._batches.begin(streams)
            self._token = self._token or self._batches.epoch
            self._run_begun = True

    # --- groups ---

    def _create_groups(
        self, start: GroupOffset, infos: Mapping[str, StreamInfo | None], positions: Mapping[str, GroupPosition]
    ) -> dict[str, GroupPosition]:
        """Create the group on the streams that do not have it."""
        missing = {name: info for name, info in infos.items() if name not in positions}
        for name in missing.keys() & start.counts.keys():
            report_loss(
                f"the group {self._sharing.group!r} of stream {name!r} is gone, or the whole stream, and with it the "
                "pending entries and the last delivered id",
                fail=self._options.fail_on_data_loss,
                then="the query then reads the stream from its beginning",
            )
        new = {name: info for name, info in missing.items() if info is not None}
        starts: Positions
        if self._groups_checked or start.token:
            starts = {name: info.earliest_position() for name, info in new.items()}
        else:
            starts = self._starting.resolve(new, "latest")
        group = self._sharing.group
        replies = fetch_calls(
            self._client,
            [
                (
                    "XGROUP",
                    "CREATE",
                    name,
                    group,
                    str(at.id),
                    *(() if at.entries_added is None else ("ENTRIESREAD", at.entries_added)),
                )
                for name, at in starts.items()
            ],
        )
        for reply in replies:
            if not (isinstance(reply, CommandFailed) and reply.code == "BUSYGROUP"):
                raise_if_error(reply)
        if not self._groups_checked and (names := [*positions, *starts]):
            self._batches.check_read_access(names[0])
        self._groups_checked = True
        return {name: GroupPosition(at, 0) for name, at in starts.items()}

    def _recover_batch(
        self, token: str, number: int, streams: Iterable[str], pending: Mapping[str, PendingCounts]
    ) -> dict[str, int]:
        """Return the sizes of this batch if a restart or error interrupted it; reclaim entries of other batches."""
        records = self._batches.records(streams)
        self._report_gone({name: one.gone for name, one in records.items()})
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
        self._batches.reclaim({name: one for name, one in pending.items() if name not in begun})
        self._batches.delete_ids(foreign)
        # The renewal fences older runs, and calls whose reply was lost: from here on neither adds to the batch.
        self._batches.renew(begun)
        return {name: one.size for name, one in self._batches.records(begun).items()}

    # --- fetching ---

    def _backlogs(
        self,
        infos: Mapping[str, StreamInfo | None],
        positions: Mapping[str, GroupPosition],
        target: Positions | None,
    ) -> dict[str, int]:
        """Estimate the number of entries of each stream that the group has not delivered yet."""
        backlogs = {}
        for name, position in positions.items():
            info, at = infos[name], position.position
            if info is None or at.id >= info.last_id or (target is not None and at.id >= target.get(name, at).id):
                continue
            lag = 0 if at.entries_added is None else info.entries_added - at.entries_added
            backlogs[name] = max(1, min(lag, info.length) if lag > 0 else info.length)
        return backlogs

    def _claim_idle(self, pending: Mapping[str, PendingCounts], own: dict[str, int], max_entries: int) -> None:
        """Claim idle entries of other consumers while the batch has room, with two scans in every `claimAfter`."""
        # A scan continues from batch to batch; a stream may be deleted meanwhile.
        self._cursors = {name: cursor for name, cursor in self._cursors.items() if name in pending}
        now_ms = self._clock.monotonic_ms()
        if not self._cursors and now_ms >= self._scan_due_ms:
            self._cursors = {name: SCAN_START for name, counts in pending.items() if counts.others}
            self._scan_due_ms = now_ms + self._sharing.claim_idle_ms / 2
        while self._cursors and (room := max_entries - sum(own.values())) > 0:
            name, cursor = next(iter(self._cursors.items()))
            next_cursor, count, gone = self._batches.claim_idle(
                name, cursor, min_idle_ms=self._sharing.claim_idle_ms, count=room
            )
            self._cursors[name] = next_cursor
            if next_cursor == SCAN_START:
                del self._cursors[name]
            if count:
                own[name] = own.get(name, 0) + count
                logger.info("claimed %d idle entries of %s from other consumers", count, name)
            self._report_gone({name: gone})

    def _fetch_new(self, backlogs: Mapping[str, int], own: dict[str, int], max_entries: int) -> None:
        """Fetch new entries while the batch has room, divided among the streams by their backlogs."""
        room = max_entries - sum(own.values())
        if not backlogs or room <= 0:
            return
        shares = self._rotation.divide(backlogs, room)
        own.update({name: counts.ours for name, counts in self._batches.fetch(shares).items()})

    def _add_to_batch(self, token: str, number: int, own: Mapping[str, int], max_entries: int) -> dict[str, int]:
        """Add the query's pending entries to a batch."""
        sizes = divide({name: count for name, count in own.items() if count}, max_entries)
        if not sizes:
            return {}
        step = self._task_sizing.task_size(sum(sizes.values()))
        fills = self._batches.add(token, number, sizes, step=step)
        self._report_gone({name: fill.gone for name, fill in fills.items()})
        return {name: fill.size for name, fill in fills.items() if fill.size}

    # --- the tasks of a batch ---

    def plan_tasks(self, start: GroupOffset, end: GroupOffset) -> list[list[GroupPartition]]:
        """Plan the tasks of the batch from `start` to `end`; its claims are renewed until it is acknowledged."""
        if end.batch == start.batch or not end.non_empty:
            return []
        if end.batch != start.batch + 1:
            raise ConfigError(
                f"Spark asks for the batches {start.batch + 1} to {end.batch} at once, of which all but the last are "
                "acknowledged. readAs=group needs each batch in the checkpoint: remove asyncProgressTrackingEnabled"
            )
        if end != self._planned:
            self._resume_batch(end)
        records = self._batches.records(end.non_empty)
        portions: list[GroupPartition] = []
        for name, count in end.non_empty.items():
            record = records.get(name)
            size = record.size if record is not None and (record.token, record.batch) == (end.token, end.batch) else 0
            if size != count:
                report_loss(
                    f"Redis has lost the ids of {count - size:,} of the {count:,} entries that batch {end.batch} has "
                    f"of stream {name!r}: it lost its last writes, its keys were deleted, or another checkpoint now "
                    f"uses the consumer {self._sharing.consumer!r}",
                    fail=self._options.fail_on_data_loss,
                    then="the batch has the entries that are left; the group delivers the others again",
                )
            if record is not None:
                ids = self._batches.keys(name).ids(end.token, end.batch)
                portions += [
                    GroupPartition(name, at, min(record.step, size - at), ids) for at in range(0, size, record.step)
                ]
        self._claim_renewal.set_streams(end.non_empty)
        return _pack(portions, self._task_sizing.task_size(max(1, sum(portion.size for portion in portions))))

    def _resume_batch(self, end: GroupOffset) -> None:
        """Resume a batch that an earlier run has planned: its claims have not been renewed since."""
        self._begin_run(end.non_empty)
        try:
            self._batches.renew(end.non_empty)
        except GroupMissing as error:
            logger.warning("cannot renew the claims on a stream: %s", error)

    # --- losses ---

    def _report_gone(self, gone: Mapping[str, int]) -> None:
        for name, count in gone.items():
            if count:
                report_loss(
                    f"{count:,} pending entries of stream {name!r} were trimmed or deleted before they were read",
                    fail=self._options.fail_on_data_loss,
                    then="they are lost",
                )
        self._batches.clear_reported(gone)


def _pack(portions: Iterable[GroupPartition], max_size: int) -> list[list[GroupPartition]]:
    """Pack portions into tasks of at most `max_size` entries: one portion of about that size, or several small ones."""
    tasks: list[list[GroupPartition]] = []
    room = 0
    for portion in sorted(portions, key=lambda portion: (-portion.size, portion.stream, portion.first_index)):
        if portion.size > room:
            tasks.append([])
            room = max_size
        tasks[-1].append(portion)
        room -= portion.size
    return tasks


def _advance(end: GroupOffset) -> Advance[GroupOffset]:
    return Advance(end, sum(end.counts.values()))
