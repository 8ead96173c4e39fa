"""LossPolicy: fails the query for lost entries, or counts them and goes on (`failOnDataLoss`)."""

import logging
from dataclasses import dataclass

from millstream.errors import DataLoss
from millstream.model import EntryId
from millstream.spark.source.offsets import Position
from millstream.spark.source.stream_info import StreamInfo


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Entries of `stream` after `start` that can no longer be read.

    `count` is exact, or an upper bound (`at_most`), or None for a stream that was deleted or recreated: then the number
    is unknown, and reading goes on at the beginning of the stream as it is now, or once it exists (`resets`).
    """

    stream: str
    start: Position
    count: int | None
    at_most: bool = False

    @property
    def resets(self) -> bool:
        """True if the stream is not the one that `start` belongs to."""
        return self.count is None

    def __str__(self) -> str:
        if self.count is None:
            return (
                f"stream {self.stream!r} was deleted or recreated, or Redis lost its last writes: the entry "
                f"{self.start.id} that the query had reached is no longer part of its history"
            )
        return (
            f"stream {self.stream!r} lost {'up to ' if self.at_most else ''}{self.count:,} entries after "
            f"{self.start.id} before they were read: they were trimmed or deleted"
        )


def detect_loss(stream: str, start: Position, info: StreamInfo | None) -> Loss | None:
    """Return the loss of a query whose offset is `start`; None if there is none, or none can be proven.

    The proof rests on entries-added. If all entries up to `start` are gone, the stream must have removed as many as had
    been added by then. Fewer: it is another stream. More: the difference was removed before it was read. Without a
    count, the only proof is a last id that has gone back.
    """
    if info is None:
        return None if start.entries_added == 0 else Loss(stream=stream, start=start, count=None)
    if info.last_id < start.id or info.entries_added < (start.entries_added or 0):
        return Loss(stream=stream, start=start, count=None)
    if start.entries_added is None or info.is_whole_after(start.id) or info.entries_removed == start.entries_added:
        return None
    lost = info.entries_removed - start.entries_added
    return Loss(stream=stream, start=start, count=lost if lost > 0 else None)


def after_loss(start: Position, info: StreamInfo) -> Position:
    """Return `start` with its count moved past the entries removed after it, so that no loss is counted twice."""
    if start.entries_added is None or info.is_whole_after(start.id) or info.entries_removed <= start.entries_added:
        return start
    return Position(start.id, None if info.has_gaps_after(start.id) else info.entries_removed)


logger = logging.getLogger(__name__)

_ALLOW = "set failOnDataLoss=false (`millstream run`: --allow-data-loss), which counts losses in the log"


class LossPolicy:
    """Raises DataLoss, or logs: each loss once in this process, again if it grows, with the total so far."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._reported: dict[str, tuple[Position, int]] = {}
        self._warned: set[tuple[str, EntryId]] = set()
        self._total = 0

    def report(self, loss: Loss) -> None:
        """Raise DataLoss for `loss`, or log it and return."""
        if self._fail:
            raise DataLoss(
                f"{loss}. To go on at the next entry that is left (in a recreated stream at its beginning) {_ALLOW}; to "
                "avoid losses keep more of the stream (MAXLEN, XTRIM) or run the query more often. If workers have "
                "processed these entries, nothing is lost: start `millstream run` with a new --checkpoint and "
                "--from-committed"
            )
        start, reported = self._reported.get(loss.stream, (None, 0))
        count = loss.count or 0
        if start == loss.start and count <= reported:
            return
        self._reported[loss.stream] = (loss.start, count)
        self._total += count - reported if start == loss.start else count
        if loss.count is None:
            logger.warning(
                "%s; going on at the beginning of the stream as it is now. The number of lost entries is unknown", loss
            )
        else:
            logger.warning(
                "%s; going on (%d entries so far, without those lost while they were read)", loss, self._total
            )

    def warn_of_possible_loss(self, stream: str, start: EntryId) -> None:
        """Warn once that entries after `start` may be lost, where the count that would prove it is missing."""
        if (stream, start) not in self._warned:
            self._warned.add((stream, start))
            logger.warning(
                "entries of stream %r were trimmed or deleted beyond %s, where reading goes on; some may have been "
                "unread, which cannot be proven without a count",
                stream,
                start,
            )


def recreated_stream_error(stream: str, committed_id: EntryId) -> DataLoss:
    """The error of a recreated stream with ids below the committed id of its handler, which would skip such entries."""
    return DataLoss(
        f"stream {stream!r} was deleted and recreated with ids below {committed_id}, the id that its handler has "
        "committed on the old one; process the new one with --reprocess and a new --checkpoint"
    )


def report_loss(text: str, *, fail: bool, then: str = "the entries that are left are read") -> None:
    """Raise DataLoss for entries that were lost, or, unless `fail`, log it. `then`: what the query does without them."""
    if fail:
        raise DataLoss(f"{text}. To go on ({then}) {_ALLOW}")
    logger.warning("%s; %s", text, then)
