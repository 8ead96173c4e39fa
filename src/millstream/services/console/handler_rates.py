"""HandlerRates: how many messages a second each handler commits, by two reads of the console."""

import threading
from collections import defaultdict
from collections.abc import Iterable

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.pipelining import send_all
from millstream.services.console.total_rates import TotalRead, next_read

_MOST_PLACES = 20_000


class HandlerRates:
    """The rates of handlers, by the reads of all viewers. May be used by any thread.

    The rate of a handler is the sum of those on its streams that were read twice, from 2 seconds to 5 minutes apart. It
    keeps the reads of 20,000 handlers on streams.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[HandlerKeys, TotalRead] = {}

    def update(self, client: Client, places: Iterable[HandlerKeys]) -> dict[str, float | None]:
        """Messages a second that each handler has committed on these streams, by its label; None if it is not known yet.

        A command for each handler on a stream; those that Redis refuses are left out. Raises RedisError.
        """
        asked, read_ms = list(places), self._clock.monotonic_ms()
        replies = send_all(client, [("HMGET", to_wire(one.meta), "committed", "skipped") for one in asked])
        rates: dict[str, list[float]] = defaultdict(list)
        with self._lock:
            for one, reply in zip(asked, replies, strict=True):
                counts = [] if isinstance(reply, RedisError) else [count or b"0" for count in reply]
                if counts and all(count.isdigit() for count in counts):
                    entries, skipped = map(int, counts)
                    read = next_read(self._known.pop(one, None), entries - skipped, read_ms)
                    self._known[one] = read  # behind those that were read before
                    rates[one.label] += [] if read.rate is None else [read.rate]
            while len(self._known) > _MOST_PLACES:
                del self._known[next(iter(self._known))]
        return {label: sum(some) if some else None for label, some in rates.items()}
