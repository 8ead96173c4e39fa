"""Requests of a `StreamReader`, and its callbacks."""

from collections.abc import Callable
from dataclasses import dataclass

from millstream.redis_client.resp import Node
from millstream.router.subscriber_buffer import Cursor


@dataclass(frozen=True, kw_only=True)
class ReaderCallbacks:
    """Callbacks of a `StreamReader`.

    * `on_read`: a stream is read to its end; None: not called
    * `schedule`: queue this cursor at the node that serves it now
    * `on_moved`: the slot map of the cluster is out of date
    * `read_at`: read these cursors once at that node
    * `call_later`: run that after so many milliseconds
    """

    on_read: Callable[[Cursor], None] | None
    schedule: Callable[[Cursor], None]
    on_moved: Callable[[], None]
    read_at: Callable[[Node, list[Cursor]], None]
    call_later: Callable[[float, Callable[[], None]], None]


@dataclass(slots=True)
class Request:
    """One round trip: its cursors, by command; those read with counters; and the most entries of each.

    `queue`: the queue they came from; None: none. `awaits_control`: only the control read of a suspect has been sent.
    """

    cursors: list[Cursor]
    groups: list[list[Cursor]]
    with_counters: list[Cursor]
    count: int
    queue: int | None
    awaits_control: bool = False
