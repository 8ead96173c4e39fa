"""HeldEntries: for how long other consumers have held the lowest pending entries of a stream."""

from collections.abc import Iterable

from millstream.groups import PendingEntry


class HeldEntries:
    """What one worker has seen: Redis does not say it, as each renewal of a claim resets the idle time.

    `consumer`: the worker's own name
    """

    def __init__(self, consumer: str) -> None:
        self._consumer = consumer
        self._since_ms: dict[tuple[bytes, str], float] = {}

    def find_stuck(self, pending: Iterable[PendingEntry], longest_ms: float, now_ms: float) -> list[PendingEntry]:
        """Return those of the entries that are pending now which another consumer has held for `longest_ms`."""
        others = [one for one in pending if one.consumer != self._consumer]
        before = self._since_ms
        self._since_ms = {(one.id, one.consumer): before.get((one.id, one.consumer), now_ms) for one in others}
        return [one for one in others if now_ms - self._since_ms[one.id, one.consumer] > longest_ms]
