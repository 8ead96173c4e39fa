"""PollWait: how long a worker waits between polls of several streams, where no command can block on all of them."""

from millstream.clock import wait_after

POLL_MS = 20.0
_LONGEST_MS, _LONGEST_MS_EACH = 100.0, 5.0


class PollWait:
    """Waits on Redis Cluster: the first takes 20 ms, each further one twice as long, until a poll finds something.

    The longest takes a tenth of a second, or 5 ms for each stream if that is more; but never more than `most_ms`.
    """

    def __init__(self, most_ms: float) -> None:
        self._most_ms = most_ms
        self._count = 0

    def next_ms(self, streams: int) -> float:
        """Return the next wait, in milliseconds, of a worker that polls so many streams."""
        self._count += 1
        return wait_after(self._count, POLL_MS, min(self._most_ms, max(_LONGEST_MS, _LONGEST_MS_EACH * streams)))

    def reset(self) -> None:
        """Start again at the first wait: a poll has found something."""
        self._count = 0
