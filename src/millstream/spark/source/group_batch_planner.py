"""Decides, on the driver, what a query takes from a consumer group that it shares with others, and which task reads what.

Taking has two steps. First the query's consumer becomes the holder of entries: of new ones, and of those that others have
held for too long. Then they are put into a batch, whose ids Redis notes in the same step. A driver that dies in between
leaves nothing that the next one does not find.
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
    """Where a batch ends, and how much longer it is held back at most, if it is."""

    place: GroupOffset
    held_ms: float = 0.0


class GroupBatchPlanner:
    """Takes batches from `options.group` as `sharing.consumer`, spread over `cores` or more tasks.

    Every method may be repeated: call them through `Client.patiently`. Each raises StaleOwner once a newer run takes under
    the same name, and DataLoss, if told to, for entries that are gone.
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
        """Keep nothing any more: after a while others may take it over."""
        self._keeper.close()

    def tails(self) -> dict[str, EntryId]:
        """The id of the newest entry of each subscribed stream."""
        facts = fetch(self._client, self._subscription.names())
        return {name: fact.last for name, fact in facts.items() if fact is not None}

    # --- a batch ---

    def advance(self, start: GroupOffset, *, target: Mapping[str, EntryId] | None, hold: bool) -> GroupBatch:
        """Acknowledge the batch that ends at `start`, and take the next one; `start` itself if there is nothing.

        `target`: new entries are taken until the group has reached these ids. `hold`: a small batch may wait.
        """
        sure, self._sure = self._sure, False
        try:
            taken = self._advance(start, target, hold, sure)
        except Unavailable:
            self._begun = False
            raise
        except GroupMissing as error:
            self._begun = False
            raise Unavailable(f"{error}; it is planned again") from error
        self._sure = taken.place == start  # else, should Spark ask once more, the answer is the same
        return taken

    def _advance(self, start: GroupOffset, target: Mapping[str, EntryId] | None, hold: bool, sure: bool) -> GroupBatch:
        facts = self._look(start)
        standing = group_positions(self._client, self._options.group, (name for name, fact in facts.items() if fact))
        self._begin(standing)
        self._conclude(start, standing)
        standing |= self._join(start, facts, standing)
        known = dict.fromkeys(standing, 0)
        token, number = start.token or self._token, start.batch + 1
        held = self._batches.held(name for name, at in standing.items() if at.pending)
        if not sure:
            if found := self._recover(token, number, standing, held):
                return GroupBatch(GroupOffset(token, number, known | found))
            held = self._batches.held(held)
        inbox = {name: one.ours for name, one in held.items() if one.ours}
        waiting = self._waiting(facts, standing, target)
        held_ms = self._holding.left_ms(sum(waiting.values())) if hold and not inbox else 0.0
        if held_ms:
            return GroupBatch(start, held_ms)
        self._adopt(held, inbox)
        self._draw(waiting, inbox)
        place = GroupOffset(token, number, known | self._fill(token, number, inbox))
        if place.filled:
            self._planned = place
            self._holding.began()
        return GroupBatch(place if place.filled or known.keys() != start.taken.keys() else start)

    def _look(self, start: GroupOffset) -> dict[str, StreamInfo | None]:
        """The facts of the subscribed streams, and of those that a pattern does not find any more as they are deleted."""
        names = self._subscription.names()
        facts = fetch(self._client, names)
        if self._subscription.pattern is not None and (others := start.taken.keys() - facts.keys()):
            facts |= {name: fact for name, fact in fetch(self._client, others).items() if fact is None}
        return facts

    def _conclude(self, start: GroupOffset, standing: Iterable[str]) -> None:
        """Acknowledge what the sink has committed."""
        if self._concluded == (start.token, start.batch):
            return
        self._keeper.hold(())
        ours = start.filled.keys() & set(standing)
        for stream, strangers in self._batches.acknowledge(start.token, start.batch, ours).items():
            if strangers.others or strangers.settled:
                logger.warning(
                    "of the %d entries of %s in batch %d, %d had been taken over by other consumers and %d were not "
                    "pending any more: those may be processed twice. adoptAfter is for entries of dead consumers only: "
                    "let all consumers of the group wait longer than a batch, or a restart, takes",
                    start.taken[stream], stream, start.batch, strangers.others, strangers.settled,
                )  # fmt: skip
        self._concluded = (start.token, start.batch)

    def _begin(self, streams: Iterable[str]) -> None:
        if not self._begun:
            self._batches.begin(streams)
            self._token = self._token or self._batches.epoch
            self._begun = True

    # --- groups ---

    def _join(
        self, start: GroupOffset, facts: Mapping[str, StreamInfo | None], standing: Mapping[str, GroupPosition]
    ) -> dict[str, GroupPosition]:
        """Make the group where it is missing."""
        missing = {name: fact for name, fact in facts.items() if name not in standing}
        for name in missing.keys() & start.taken.keys():
            self._lose(
                f"the group {self._options.group!r} of stream {name!r} is gone, or the whole stream: what was pending, "
                "and how far the group had come, is not known any more",
                "what the stream has is taken from its beginning",
            )
        new = {name: fact for name, fact in missing.items() if fact is not None}
        if self._looked or start.token:
            places = {name: fact.earliest() for name, fact in new.items()}
        else:
            places = self._starts.of(new, "latest")
        group = self._options.group
        made = fetch_calls(
            self._client,
            [
                ("XGROUP", "CREATE", name, group, str(at.id), *(() if at.added is None else ("ENTRIESREAD", at.added)))
                for name, at in places.items()
            ],
        )
        for reply in made:
            if not (isinstance(reply, CommandFailed) and reply.code == "BUSYGROUP"):
                raise_if_error(reply)
        if not self._looked and (names := [*standing, *places]):
            self._batches.may_read(names[0])
        self._looked = True
        return {name: GroupPosition(at, 0) for name, at in places.items()}

    def _recover(
        self, token: str, number: int, standing: Iterable[str], held: Mapping[str, PendingCounts]
    ) -> dict[str, int]:
        """What a run before this one, or before an error, has put into this batch already; take back what else it had."""
        records = self._batches.records(standing)
        self._tell({name: one.gone for name, one in records.items()})
        ours = {name: one for name, one in records.items() if (one.token, one.batch) == (token, number)}
        left = {name: one for name, one in records.items() if one.size and name not in ours}
        if left:
            logger.warning(
                "%d entries were put into batches of another checkpoint that took as the consumer %r, or into a first "
                "batch that came into none, and are not acknowledged: they are taken again",
                sum(one.size for one in left.values()),
                self._sharing.consumer,
            )
        ready = [name for name, one in ours.items() if one.size]
        self._batches.recall({name: one for name, one in held.items() if name not in ready})
        self._batches.forget(left)
        # From here on nobody adds to the batch: neither an older run nor a call that had no answer.
        self._batches.keep(ready)
        return {name: one.size for name, one in self._batches.records(ready).items()}

    # --- taking ---

    def _waiting(
        self,
        facts: Mapping[str, StreamInfo | None],
        standing: Mapping[str, GroupPosition],
        target: Mapping[str, EntryId] | None,
    ) -> dict[str, int]:
        """About how many entries of each stream nobody was given yet."""
        waiting = {}
        for name, one in standing.items():
            fact, at = facts[name], one.at
            if fact is None or at.id >= fact.last or (target is not None and at.id >= target.get(name, at.id)):
                continue
            lag = 0 if at.added is None else fact.added - at.added
            waiting[name] = max(1, min(lag, fact.length) if lag > 0 else fact.length)
        return waiting

    def _adopt(self, held: Mapping[str, PendingCounts], inbox: dict[str, int]) -> None:
        """Take over what others have held for too long, as far as there is room: looked for twice in that time."""
        # The search goes on from batch to batch; a stream may be deleted meanwhile.
        self._cursors = {name: cursor for name, cursor in self._cursors.items() if name in held}
        now_ms = self._clock.monotonic_ms()
        if not self._cursors and now_ms >= self._sweep_due_ms:
            self._cursors = {name: FIRST for name, one in held.items() if one.others}
            self._sweep_due_ms = now_ms + self._sharing.adopt_after_ms / 2
        while self._cursors and (room := self._most - sum(inbox.values())) > 0:
            name, cursor = next(iter(self._cursors.items()))
            following, count, gone = self._batches.adopt(
                name, cursor, min_idle_ms=self._sharing.adopt_after_ms, most=room
            )
            self._cursors[name] = following
            if following == FIRST:
                del self._cursors[name]
            if count:
                inbox[name] = inbox.get(name, 0) + count
                logger.info("took over %d entries of %s that others had held for too long", count, name)
            self._tell({name: gone})

    def _draw(self, waiting: Mapping[str, int], inbox: dict[str, int]) -> None:
        """Take new entries, as far as there is room; streams share it by what waits there."""
        room = self._most - sum(inbox.values())
        if not waiting or room <= 0:
            return
        shares = divide(waiting, room, self._last_served)
        self._last_served = list(shares)[-1] if len(shares) < len(waiting) else ""
        inbox.update({name: one.ours for name, one in self._batches.draw(shares).items()})

    def _fill(self, token: str, number: int, inbox: Mapping[str, int]) -> dict[str, int]:
        """Put what is held into a batch."""
        sizes = divide({name: count for name, count in inbox.items() if count}, self._most)
        if not sizes:
            return {}
        step = self._spread.target(sum(sizes.values()))
        filled = self._batches.fill(token, number, sizes, step=step)
        self._tell({name: one.gone for name, one in filled.items()})
        return {name: one.size for name, one in filled.items() if one.size}

    # --- the tasks of a batch ---

    def tasks(self, start: GroupOffset, end: GroupOffset) -> list[list[GroupPartition]]:
        """Return what each task of the batch between `start` and `end` reads; the batch is kept until the next plan."""
        if end.batch == start.batch or not end.filled:
            return []
        if end.batch != start.batch + 1:
            raise ConfigError(
                f"Spark asks for the batches {start.batch + 1} to {end.batch} at once: those before the last are "
                "acknowledged. readAs=group needs each batch in the checkpoint: leave asyncProgressTrackingEnabled out"
            )
        if end != self._planned:
            self._resume(end)
        records = self._batches.records(end.filled)
        portions: list[GroupPartition] = []
        for name, count in end.filled.items():
            one = records.get(name)
            size = one.size if one is not None and (one.token, one.batch) == (end.token, end.batch) else 0
            if size != count:
                self._lose(
                    f"{count - size:,} of the {count:,} entries that batch {end.batch} has of stream {name!r} are not known "
                    "to Redis any more: it lost its last writes, its keys were deleted, or another checkpoint has taken "
                    f"over from this one as the consumer {self._sharing.consumer!r}",
                    "what is left of it is read; the group gives the rest to whoever reads on",
                )
            if one is not None:
                ids = self._batches.keys(name).ids(end.token, end.batch)
                portions += [GroupPartition(name, at, min(one.step, size - at), ids) for at in range(0, size, one.step)]
        self._keeper.hold(end.filled)
        return _packed(portions, self._spread.target(max(1, sum(portion.size for portion in portions))))

    def _resume(self, end: GroupOffset) -> None:
        """Take charge of a batch that another run has planned: nobody has kept it since."""
        self._begin(end.filled)
        try:
            self._batches.keep(end.filled)
        except GroupMissing as error:
            logger.warning("what this query holds of a stream cannot be kept: %s", error)

    # --- losses ---

    def _tell(self, gone: Mapping[str, int]) -> None:
        for name, count in gone.items():
            if count:
                self._lose(
                    f"{count:,} pending entries of stream {name!r} were trimmed or deleted before they were read",
                    "nobody will ever see them",
                )
        self._batches.told(gone)

    def _lose(self, what: str, instead: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(
                f"{what}. To go on all the same ({instead}) set failOnDataLoss=false, which says it in the log"
            )
        logger.warning("%s; %s", what, instead)


def _packed(portions: Iterable[GroupPartition], most: int) -> list[list[GroupPartition]]:
    """Give each task one portion, or several small ones: a batch is cut into portions of the size of a task."""
    tasks: list[list[GroupPartition]] = []
    room = 0
    for portion in sorted(portions, key=lambda portion: (-portion.size, portion.stream, portion.after)):
        if portion.size > room:
            tasks.append([])
            room = most
        tasks[-1].append(portion)
        room -= portion.size
    return tasks
