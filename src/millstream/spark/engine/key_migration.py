"""Keys that move between partitions, on Spark: they wait, set aside, until the partitions that they come from are done."""

import threading
from collections.abc import Callable, Sequence

from millstream.handlers.handler import Handler
from millstream.partitions.key_migration import KeyMigration, send_on
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

_SOON_S, _MOST_WAIT_S = 0.05, 0.5


def partitions_of(client: Client, handler: Handler) -> list[PartitionMap]:
    """The layouts of the handler's bases; those that nobody has made are made. Raises RedisError."""
    return [Partitions(client, base).made(handler.partitions or 1) for base in handler.streams]


class PartitionMigration:
    """What a task has to know of the partitions that its handler reads. Methods raise RedisError, and may be repeated.

    Made for each task anew: an entry is in a partition only once the layout says so.
    """

    def __init__(self, client: Client, handler: Handler) -> None:
        self._client = client
        self._handler = handler
        self._moves: dict[str, tuple[KeyMigration, int]] = {}
        for layout in partitions_of(client, handler):
            moves = KeyMigration(client, layout, app=handler.app, handler=handler.name)
            self._moves |= {layout.stream(place): (moves, place) for place in range(layout.count)}

    def expect(self, stream: str, lines: Sequence[bytes]) -> None:
        """Have those of `lines` wait whose keys may not have left an older partition."""
        moves, place = self._moves[stream]
        moves.expect(place, lines)

    def send_on(self, stream: str, key: bytes, entry_id: str, pairs: Sequence[bytes]) -> bool:
        """Publish a redriven entry to the partition that its key is in by now; False if that is `stream`."""
        moves, _ = self._moves[stream]
        keys = HandlerKeys(self._handler.app, self._handler.name, stream)
        return send_on(self._client, moves.layout.base, keys, key, entry_id.encode(), pairs)


def keep_moving(client: Client, handler: Handler, over: threading.Event, tell: Callable[[Sequence[str]], None]) -> None:
    """Bring in the keys that move, until `over`; `tell` is told of partitions with some that may go on. Raises RedisError."""
    movers: dict[str, KeyMigration] = {}
    wait_s = _SOON_S
    while not over.wait(wait_s):
        wait_s = min(2 * wait_s, _MOST_WAIT_S)
        for layout in partitions_of(client, handler):
            moves = movers.setdefault(layout.base, KeyMigration(client, layout, app=handler.app, handler=handler.name))
            moves.layout = layout
            places = range(layout.count)
            if layout.generation > 1 and moves.bring_in(places) + moves.settle(places):
                tell(layout.streams)
                wait_s = _SOON_S
