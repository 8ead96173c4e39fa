"""ReadRange: which entries a batch read wants, as a range of ids and tests of stream names. No I/O."""

from collections.abc import Callable

from millstream.model import LAST_ID, ZERO_ID
from millstream.spark.source.offsets import Position, Positions

NameTest = Callable[[str], bool]


class ReadRange:
    """Entries with ids from `min_id` to `max_id`, of streams that pass every test; at first all entries."""

    def __init__(self) -> None:
        self.min_id = ZERO_ID
        self.max_id = LAST_ID
        self.tests: list[NameTest] = []

    def accepts(self, stream: str) -> bool:
        """True if entries of `stream` can be in the range."""
        return all(test(stream) for test in self.tests)

    def narrow(self, start: Positions, end: Positions) -> tuple[Positions, Positions]:
        """Return the part of the ranges from `start` to `end` that is in this one."""
        after = self.min_id.previous()
        starts = {name: at if at.id >= after else Position(after, None) for name, at in start.items()}
        ends = {name: at if at.id <= self.max_id else Position(self.max_id, None) for name, at in end.items()}
        return starts, {name: at for name, at in ends.items() if name in starts}
