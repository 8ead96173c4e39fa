"""The breaker of a handler on a worker: stops a broken deployment from emptying a stream into the dead letters."""

import logging
import threading
from collections.abc import Callable, Sequence

from millstream.delivery.commit_store import ENTRY_PREFIX
from millstream.delivery.pause import Pause, pause_of
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.handlers.attempt import DeadLettered
from millstream.handlers.breaker_window import BreakerWindow, Trip, cause_of, example_of, is_keyless
from millstream.handlers.handler import Handler
from millstream.model import Breaker
from millstream.redis_client.key_names import is_redriven

logger = logging.getLogger(__name__)


class HandlerBreaker:
    """The breaker of one handler in one process. `consumer`: the worker's name, which is stored with the pause.

    The committer passes each dead letter to `admits`. Once it is open, this process reads nothing more and writes no
    more dead letters that a broken deployment could explain: these messages are released instead. The renewal thread
    stores the pause in Redis, for the other processes, and closes the breaker when the pause has ended (`follow`).
    """

    def __init__(self, handler: Handler, consumer: str) -> None:
        self._policy: Breaker | None = handler.breaker
        self._label = handler.label
        self._consumer = consumer
        self._window = self._routed = BreakerWindow(Breaker())
        self._reset()
        self._lock = threading.Lock()
        self._opened: Pause | None = None
        self._ended: Pause | None = None
        self._stored: set[str] = set()
        self._paused: set[str] = set()  # by an operator
        self._reported: Pause | None = None

    def is_open(self) -> bool:
        """Return whether this process must read nothing: its breaker has opened, and was not reset since."""
        return self._opened is not None

    def on_processed(self, count: int) -> None:
        """Note that messages were processed."""
        self._window.on_processed(count)

    def on_enqueued(self, count: int) -> None:
        """Note that messages with a key were enqueued."""
        self._routed.on_processed(count)

    def may_enqueue(
        self,
        entries: Sequence[tuple[bytes, Sequence[bytes]]],
        queues: Sequence[bytes],
        refusal_of: Callable[[bytes, Sequence[bytes]], DeadLettered | None],
    ) -> int:
        """Return how many of these entries the router may enqueue. May open the breaker.

        An entry whose key is missing gets a queue of its own, where a corrected handler would not find the key either:
        so the breaker opens here, and all these entries from the first without a key on stay in the stream.
        """
        if self._policy is None:
            return len(queues)
        keyless = [name for name in queues if name.startswith(ENTRY_PREFIX)]
        if not keyless:  # as nearly always
            self.on_enqueued(len(queues))
            return len(queues)
        first = -1
        for at, (name, (entry_id, pairs)) in enumerate(zip(queues, entries, strict=True)):
            dead = refusal_of(entry_id, pairs) if name.startswith(ENTRY_PREFIX) else None
            if dead is None:
                self._routed.on_processed()
                continue
            first = at if first < 0 else first
            if (trip := self._routed.on_dead(cause_of(dead) or "", example_of(dead))) is not None:
                self._open(self._policy, trip)
                return first
        return len(queues)

    def admits(self, delivery: Delivery, dead: DeadLettered) -> bool:
        """Return whether the dead letter may be written; if not, release the message. May open the breaker."""
        cause = cause_of(dead)
        if self._policy is None or cause is None:
            if dead.reason == "rejected":
                self.on_processed(1)
            return True
        if is_keyless(dead):  # the router has counted it, and lets few pass
            return True
        if self._opened is not None:
            return False
        if is_redriven(delivery.pairs):  # it failed before the redrive, too: no evidence about this deployment
            return True
        if (trip := self._window.on_dead(cause, example_of(dead))) is not None:
            self._open(self._policy, trip)
        return True

    def _open(self, policy: Breaker, trip: Trip) -> None:
        pause = pause_of(policy, trip, self._consumer)
        with self._lock:
            self._opened = self._reported = pause
        logger.error("%s is %s", self._label, pause.describe(self._label))

    def follow(self, stream: ReliableStream, before: Pause | None) -> bool:
        """After a refresh of `stream`: store the pause there, or log its beginning or end; return True if it has ended.

        `before`: its pause before the refresh. Raises RedisError if the pause cannot be stored: call it again.
        """
        opened = self._opened
        if stream.pause is not None:
            self._stored.add(stream.stream)
            if stream.pause.by == "breaker":
                self._report(stream.pause)
            elif stream.stream not in self._paused:
                self._paused.add(stream.stream)
                logger.warning("%s is paused by an operator on %s", self._label, stream.stream)
            return False
        if opened is not None and stream.stream not in self._stored:
            stream.store_pause(opened)
            self._stored.add(stream.stream)
            return False
        if before is None and opened is None:
            return False
        ended = opened or before
        # One opening pauses all streams: the window begins anew when the first of them is resumed, and not with each.
        # A pause by an operator is no evidence about the deployment.
        if ended is not None and ended.by == "breaker" and ended != self._ended:
            self._ended = ended
            self._reset()
        self._stored.clear()
        self._paused.discard(stream.stream)
        with self._lock:
            if self._opened is opened:  # else the committer or the router has opened it again meanwhile
                self._opened = None
        logger.warning("%s is resumed on %s", self._label, stream.stream)
        return True

    def _reset(self) -> None:
        self._window, self._routed = BreakerWindow(self._policy or Breaker()), BreakerWindow(self._policy or Breaker())

    def _report(self, pause: Pause) -> None:
        if pause != self._reported:
            self._reported = pause
            logger.warning("%s is %s (worker %s)", self._label, pause.describe(self._label), pause.worker)
