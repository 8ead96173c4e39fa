"""How a worker routes streams that only it works on, thousands of them: told by Redis which have changed, many together."""

import contextlib
import logging
import threading
from collections.abc import Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from millstream.delivery.keyed_stream import READ_BYTES, KeyedStream
from millstream.errors import ScriptMissing, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_tracking import KeyTracker
from millstream.worker.fetching.key_router import KeyRouter, WakeUp
from millstream.worker.fetching.timers import DelayQueue, RoundRobin

logger = logging.getLogger(__name__)

_AT_ONCE = 100
_ROUTED_AT_ONCE = 1_000
_LOOK_MS = 50.0
_CHECK_MS = 1_000.0
_VAIN_ROUNDS = 5
_MANY_VAIN_ROUNDS = 20
_PAUSE_MS_EACH = 10.0
_VAIN_MS_EACH = 0.2


class OwnedKeyRouter(KeyRouter):
    """A Router that learns from a `KeyTracker` what has changed. Where the server does not track, it does as any Router."""

    _is_shared = False

    def __init__(self, client: Client, *means: Any, woken: WakeUp, **options: Any) -> None:
        super().__init__(client, *means, **options)
        self._watch = KeyTracker(client)
        self._woken = woken
        self._added: SimpleQueue[str] = SimpleQueue()
        self._to_route: dict[str, None] = {}
        self._held_back = DelayQueue()
        self._sweep = RoundRobin()
        self._check_due_ms = self._listen_due_ms = 0.0
        self._told: set[str] = set()
        self._new = self._vain = self._vain_rounds = 0
        self._has_warned = False

    def add(self, stream: KeyedStream) -> None:
        """See Router."""
        super().add(stream)
        self._added.put(stream.stream)

    def run(self, stopping: threading.Event) -> None:
        """See Router."""
        while not (stopping.is_set() or self._watch.refused):
            try:
                self._listen(stopping)
                self._route_some()
                self._failures = 0
            except Unavailable as error:
                self._tell_away(error)
                stopping.wait(self._policy.sweep_ms / 1000)
        self._watch.close()
        super().run(stopping)

    def _listen(self, stopping: threading.Event) -> None:
        """Wait a little until there is something to route; note on which streams."""
        now_ms = self._clock.monotonic_ms()
        checks = now_ms >= self._check_due_ms
        if now_ms < self._listen_due_ms:
            if not self._to_route:
                stopping.wait(min(_LOOK_MS, self._listen_due_ms - now_ms) / 1000)
        elif self._to_route or checks or self._watch.wait(_LOOK_MS):
            self._hear()
        now_ms = self._clock.monotonic_ms()
        if checks:
            self._check_due_ms = now_ms + _CHECK_MS
            # What is told is no more than a hint: once in a while each is looked at.
            self._to_route |= dict.fromkeys(self._sweep.next(self.streams))
        self._to_route |= dict.fromkeys(self._held_back.take(now_ms, len(self.streams)))
        with contextlib.suppress(Empty):
            while True:
                self._to_route[self._added.get_nowait()] = None

    def _hear(self) -> None:
        """Note what has changed; with pauses, longer the more it is, while most of what is told is in vain.

        A server that can track fewer keys than there are streams says of each that it forgets that it has changed, and
        forgets one for each that is asked about; and what it cannot track while slots move counts as changed, too.
        """
        self._vain_rounds = self._vain_rounds + 1 if self._vain > self._new else 0
        pause_ms = 0.0
        if (rounds := self._vain_rounds - _VAIN_ROUNDS) > 0:
            longest_ms = min(_CHECK_MS, max(_LOOK_MS, _VAIN_MS_EACH * self._vain))
            pause_ms = min(longest_ms, _PAUSE_MS_EACH * rounds)
        self._new = self._vain = 0
        self._listen_due_ms = self._clock.monotonic_ms() + pause_ms
        if self._vain_rounds >= _MANY_VAIN_ROUNDS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Redis says again and again that streams have changed where nothing is new: is its"
                " tracking-table-max-keys too small for %d streams?", len(self.streams),
            )  # fmt: skip
        told = self._watch.changed()
        self._told |= told or set()
        self._to_route |= dict.fromkeys(self.streams.copy() if told is None else told)

    def _route_some(self) -> None:
        names = self._next()
        streams: list[KeyedStream] = []
        for name in names:
            if (stream := self.streams.get(name)) is None or not self._is_mine(name):
                continue
            if self._readable(name):
                streams.append(stream)
            else:
                self._hold_back(name, _LOOK_MS)
        more, away = self._route_together(streams) if streams else ([], None)
        for name in names:
            del self._to_route[name]
            self._told.discard(name)
        self._say_full(streams)
        for stream in streams:
            if stream.stream in self._full:
                self._hold_back(stream.stream, _LOOK_MS)
        self._to_route |= dict.fromkeys(name for name in more if name not in self._full)
        if away is not None and not self._client.is_cluster:  # else it concerns some only, which are held back
            raise away

    def _next(self) -> list[str]:
        """As many as may be read together: of those with large entries, few."""
        names: list[str] = []
        size = 0
        for name in islice(self._to_route, _AT_ONCE):
            if (stream := self.streams.get(name)) is not None:
                size += READ_BYTES // stream.affordable
            if names and size > READ_BYTES:
                break
            names.append(name)
        return names

    def _is_mine(self, name: str) -> bool:
        return True

    def _tell(self, stream: KeyedStream) -> None:
        """Have the line of a stream taken."""
        self._woken.put(stream.stream)

    def _hold_back(self, name: str, for_ms: float) -> None:
        self._held_back.put(name, self._clock.monotonic_ms() + for_ms)

    def _route_together(self, streams: Sequence[KeyedStream]) -> tuple[list[str], Unavailable | None]:
        """Route what is new on these in two round trips; return which may have more, and why others are held back."""
        found, alone, more = self._read_together(streams)
        before = [(one.routed, one.pending) for one in found]
        most = self._policy.look_ahead
        answers = self._client.pipeline([one.to_enlist(entries, most_pending=most) for one, entries in found.items()])
        for (stream, entries), answer, (routed, pending) in zip(found.items(), answers, before, strict=True):
            if isinstance(answer, Exception):
                alone.append(stream)
                continue
            passed = stream.enlisted(answer)
            is_moved = stream.routed != routed
            # Without new ones, Redis has gone back, or an answer was lost with what it said.
            if passed or is_moved:
                self._tell(stream)
            if passed < len(entries) or (is_moved and not passed):
                more.append(stream.stream)
            if stream.stream in self._told:
                is_vain = not (passed or is_moved or pending or stream.pending)  # what is committed is told, too
                self._vain, self._new = self._vain + is_vain, self._new + (not is_vain)
        others, away = self._route_alone(alone)
        return more + others, away

    def _read_together(
        self, streams: Sequence[KeyedStream]
    ) -> tuple[dict[KeyedStream, Sequence[Any]], list[KeyedStream], list[str]]:
        """What is new on these, read in one round trip; which are to be read alone, and which may have more than that."""
        most, share = self._policy.look_ahead, READ_BYTES // len(streams)
        counts = [min(_ROUTED_AT_ONCE, one.affordable) // len(streams) or 1 for one in streams]
        reads = [
            one.to_read(count=count, most_bytes=share, one_at_least=len(streams) == 1, most_pending=most)
            for one, count in zip(streams, counts, strict=True)
        ]
        # Whatever is asked about a key, its next change is told.
        asked = {one.stream: read or ("EXISTS", one.stream) for one, read in zip(streams, reads, strict=True)}
        try:
            replies = dict(self._watch.read(asked))
        except Unavailable:
            for stream in streams:
                stream.note_failed_read()
            raise
        found: dict[KeyedStream, Sequence[Any]] = {}
        alone: list[KeyedStream] = []
        more: list[str] = []
        for stream, count, read in zip(streams, counts, reads, strict=True):
            reply = replies[stream.stream]
            if read is None or isinstance(reply, Exception):
                alone.append(stream)
                if isinstance(reply, ScriptMissing):  # of that one nothing was asked at all
                    more.append(stream.stream)
                continue
            entries, unfit = stream.found(reply)
            if unfit and not entries:
                alone.append(stream)
            else:
                found[stream] = entries
            if unfit or len(entries) >= count:
                more.append(stream.stream)
        return found, alone, more

    def _route_alone(self, streams: Sequence[KeyedStream]) -> tuple[list[str], Unavailable | None]:
        """As _route_together, one by one: what one server refuses keeps nobody else waiting."""
        more: list[str] = []
        away: Unavailable | None = None
        for stream in streams:
            if away is not None and not self._client.is_cluster:  # its only server has just refused another, too
                self._hold_back(stream.stream, self._policy.sweep_ms)
                continue
            try:
                if self._route(stream):
                    more.append(stream.stream)
            except Unavailable as error:
                away = error
                logger.debug("nothing of %s is routed for now: %s", stream.stream, error)
                self._hold_back(stream.stream, self._policy.sweep_ms)
        return more, away
