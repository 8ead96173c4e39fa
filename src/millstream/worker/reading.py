"""How a worker gets the entries of a handler without a key: it reads them through the consumer group, as many as it has room for."""

import math
import threading
from collections.abc import Sequence
from typing import Any

from millstream.groups import Consumer
from millstream.reliable import ReliableStream
from millstream.worker.allowance import Allowed
from millstream.worker.taking import Taker
from millstream.worker.turns import Turns

_IDLE_WAIT_MS = 20.0


class EntryTaker(Taker[ReliableStream]):
    """Takes new entries, as `consumer`."""

    def __init__(self, *means: Any, consumer: str, **options: Any) -> None:
        super().__init__(*means, **options)
        self._consumer = consumer
        self._turns = Turns()
        self._consumers: list[Consumer] = []

    def take(self, room: int, stopping: threading.Event) -> None:
        """See Taker."""
        if (allowed := self._ask_all(stopping)) is not None:
            self._take(allowed, room, stopping)

    def _take(self, allowed: Allowed, room: int, stopping: threading.Event) -> None:
        turn = self._turns.next(allowed.streams, room, allowed.count)
        self._read_from(turn.streams)
        waits = turn.may_wait and len(self._consumers) == 1
        block_ms = math.ceil(min(self._policy.block_ms, allowed.until_ms)) if waits else 0
        found: dict[str, int] = {}
        for consumer in self._consumers:
            for batch in consumer.read_new(count=turn.count, block_ms=block_ms):
                self._allowance.spend(batch.stream, len(batch))
                self._hand.take(self._streams[batch.stream].delivered([batch]), self._clock.monotonic_ms())
                found[batch.stream] = len(batch)
        self._turns.found(turn, found)
        self._hand.found(max(found.values(), default=0), turn.count)
        self._report.polled(sum(found.values()))
        if turn.may_wait and not found and not block_ms:
            stopping.wait(min(_IDLE_WAIT_MS, allowed.until_ms) / 1000)

    def look_again(self) -> None:
        """Nothing has to be done when streams were joined again: a read asks for what is new, whatever there was."""

    def _read_from(self, names: Sequence[str]) -> None:
        """Have one consumer read these streams at once; on Redis Cluster, where that takes one hash slot, one for each."""
        if names != [name for consumer in self._consumers for name in consumer.streams]:
            together = [[name] for name in names] if self._client.is_cluster else [names]
            group = self._streams[names[0]].group
            self._consumers = [
                Consumer(self._client, group=group, name=self._consumer, streams=some) for some in together
            ]
