"""GroupPartitionReader: reads the entries of a group's batch in a Spark task, by the ids recorded in Redis.

It only reads: the entries are pending, so a repeated task reads them again.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.resp import Command, Reply
from millstream.spark.source.data_loss import report_loss
from millstream.spark.source.entry_runs import Run
from millstream.spark.source.entry_segment import Entry
from millstream.spark.source.partition_reader import Fetched, PartitionReader
from millstream.spark.source.replica_reads import Replicas
from millstream.spark.source.stream_info import fetch_calls

_SPARSE = 4


class GroupPartition(NamedTuple):
    """`size` entries of `stream`, whose ids are in the Redis list `ids_key` from the index `first_index` on."""

    stream: str
    first_index: int
    size: int
    ids_key: str


@dataclass(slots=True)
class _UnreadPortion:
    """The ids that are left to read of one portion.

    New entries of a group are mostly adjacent, so one XRANGE reads many. Claimed entries lie among entries of other
    consumers (`sparse`), so each needs an XRANGE of its own.
    """

    stream: str
    ids: list[bytes]
    sparse: bool = False

    def commands(self, count: int) -> list[Command]:
        """The commands that read the next `count` entries."""
        some = self.ids[:count]
        if self.sparse:
            return [("XRANGE", self.stream, one, one) for one in some]
        return [("XRANGE", self.stream, some[0], some[-1], "COUNT", len(some))]

    def accept(self, count: int, replies: Sequence[Reply]) -> tuple[list[Entry], list[bytes]]:
        """Return the entries among `replies` that belong to the batch, and the ids of entries that are gone."""
        found: list[Entry] = [entry for reply in replies for entry in raise_if_error(reply)]
        requested = self.ids[:count]
        if not self.sparse and len(found) == len(requested) and found[-1][0] != requested[-1]:
            # Entries of other consumers are in between, so COUNT cut the range off before its end.
            requested = requested[: bisect_right(requested, EntryId.parse(found[-1][0]), key=EntryId.parse)]
        del self.ids[: len(requested)]
        wanted = set(requested)
        entries = [entry for entry in found if entry[0] in wanted]
        self.sparse = self.sparse or len(entries) * _SPARSE < len(found)
        if len(entries) == len(requested):
            return entries, []
        found_ids = {entry[0] for entry in entries}
        return entries, [one for one in requested if one not in found_ids]


class GroupPartitionReader(PartitionReader):
    """Reads the entries of `portions`, in stream order within one portion.

    Raises DataLoss for entries that are gone, or logs their number unless `fail_on_data_loss`.
    """

    def __init__(
        self,
        client: Client,
        portions: Sequence[GroupPartition],
        *,
        limit_ms: float | None,
        fail_on_data_loss: bool,
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__(
            client, (), limit_ms=limit_ms, fail_on_data_loss=fail_on_data_loss, replicas=replicas, as_segments=False
        )
        self._portions = portions
        self._unread_portions: deque[_UnreadPortion] | None = None

    def _round_trip(self) -> Fetched | None:
        if self._unread_portions is None:
            self._unread_portions = self._fetch_ids()
        if not self._unread_portions:
            return None
        requests, fetched, meter = self._fetch(self._next_portions, _commands)
        replies = iter(fetched)
        runs: list[Run] = []
        for wanted, count in requests:
            entries, missing = wanted.accept(count, [next(replies) for _ in wanted.commands(count)])
            if missing:
                self._report_loss(len(missing), wanted.stream, missing[0].decode())
            if entries:
                runs.append((wanted.stream, entries))
        while self._unread_portions and not self._unread_portions[0].ids:
            self._unread_portions.popleft()
        return self._resize(runs, meter.total_bytes)

    def _next_portions(self) -> list[tuple[_UnreadPortion, int]]:
        requests: list[tuple[_UnreadPortion, int]] = []
        budget = self._trip_entries
        for wanted in self._unread_portions or ():
            if budget <= 0:
                break
            if not wanted.ids:
                continue  # read to its end, while an earlier one is not
            requests.append((wanted, min(len(wanted.ids), budget)))
            budget -= requests[-1][1]
        return requests

    def _fetch_ids(self) -> "deque[_UnreadPortion]":
        """Fetch the ids of the portions."""
        commands = [("LRANGE", one.ids_key, one.first_index, one.first_index + one.size - 1) for one in self._portions]
        found: deque[_UnreadPortion] = deque()
        replies = self._with_retry(lambda: [raise_if_error(reply) for reply in fetch_calls(self._client, commands)])
        for portion, ids in zip(self._portions, replies, strict=True):
            if len(ids) < portion.size:
                self._report_loss(
                    portion.size - len(ids), portion.stream, "(unknown: Redis has lost the ids of the batch)"
                )
            if ids:
                found.append(_UnreadPortion(portion.stream, ids))
        return found

    def _report_loss(self, count: int, stream: str, first: str) -> None:
        text = (
            f"{count:,} pending entries of stream {stream!r} are gone, the first is {first}: they were trimmed or "
            "deleted after they were added to the batch, before they were read"
        )
        report_loss(text, fail=self._fail_on_data_loss)


def _commands(requests: list[tuple[_UnreadPortion, int]]) -> list[Command]:
    return [command for portion, count in requests for command in portion.commands(count)]
