"""What a lane asks, and whom it tells."""

from collections.abc import Callable
from dataclasses import dataclass

from millstream.redis_client.resp import Node
from millstream.router.subscriber_buffer import Cursor


@dataclass(frozen=True, kw_only=True)
class ReaderCallbacks:
    """Whom a lane tells. `done`: all of a stream is read; `want`: read this, wherever it lives now; `moved`: the map of the
    cluster is out of date; `ask_at`: read these once at that node; `later`: call that after so many milliseconds."""

    done: Callable[[Cursor], None]
    want: Callable[[Cursor], None]
    moved: Callable[[], None]
    ask_at: Callable[[Node, list[Cursor]], None]
    later: Callable[[float, Callable[[], None]], None]


@dataclass(slots=True)
class Request:
    """One round trip: the cursors of each command, those whose counters are asked for too, and how many entries of each.

    `queue`: from which queue they came; None: from none.
    """

    groups: list[list[Cursor]]
    careful: list[Cursor]
    count: int
    queue: int | None

    @property
    def cursors(self) -> list[Cursor]:
        """All that are read."""
        return [cursor for group in self.groups for cursor in group]
