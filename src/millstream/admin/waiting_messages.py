"""WaitingMessages: how many messages of an app wait, whichever engine runs it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from millstream.admin.handler_figures import AT_ONCE, HandlerFigures, present, read_figures
from millstream.admin.redis_metrics import KnownPlaces, places_of
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import send_all, server_time_ms
from millstream.redis_client.resp import Reply

_DISCOVER_EVERY_MS = 10_000.0
_NAMES_AT_ONCE = 1_000


@dataclass(frozen=True)
class Waiting:
    """How many messages wait; if `is_partial`, `count` is a lower bound."""

    count: int
    is_partial: bool = False


class WaitingMessages:
    """Reads how many messages of `handlers` an engine could process: unread, nacked, in key queues or in flight.

    Those of keys that are parked or back off are not among them: no engine would run them now. A key backs off before a
    retry, and while it waits for its handler's limit or for more messages of a list.
    """

    def __init__(self, client: Client, handlers: Iterable[Handler], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._clock = clock
        discover = partial(places_of, handlers=tuple(handlers))
        self._known = KnownPlaces(discover, every_ms=_DISCOVER_EVERY_MS, clock=clock)

    def count(self, at_least: int) -> Waiting:
        """The messages that wait now. Those of a handler that is paused on all its streams do not count.

        Where Redis does not know the lag of a group, entries are counted one by one. Unless all of them are counted,
        the count is `at_least` or more. Raises RedisError.
        """
        self._known.refresh(self._client)
        count, is_partial = 0, False
        for places in self._known.places.values():
            found = read_figures(self._client, places, self._clock, at_least=at_least - count)
            if _is_paused(found):
                continue
            any_held = found.keys["parked"] or found.keys["backing_off"] or found.awaiting
            held = _count_held(self._client, places) if any_held else 0
            if held and found.is_partial:
                found = read_figures(self._client, places, self._clock, at_least=at_least - count + held)
            count += max(0, found.waiting - held)
            is_partial |= found.is_partial
        return Waiting(count, is_partial)


def _is_paused(one: HandlerFigures) -> bool:
    return 0 < one.streams == one.paused


def _count_held(client: Client, places: Sequence[HandlerKeys]) -> int:
    """How many messages are in the queues of keys that are parked or back off."""
    count, now_ms = 0, server_time_ms(client)
    for at in range(0, len(places), AT_ONCE):
        some = places[at : at + AT_ONCE]
        sizes = iter(
            present(
                send_all(client, [one for keys in some for one in (("HLEN", keys.parked), ("ZCARD", keys.backoff))])
            )
        )
        for keys, parked, backing_off in zip(some, sizes, sizes, strict=True):
            for names in _held_names(client, keys, now_ms) if parked or backing_off else ():
                lengths = present(send_all(client, [("LLEN", keys.queue(name)) for name in names]))
                count += sum(length or 0 for length in lengths)
    return count


def _held_names(client: Client, keys: HandlerKeys, now_ms: int) -> Iterator[Sequence[bytes]]:
    """The names of these queues, in parts; without those whose back-off is over: an engine could process them."""
    cursor: Reply = b"0"
    while True:
        (found,) = present(send_all(client, [("HSCAN", keys.parked, cursor, "COUNT", _NAMES_AT_ONCE)]))
        cursor, items = found or (b"0", ())
        yield items[::2]
        if int(cursor) == 0:
            break
    (due,) = present(send_all(client, [("ZCOUNT", keys.backoff, "-inf", now_ms)]))
    for first in itertools.count(due or 0, _NAMES_AT_ONCE):
        (names,) = present(send_all(client, [("ZRANGE", keys.backoff, first, first + _NAMES_AT_ONCE - 1)]))
        yield names or ()
        if len(names or ()) < _NAMES_AT_ONCE:
            return
