"""Key router: one worker at a time routes the new entries of a stream to key queues."""

import logging
import threading
from collections.abc import Mapping, Sequence

from millstream.delivery.keyed_stream import NEARLY_FULL, KeyedStream
from millstream.errors import AccessDenied, Unavailable, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import from_wire
from millstream.redis_client.resp import Arg
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.poll_wait import PollWait
from millstream.worker.fetching.router_role import ROLE_MS, RouterRole
from millstream.worker.stream_exclusion import concerns_one_stream, exclude_on_error

logger = logging.getLogger(__name__)


_ROUTED_AT_ONCE = 4_000
"""Large: entries routed further ahead make lease slices longer, and a slice costs Redis as much as some messages."""
_WARN_AFTER_FAILURES = 10
_POLL_MS_EACH = 20.0
_OTHERS_MS = 50.0


class KeyRouter:
    """Routes new entries to key queues, of each stream on which this worker is the router. Used by one thread.

    * `client`: a connection for routing
    * `joined`: the streams that the worker has joined; only those are routed that may be read
    * `role`: the role that this worker has to acquire; None: no other worker routes these streams
    """

    def __init__(
        self, context: WorkerContext, client: Client, joined: Mapping[str, KeyedStream], role: RouterRole | None
    ) -> None:
        self._context = context
        self._client = client
        self._clock = context.clock
        self._policy = context.policy
        self._joined = joined
        self._role = role
        self._nearly_full: set[str] = set()
        self._full: set[str] = set()
        self._with_new: set[str] = set()
        self._check_all_due_ms = 0.0
        self._poll_due_ms = 0.0
        self._poll_wait = PollWait(min(self._policy.sweep_ms, ROLE_MS / 3))
        self._failures, self._is_refusal_logged = 0, False
        self.streams: dict[str, KeyedStream] = {}
        """Streams to route, each on a connection for routing; other threads add and remove some."""

    def add(self, stream: KeyedStream) -> None:
        """Route this stream; its client is one for routing."""
        self.streams[stream.stream] = stream

    @property
    def owned(self) -> Sequence[str]:
        """The streams of which this worker has acquired the role of router, as far as it knows."""
        return () if self._role is None else tuple(self._role.held)

    def _is_owned(self, name: str) -> bool:
        return self._role is None or name in self._role.held

    def _readable(self, name: str) -> bool:
        stream = self._joined.get(name)  # another thread may remove it meanwhile
        return stream is not None and stream.readable

    def run(self, stopping: threading.Event) -> None:
        """Route until `stopping`. Raises StaleOwner, and RedisError except Unavailable."""
        while not stopping.is_set():
            try:
                mine = self._owned_streams()
                due = self._due_streams(mine)
                self._route_all(due)
                if due or not mine:  # after a refusal nothing is due, until the next poll has found new entries again
                    self._on_routed()
                self._warn_full(due)
                not_full = [one for one in mine if one.stream not in self._full]
                if not self._with_new:
                    self._wait(not_full, stopping)
                    continue
                self._poll_wait.reset()
                if self._clock.monotonic_ms() >= self._poll_due_ms and not self._client.is_cluster:
                    self._poll(not_full)  # a stream that always has new entries must not hide the others
            except Unavailable as error:
                if self._role is not None:
                    self._role.make_due()
                self._log_unavailable(error)
                stopping.wait(self._policy.sweep_ms / 1000)
            except (WrongType, AccessDenied) as error:  # concerns one of the streams it blocked on
                if self._role is not None or not concerns_one_stream(error):
                    raise
                self._check_all_due_ms = 0.0
        if self._role is not None:
            self._role.release()

    def _log_unavailable(self, error: Unavailable) -> None:
        """Warn once it has lasted, unless the log has an outage of the handler already, which another part waits for."""
        self._failures += 1
        context, label = self._context, self._context.handler.label
        is_due = self._failures >= _WARN_AFTER_FAILURES and not self._is_refusal_logged
        if is_due and not (context.client.is_awaited_by(label) or context.fetch_outage.is_short_of_memory):
            self._is_refusal_logged = True
            logger.warning("%s cannot enqueue new entries: %s; retrying", label, error)
        else:
            logger.debug("%s cannot enqueue new entries: %s; retrying", label, error)

    def _on_routed(self) -> None:
        """Note that Redis has answered."""
        self._failures, self._is_refusal_logged = 0, False

    def _route_all(self, due: Sequence[KeyedStream]) -> None:
        """Route new entries of each stream; then raise the error of those that failed, perhaps of one server only."""
        self._with_new = set()
        away: Unavailable | None = None
        for stream in due:
            try:
                has_more = self._route(stream)
            except Unavailable as error:
                away = error
                if not self._client.is_cluster:
                    break
            else:
                if has_more:
                    self._with_new.add(stream.stream)
        if away is not None:
            raise away

    def _route(self, stream: KeyedStream) -> bool:
        """Route new entries of a stream; return whether there may be more."""
        before = stream.enqueued_id
        count = 0
        with exclude_on_error(stream):
            count = stream.enqueue_new(count=_ROUTED_AT_ONCE, max_pending=self._policy.look_ahead)
        if stream.leaving:
            self.streams.pop(stream.stream, None)
        # Without new entries a changed position means that Redis lost writes, or that a reply was lost.
        has_more = count > 0 or stream.enqueued_id != before
        if has_more:
            self._notify(stream)
        return has_more

    def _notify(self, stream: KeyedStream) -> None:
        """Notify of new entries in key queues. Nothing to do here: Redis has woken the workers that block on it."""

    def _owned_streams(self) -> list[KeyedStream]:
        """Return the streams on which this worker is the router, as of a second ago at most."""
        # Other threads may remove some meanwhile.
        streams = self.streams.copy()
        if self._role is not None:
            self._role.acquire(streams)
        return [stream for name, stream in streams.items() if self._is_owned(name) and self._readable(name)]

    def _due_streams(self, mine: Sequence[KeyedStream]) -> Sequence[KeyedStream]:
        """Return the streams with new entries, as far as known; from time to time all, as notifications may be lost."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._check_all_due_ms:
            return [one for one in mine if one.stream in self._with_new or one.stream in self._full]
        self._check_all_due_ms = now_ms + max(ROLE_MS / 3, _POLL_MS_EACH * len(mine))
        return mine

    def _warn_full(self, mine: Sequence[KeyedStream]) -> None:
        """Warn where the key queues are full, which pauses routing, and where they are nearly full."""
        most = self._policy.look_ahead
        for stream in mine:
            name, share, label = stream.stream, stream.pending_count / most, self._context.keys_of(stream.stream).label
            if share < NEARLY_FULL:
                self._nearly_full.discard(name)
                self._full.discard(name)
                continue
            if name not in self._nearly_full:
                self._nearly_full.add(name)
                logger.warning(
                    "%s: key queues of %s are nearly full: they hold %d entries of at most %d; full queues block all "
                    "other keys. Run `millstream key list %s` to see which keys fill them, and unblock those, or raise "
                    "--look-ahead",
                    label,
                    name,
                    stream.pending_count,
                    most,
                    label,
                )
            if share < 1:
                self._full.discard(name)
            elif name not in self._full:
                self._full.add(name)
                logger.warning(
                    "%s: key queues of %s are full: they hold %d entries; routing is paused until there are fewer",
                    label,
                    name,
                    stream.pending_count,
                )

    def _wait(self, mine: Sequence[KeyedStream], stopping: threading.Event) -> None:
        if not mine or (self._client.is_cluster and len(mine) > 1):
            wait_ms = self._poll_wait.next_ms(len(mine)) if mine else self._policy.sweep_ms
            stopping.wait(wait_ms / 1000)
            self._with_new = {one.stream for one in mine}
            return
        self._poll(mine, "BLOCK", min(self._policy.block_ms, ROLE_MS // 3))

    def _poll(self, mine: Sequence[KeyedStream], *block: Arg) -> None:
        """Find out which streams have new entries."""
        after = [one.enqueued_id for one in mine]
        names = [one.stream for one in mine]
        found = self._client.execute("XREAD", "COUNT", 1, *block, "STREAMS", *names, *after) if mine else ()
        self._with_new |= {from_wire(name) for name, _ in found or ()}
        self._poll_due_ms = self._clock.monotonic_ms() + _OTHERS_MS
