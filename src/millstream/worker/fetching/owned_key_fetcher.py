"""How a worker leases the lines of streams that only it works on, thousands of them: those that may have something, together."""

import contextlib
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from millstream.delivery.keyed_stream import KeyedStream, LeaseResult
from millstream.worker.fetching.key_router import LeaseFetcher
from millstream.worker.fetching.timers import DelayQueue
from millstream.worker.stream_exclusion import exclude_on_error

_AT_ONCE = 100
_SWEEP_MS_EACH = 5.0
_FOREIGN_MS = 100.0


class OwnedKeyFetcher(LeaseFetcher):
    """Leases the lines of streams that only this worker works on; each has one.

    `woken`: put in it are the streams that may have something. Now and then each is asked all the same.
    """

    def __init__(self, *means: Any, woken: "SimpleQueue[str]", **options: Any) -> None:
        super().__init__(*means, **options)
        self._woken = woken
        self._agenda = DelayQueue()
        self._large: list[str] = []
        self._lines_each = 1

    def take(self, room: int, stopping: threading.Event) -> None:
        """See Taker."""
        self._report.polling()
        now_ms = self._clock.monotonic_ms()
        self._hear(now_ms)
        due = [self._large.pop()] if self._large else self._agenda.take(now_ms, min(room, _AT_ONCE))
        if not due:
            self._wait(now_ms)
            return
        streams = self._with_room(due, now_ms)
        allowed = self._allowance.ask([one for one in streams if one.readable])
        names = set(allowed.streams)
        for stream in streams:
            if stream.stream not in names:
                self._agenda.put(stream.stream, now_ms + min(self._policy.sweep_ms, allowed.until_ms))
        if names:
            taken = self._take_of([one for one in streams if one.stream in names], allowed.count)
            self._hand.found(taken, room)
        else:
            self._report.resting()

    def _with_room(self, due: Sequence[str], now_ms: float) -> list[KeyedStream]:
        """Those for which there is room, as far as it is known how large their entries are; the others are due later."""
        chosen: list[KeyedStream] = []
        left = self._hand.room_bytes
        for name in due:
            stream = self._streams.get(name)
            if stream is not None and not stream.leaving:
                left -= stream.sizes.about
                if left >= 0 or not chosen:
                    chosen.append(stream)
                else:
                    self._agenda.put(name, now_ms)
        return chosen

    def look_again(self) -> None:
        """See Taker."""
        now_ms = self._clock.monotonic_ms()
        for name in list(self._streams):
            self._agenda.put(name, now_ms)

    def _take_of(self, streams: Sequence[KeyedStream], count: int) -> int:
        """Take the line of each that is ready, in one round trip; return how many were."""
        now_ms = self._clock.monotonic_ms()
        terms = self._terms(self._lines_each, count, len(streams))
        replies = self._client.pipeline([one.to_take(**terms) for one in streams])
        failed: list[KeyedStream] = []
        taken = self._hand.unfit = 0
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, Exception):
                failed.append(stream)
            else:
                taken += self._note(stream, stream.taken(reply, now_ms + self._policy.claim_ms), now_ms)
        if len(streams) > 1:
            self._hand.unfit = 0  # what had no room among others may have it alone
        for stream in failed:  # after the others: what was given is in hand, whatever comes of these
            with exclude_on_error(stream):
                taken += self._note(stream, stream.take(now_ms=now_ms, **terms), now_ms)
        return taken

    def _note(self, stream: KeyedStream, taken: LeaseResult, now_ms: float) -> int:
        """Put what was taken in hand; return how many lines it was."""
        if taken.unfit:
            self._hand.unfit = taken.unfit
            self._large.append(stream.stream)
            return self._put_in_hand(stream, taken)
        wait_ms = max(self._policy.sweep_ms, _SWEEP_MS_EACH * len(self._streams))
        if not taken.leases and taken.wait_ms is not None:
            # Somebody else may be at the end of what was its own, and nobody here would hear of it.
            wait_ms = min(wait_ms, taken.wait_ms, max(_FOREIGN_MS, len(self._streams)))
        self._agenda.put(stream.stream, now_ms + wait_ms)
        return self._put_in_hand(stream, taken)

    def _wait(self, now_ms: float) -> None:
        """Until a stream is said to have something, or may have something by itself."""
        self._report.polled(0)
        wait_ms = max(1.0, min(self._policy.block_ms, self._agenda.wait_ms(now_ms)))
        with contextlib.suppress(Empty):
            self._agenda.put(self._woken.get(timeout=wait_ms / 1000), now_ms)

    def _hear(self, now_ms: float) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._agenda.put(self._woken.get_nowait(), now_ms)
