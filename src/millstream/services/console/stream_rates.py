"""StreamRates: how many entries a second each stream gets, by two reads of the console."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from millstream.admin.reports import StreamReport
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.model import EntryId
from millstream.services.console.total_rates import TotalRead, next_read

_MOST_STREAMS = 20_000


class StreamRead(NamedTuple):
    """The entries that were ever added to a stream, and its last id."""

    added: TotalRead
    last_id: EntryId


class StreamRates:
    """The rates of streams, by the reads of all viewers. May be used by any thread.

    A rate is that between two reads from 2 seconds to 5 minutes apart. A read that comes sooner keeps the rate of the
    one before. It keeps the reads of the 20,000 streams that were read last.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, StreamRead] = {}

    def now_ms(self) -> float:
        """The time of a read that begins now."""
        return self._clock.monotonic_ms()

    def update(self, streams: Sequence[StreamReport], read_ms: float) -> dict[str, float | None]:
        """Entries a second of each of these streams, by name; None if this is the first read.

        `read_ms`: `now_ms` when the read of `streams` began. An update may come after that of a later read.
        """
        with self._lock:
            for one in streams:
                last = self._known.pop(one.name, None)
                self._known[one.name] = next_stream_read(last, one, read_ms)  # behind those that were read before
            rates = {one.name: self._known[one.name].added.rate for one in streams}
            while len(self._known) > _MOST_STREAMS:
                del self._known[next(iter(self._known))]
        return rates


def next_stream_read(last: StreamRead | None, stream: StreamReport, read_ms: float) -> StreamRead:
    """The read of a stream at this time, with its rate since the last one; the last one as in `next_read`."""
    if last is None:
        return StreamRead(next_read(None, stream.added, read_ms), EntryId.parse(stream.last_generated_id))
    added = next_read(last.added, stream.added, read_ms, is_another=_is_another(stream, last))
    return last if added is last.added else StreamRead(added, EntryId.parse(stream.last_generated_id))


def _is_another(stream: StreamReport, last: StreamRead) -> bool:
    """Whether the stream was deleted since, and there is another one of its name.

    Of a stream that was trimmed meanwhile the first id is a new one, too, but it has no more entries than were added
    since.
    """
    has_only_new = stream.first_id is not None and EntryId.parse(stream.first_id) > last.last_id
    return has_only_new and stream.length > stream.added - last.added.total
