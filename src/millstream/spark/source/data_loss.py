"""LossPolicy: fails the query for lost entries, or counts them and goes on (`failOnDataLoss`)."""

import logging

from millstream.errors import DataLoss
from millstream.model import EntryId
from millstream.spark.source.offsets import Position
from millstream.spark.source.stream_info import Loss

logger = logging.getLogger(__name__)


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
                f"{loss}. To go on without them set failOnDataLoss=false, which counts losses in the log and reads "
                "on at the next entry that is left (a recreated stream from its beginning); to avoid losses keep more "
                "of the stream (MAXLEN, XTRIM) or run the query more often"
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


def report_loss(text: str, *, fail: bool) -> None:
    """Raise DataLoss for entries that were lost before a task could read them, or, unless `fail`, log it."""
    if fail:
        raise DataLoss(f"{text}. Keep more of the stream, or set failOnDataLoss=false to count losses and go on")
    logger.warning("%s", text)
