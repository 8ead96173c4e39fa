"""What to do about entries that are gone: fail, or count and go on, as the query was told."""

import logging

from millstream.errors import DataLoss
from millstream.model import EntryId
from millstream.spark.source.offsets import Position
from millstream.spark.source.stream_info import Loss

logger = logging.getLogger(__name__)


class LossPolicy:
    """Raises DataLoss, or counts: each loss is told once in this process, again if it grows, with the total so far."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._told: dict[str, tuple[Position, int]] = {}
        self._doubted: set[tuple[str, EntryId]] = set()
        self._total = 0

    def report(self, loss: Loss) -> None:
        """Raise DataLoss for `loss`, or say so in the log and return."""
        if self._fail:
            raise DataLoss(
                f"{loss}. To go on without them set failOnDataLoss=false, which counts losses in the log and reads "
                "on at the next entry that is left (a re-created stream from its beginning); to avoid it keep more "
                "of the stream (MAXLEN, XTRIM) or run the query more often"
            )
        start, told = self._told.get(loss.stream, (None, 0))
        count = loss.count or 0
        if start == loss.start and count <= told:
            return
        self._told[loss.stream] = (loss.start, count)
        self._total += count - told if start == loss.start else count
        if loss.count is None:
            logger.warning(
                "%s; going on with what stands there now, or will. How many are lost is not known here", loss
            )
        else:
            logger.warning("%s; going on (%d entries so far, without those that vanish in mid-read)", loss, self._total)

    def doubt(self, stream: str, start: EntryId) -> None:
        """Say once that entries after `start` may be lost, where the count that would prove it is missing."""
        if (stream, start) not in self._doubted:
            self._doubted.add((stream, start))
            logger.warning(
                "stream %r was trimmed or deleted past %s, where reading goes on; whether unread entries were among "
                "those cannot be told",
                stream,
                start,
            )


def made_anew(stream: str, frontier: EntryId) -> DataLoss:
    """The error of a stream whose ids begin anew below what its handler has committed: it would pass them over."""
    return DataLoss(
        f"stream {stream!r} was deleted and made anew with ids below {frontier}, up to which its handler has committed "
        "the old one; process the new one with --reprocess and a new --checkpoint"
    )


def lose(text: str, *, fail: bool) -> None:
    """Raise DataLoss for entries that vanished before a task could read them, or, unless `fail`, say so in the log."""
    if fail:
        raise DataLoss(f"{text}. Keep more of the stream, or set failOnDataLoss=false to count losses and go on")
    logger.warning("%s", text)
