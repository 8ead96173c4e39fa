"""How a worker leases lines of thousands of streams that others work on, too: what it costs follows what is done, not the streams."""

import math
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from millstream.delivery.keyed_stream import KeyedStream, LeaseResult
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, from_wire, held_name, to_wire
from millstream.worker.fetching.owned_key_fetcher import OwnedKeyFetcher
from millstream.worker.fetching.timers import DelayQueue

_AT_ONCE = 100
_MOST_HINTS = 10_000
_SURVEY_MS_EACH = 2.5
_SWEEP_MS_EACH = 5.0
_LOOK_MS = 20.0


class ReadyHints:
    """Streams of a handler that may have lines to take, as its workers tell each other. No more than hints: some get lost.

    Of many streams, each with a list of its own to wait at, nobody could wait at all: Redis has to look at each. Used by one
    thread.
    """

    def __init__(self, client: Client, app: str, handler: str) -> None:
        self.key = held_name(app, f"hints:{handler}")
        self._client = client
        self._names: dict[bytes, None] = {}

    def put(self, name: str) -> None:
        """Have `tell` tell of a stream."""
        self._names[to_wire(name)] = None

    def tell(self) -> None:
        """Tell the others what was put. Raises RedisError."""
        if self._names:
            names, self._names = self._names, {}
            if self._client.execute("RPUSH", self.key, *names) > _MOST_HINTS:
                self._client.execute(
                    "LTRIM", self.key, -_MOST_HINTS // 2, -1
                )  # who is to hear them has more than enough

    def hear(self, most: int) -> list[str]:
        """Take up to `most` names of streams. Raises RedisError."""
        return [from_wire(name) for name in dict.fromkeys(self._client.execute("LPOP", self.key, most) or ())]


class SharedKeyFetcher(OwnedKeyFetcher):
    """Leases lines of streams that others work on, too.

    It waits for hints, and at the lists of those streams on which somebody has lines, as far as it knows. The others are
    idle: of these only whether there are any lines is asked, and of so many a second, however many there are.
    """

    def __init__(
        self, *means: Any, hints: Callable[[Client], ReadyHints], keys_of: Callable[[str], HandlerKeys], **options: Any
    ) -> None:
        super().__init__(*means, **options)
        self._hints = hints(self._client)
        self._keys_of = keys_of
        self._active: dict[str, str] = {}
        self._idle = DelayQueue()

    def take(self, room: int, stopping: threading.Event) -> None:
        """See Taker."""
        self._lines_each = room
        super().take(room, stopping)
        self._hints.tell()

    def _hear(self, now_ms: float) -> None:
        super()._hear(now_ms)
        for name in self._hints.hear(min(self._lines_each, _AT_ONCE)):
            self._agenda.put(name, now_ms)

    def _with_room(self, due: Sequence[str], now_ms: float) -> list[KeyedStream]:
        streams = super()._with_room(due, now_ms)
        self._lines_each = max(1, self._lines_each // max(1, len(streams)))
        return streams

    def _note(self, stream: KeyedStream, taken: LeaseResult, now_ms: float) -> int:
        name = stream.stream
        if taken.leases or taken.wait_ms is not None:
            # Leases that others take meanwhile may run out, too.
            sweep_ms = max(self._policy.sweep_ms, _SWEEP_MS_EACH * len(self._active))
            self._active[name] = self._keys_of(name).wake
            self._agenda.put(name, now_ms + min(sweep_ms, inf if taken.wait_ms is None else taken.wait_ms))
        else:
            self._active.pop(name, None)
            self._idle.put(name, now_ms + self._survey_ms)
        if taken.unfit:
            self._hand.unfit = taken.unfit
            self._large.append(name)
        if taken.unfit or len(taken.leases) >= self._lines_each:  # there may be more, also for others
            self._agenda.put(name, now_ms)
            self._hints.put(name)
        return self._put_in_hand(stream, taken)

    @property
    def _survey_ms(self) -> float:
        return max(self._policy.sweep_ms, _SURVEY_MS_EACH * len(self._streams))

    def _survey(self, now_ms: float) -> bool:
        """Ask whether idle streams have lines, as many as it is time for; True if some have."""
        names = [name for name in self._idle.take(now_ms, _AT_ONCE) if name in self._streams]
        places = [self._keys_of(name) for name in names if name not in self._active]
        replies = self._client.pipeline([("EXISTS", one.ready, one.leases, one.backoff) for one in places])
        found = False
        for place, reply in zip(places, replies, strict=True):
            if reply:  # or it was refused: the taking says why
                found = True
                self._agenda.put(place.stream, now_ms)
            else:
                self._idle.put(place.stream, now_ms + self._survey_ms)
        return found

    def _wait(self, now_ms: float) -> None:
        """Until somebody says that a stream may have something, or one may have by itself."""
        self._report.polled(0)
        if self._survey(now_ms):
            return
        wait_ms = max(1.0, min(self._policy.block_ms, self._agenda.wait_ms(now_ms), self._idle.wait_ms(now_ms)))
        waking = {to_wire(key): name for name, key in self._active.items()}
        if self._client.is_cluster and waking:  # keys of several slots cannot be waited for at once
            self._look(waking, now_ms)
            wait_ms, waking = min(wait_ms, _LOOK_MS), {}
        found = self._client.execute("BLPOP", self._hints.key, *waking, math.ceil(wait_ms) / 1000)
        if found:
            key, name = found
            self._agenda.put(waking.get(key) or from_wire(name), now_ms)

    def _look(self, waking: dict[bytes, str], now_ms: float) -> None:
        replies = self._client.pipeline([("EXISTS", key) for key in waking])
        for name, reply in zip(waking.values(), replies, strict=True):
            if reply:
                self._agenda.put(name, now_ms)
