"""DelegationLoop: enqueues new messages per key, assigns ready ones to free consumers, and renews or ends leases."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from millstream.admin.key_queues import skip, unpark
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import GroupMissing, Unavailable
from millstream.observability import metrics as m
from millstream.observability.health import Progress
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import pairs_of, time_ms_of
from millstream.services.master.delegation import Delegator, holder_of
from millstream.services.master.leases import LOST_CONSUMERS
from millstream.services.master.registry import Registration, Registry
from millstream.services.master.settings import MasterSettings

logger = logging.getLogger(__name__)

_BLOCK_MS = 200
_PAUSE_S = 0.05
_MIN_INTERVAL_MS = 10.0
"""Minimum time between the starts of two iterations: under load, many messages share the cost of one."""
_ENQUEUED_AT_ONCE = 500
_TIMEOUT_SLACK_MS = 5_000
_STATES = ("alive", "stuck", "dead")


class DelegationLoop:
    """The loop of one master. Any number of masters may run it at once.

    It opens two connections to `url`, as it blocks on one of them for new messages.
    """

    def __init__(
        self,
        url: str,
        delegator: Delegator,
        registry: Registry,
        settings: MasterSettings,
        *,
        progress: Progress,
        metrics: Metrics = NO_METRICS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._blocking_client = Client(url, timeout_ms=_BLOCK_MS + _TIMEOUT_SLACK_MS, clock=clock)
        self._client = Client(url, clock=clock)
        self._delegator = delegator
        self._registry = registry
        self._settings = settings
        self._progress = progress
        self._metrics = metrics
        self._clock = clock
        self._keys = settings.keys
        self._renew_interval_ms = min(1_000.0, settings.lease_ms / 4, settings.delegation_ms / 4)
        self._claim_interval_ms = min(10_000.0, settings.claim_idle_ms / 4)
        self._renewed_ms = self._claimed_ms = self._iteration_ms = float("-inf")

    def check_leases_now(self) -> None:
        """Check all leases in the next iteration."""
        self._renewed_ms = float("-inf")

    def run(self, stopping: threading.Event) -> None:
        """Run until `stopping` is set. Waits while Redis is unavailable; raises StaleOwner and other RedisErrors."""
        try:
            self._retry_while_unavailable(self._delegator.join, stopping)
            while not stopping.is_set():
                self._retry_while_unavailable(self._run_once, stopping)
                self._wait_for_messages(stopping)
        except Unavailable:
            if not stopping.is_set():
                raise
        finally:
            self._blocking_client.close()
            self._client.close()

    def _retry_while_unavailable(self, step: Callable[[], None], stopping: threading.Event) -> None:
        self._client.retry_while_unavailable(step, what=self._settings.label, give_up=stopping.is_set)

    def _run_once(self) -> None:
        now_ms = self._iteration_ms = self._clock.monotonic_ms()
        if now_ms - self._renewed_ms >= self._renew_interval_ms:
            self._renewed_ms = now_ms
            self._delegator.group_stream.refresh()
            self._metrics.set(m.PAUSED, float(self._delegator.group_stream.paused), handler=self._settings.label)
            self._renew_leases()
        if now_ms - self._claimed_ms >= self._claim_interval_ms:
            self._claimed_ms = now_ms
            self._claim_idle(now_ms)
        if not self._delegator.group_stream.paused:
            self._enqueue_new()
            self._assign_ready()
        self._progress.on_read()

    # Leases

    def _renew_leases(self) -> None:
        result = self._delegator.group_stream.renew_consumer_leases()
        for name in {lost.holder for lost in result.revoked if lost.cause == "stuck"}:
            self._registry.set_state(name, "stuck")
            logger.warning(
                "consumer %s is stuck: it held a message longer than %.0f s; "
                "no more are assigned to it until it finishes one or registers again",
                name,
                self._settings.delegation_ms / 1000,
            )
        if result.acknowledged:
            self._metrics.count(m.COMMITTED, len(result.acknowledged), handler=self._settings.label)
        self._dead_letter_parked()
        self._report_metrics(result.renewed)

    def _dead_letter_parked(self) -> None:
        """Dead-letter messages that lost too many leases and may have crashed consumers; their queues go on."""
        if self._settings.retry.then != "dead-letter":
            return
        parked = self._client.execute("HGETALL", self._keys.parked)
        for queue, note in pairs_of(parked):
            why = note.partition(b" ")[2].decode("utf-8", "replace")
            if why.startswith(LOST_CONSUMERS):
                skipped = skip(self._client, self._keys, queue, error=why, reason="crashed")
                if skipped is not None:
                    self._metrics.count(m.DEAD_LETTERED, handler=self._settings.label, reason="crashed")
                    logger.warning("message %s was dead-lettered: %s", skipped, why)
                unpark(self._client, self._keys, queue)

    def _claim_idle(self, now_ms: float) -> None:
        claimed = self._delegator.group_stream.claim_idle_messages(now_ms)
        if claimed:
            self._metrics.count(m.CLAIMED, len(claimed), handler=self._settings.label)
            logger.warning("%d idle messages were claimed; they are in their key queues again", len(claimed))

    # New messages

    def _enqueue_new(self) -> None:
        enqueued = self._delegator.group_stream.enqueue_new(
            count=_ENQUEUED_AT_ONCE, max_pending=self._settings.max_queued
        )
        self._metrics.count(m.READ, enqueued, handler=self._settings.label)

    def _assign_ready(self) -> None:
        """Assign ready messages in equal shares, first to the consumers that hold the fewest."""
        ready, due, time, owners = call_all(
            self._client,
            (
                ("LLEN", self._keys.ready),
                ("ZRANGE", self._keys.backoff, 0, 0, "WITHSCORES"),
                ("TIME",),
                ("HVALS", self._keys.owners),
            ),
        )
        if due and float(due[1]) <= time_ms_of(time):
            ready += 1
        if not ready:
            return
        consumers = self._registry.all()
        self._delegator.prune(consumers)
        held = Counter(map(holder_of, owners))
        free = [(held[name], name, found) for name, found in consumers.items() if _is_free(found, held[name])]
        share = -(-ready // max(1, len(free)))
        self._delegator.assign_all([(name, found, share) for _, name, found in sorted(free, key=lambda one: one[:2])])

    def _wait_for_messages(self, stopping: threading.Event) -> None:
        """Wait for a new message, between the minimum interval and the time of a blocking read."""
        stopping.wait(max(0.0, self._iteration_ms + _MIN_INTERVAL_MS - self._clock.monotonic_ms()) / 1000)
        stream = self._delegator.group_stream
        if stream.paused or stream.pending_count >= self._settings.max_queued:
            stopping.wait(_PAUSE_S)
            return
        try:
            self._blocking_client.execute(
                "XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", stream.stream, stream.enqueued_id
            )
        except (Unavailable, GroupMissing):
            stopping.wait(_PAUSE_S)

    def _report_metrics(self, extended: int) -> None:
        label = self._settings.label
        self._metrics.set(m.IN_FLIGHT, extended, handler=label)
        self._metrics.set(m.QUEUED, max(0, self._delegator.group_stream.pending_count - extended), handler=label)
        states: Counter[str] = Counter(found.state for found in self._registry.all().values())
        for state in _STATES:
            self._metrics.set(m.CONSUMERS, states[state], handler=label, state=state)


def _is_free(found: Registration, held: int) -> bool:
    return found.state == "alive" and held < found.max_tickets
