"""Delegator: assigns messages to consumers and applies their results, in Redis."""

import time
from collections.abc import Mapping, Sequence
from typing import get_args

from millstream.delivery.effects import FAILED_SUFFIX
from millstream.delivery.keyed_stream import KeyLease, LeaseRelease
from millstream.delivery.last_error import LastError
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import ConfigError
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.model import EntryId
from millstream.observability import metrics as m
from millstream.observability.metrics import NO_METRICS, Metrics, init_series
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import MASTER, own_pairs
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import mapping_of, pairs_of
from millstream.services.master.leases import AckOutcome, ConsumerStream, GroupStream
from millstream.services.master.registry import Registration, Registry
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused

_MOST_CACHED_QUEUES = 100_000
"""Number of assigned messages whose key queue is cached in memory; for others it is read from Redis."""


class Delegator:
    """Assigns, acknowledges, fails and releases messages on behalf of consumers, on the connection of `client`.

    Call `join` first. Threads may share it. Every method raises RedisError.
    """

    def __init__(
        self, client: Client, registry: Registry, settings: MasterSettings, *, metrics: Metrics = NO_METRICS
    ) -> None:
        self._client = client
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        init_series(
            metrics, m.READ, m.COMMITTED, m.RETRIED, m.PARKED, m.REFUSED, m.CLAIMED, handler=settings.label
        )  # also what the loop and the acknowledgements of this master count
        for reason in get_args(Reason):
            init_series(metrics, m.DEAD_LETTERED, handler=settings.label, reason=reason)
        self._keys = settings.keys
        self._consumer_streams: dict[str, ConsumerStream] = {}
        self._queue_cache: dict[bytes, bytes] = {}
        self.group_stream = GroupStream(client, settings)

    @property
    def label(self) -> str:
        """The value of the label `handler` in metrics."""
        return self._settings.label

    def join(self) -> None:
        """Create the group if it is missing, and take it over with its pending messages."""
        self.group_stream.join()

    # Assignment

    def assign(self, name: str, registration: Registration | None, *, count: int) -> list[bytes]:
        """Assign up to `count` more messages to a consumer, within its `max_tickets`; return their ids."""
        return [] if registration is None else self.assign_all([(name, registration, count)]).get(name, [])

    def assign_all(self, wanted: Sequence[tuple[str, Registration, int]]) -> dict[str, list[bytes]]:
        """Assign messages to many consumers in one round trip; return the ids per consumer."""
        if self.group_stream.paused:
            return {}
        calls = [
            (name, self._consumer_stream(name, registration).assign_call(count, registration.max_tickets))
            for name, registration, count in wanted
            if registration.state == "alive"
        ]
        results = self._client.run_all([call for _, call in calls])
        assigned: dict[str, list[bytes]] = {}
        for (name, _), result in zip(calls, results, strict=True):
            leases = raise_if_error(result)
            assigned[name] = [lease.entries[0].id for lease in leases]
            self._queue_cache.update((lease.entries[0].id, lease.queue) for lease in leases)
        if len(self._queue_cache) > _MOST_CACHED_QUEUES:
            self._queue_cache.clear()
        return assigned

    def _consumer_stream(self, name: str, registration: Registration) -> ConsumerStream:
        stream = self._consumer_streams.get(name)
        if stream is None or stream.incarnation != registration.incarnation:
            stream = self._consumer_streams[name] = ConsumerStream(
                self._client, self._settings, name, registration.incarnation
            )
            stream.join_like(self.group_stream)
        return stream

    def prune(self, known: Mapping[str, Registration]) -> None:
        """Drop the in-memory state of consumers that are no longer registered."""
        for name in self._consumer_streams.keys() - known.keys():
            self._consumer_streams.pop(name, None)

    # Results

    def ack_refusal(self, name: str, entry_id: bytes, outcome: AckOutcome, other: str) -> Refused:
        """The refusal for a consumer that acknowledged a message it does not have; `other` has it or has done it."""
        message_id = entry_id.decode()
        if outcome == "unknown":
            return Refused(
                404, f"there is no message {message_id} in {self.group_stream.stream}: it never existed or was trimmed"
            )
        return self._refusal(name, message_id, _describe(outcome, other))

    def queues_of(self, messages: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """The key queue of each message, given by consumer and id; b"" where it is unknown."""
        uncached = list(dict.fromkeys(one for _, one in messages if one not in self._queue_cache))
        read = dict(zip(uncached, self._read_queues(uncached), strict=True)) if uncached else {}
        queues = [self._queue_cache.pop(one, b"") or read.get(one, b"") for _, one in messages]
        trimmed = {name for (name, _), queue in zip(messages, queues, strict=True) if not queue}
        leased = {(name, lease.queued[0].id): lease.queue for name in trimmed for lease in self.leases_of(name)}
        return [queue or leased.get(message, b"") for message, queue in zip(messages, queues, strict=True)]

    def _read_queues(self, ids: Sequence[bytes]) -> list[bytes]:
        found = call_all(self._client, [("XRANGE", self.group_stream.stream, one, one) for one in ids])
        return [
            self.group_stream.queue_of(one, entries[0][1]) if entries else b""
            for one, entries in zip(ids, found, strict=True)
        ]

    def ack_unleased(self, name: str, entry_id: bytes) -> tuple[AckOutcome, str]:
        """Acknowledge a message without a lease; return its outcome, and the consumer that has it or has done it."""
        (queue,) = self._read_queues([entry_id])
        return self.group_stream.ack_unleased(name, entry_id, queue)

    def fail(self, name: str, message_id: str, error: str, *, retry: bool = True) -> tuple[str, list[bytes]]:
        """Apply a consumer's failure: retry the message later, dead-letter it or park its ticket.

        Return "retry", "dead-letter" or "park", and the ids of the consumer's next messages. Raises Refused if the
        consumer does not have the message, as when the call is repeated.
        """
        lease = self._find_lease(name, message_id)
        if lease is None:
            raise self._lost_lease_refusal(name, message_id)
        policy = self._settings.retry
        attempts = lease.queued[0].attempt
        if retry and (attempts < policy.attempts or policy.then == "block"):
            delay_ms = round(policy.delay_after(attempts))
            outcome, result = (
                "retry",
                LeaseRelease(lease, "backoff", delay_ms, attempts, LastError.of(error, policy).pack()),
            )
            self._metrics.count(m.RETRIED, handler=self._settings.label)
        elif policy.then == "dead-letter" or not retry:
            letter = self.dead_letter(lease.queued[0], "failed" if retry else "rejected", error)
            if not self._dead_letter_and_release(lease, letter):
                raise self._lost_lease_refusal(name, message_id)
            return "dead-letter", self._assign_next(name)
        else:
            outcome, result = "park", LeaseRelease(lease, "park", error, attempts, LastError.of(error, policy).pack())
            self._metrics.count(m.PARKED, handler=self._settings.label)
        if self.group_stream.release_leases([result]):
            raise self._lost_lease_refusal(name, message_id)
        return outcome, self._assign_next(name)

    def release(self, name: str, message_id: str | None = None) -> int:
        """Release one message of a consumer, or all of them, without counting an attempt; return their number."""
        if message_id is not None:
            lease = self._find_lease(name, message_id)
            leases = [lease] if lease else []
        else:
            leases = self.leases_of(name)
        refused = self.group_stream.release_leases([LeaseRelease(lease, "return") for lease in leases])
        return len(leases) - len(refused)

    # Queries

    def leases_of(self, name: str) -> list[KeyLease]:
        """The leases of a consumer."""
        owners = self._client.execute("HGETALL", self._keys.owners)
        pairs = pairs_of(owners)
        owned = [(queue, token) for queue, token in pairs if holder_of(token) == name]
        heads = self._client.pipeline([("LINDEX", self._keys.queue(queue), 0) for queue, _ in owned])
        return [
            self._make_lease(*one, head, ()) for one, head in zip(owned, heads, strict=True) if isinstance(head, bytes)
        ]

    def dead_letter(self, delivery: Delivery, reason: Reason, error: str) -> DeadLetter:
        """The dead letter of a message."""
        pairs = own_pairs(delivery.pairs)
        fields = mapping_of(pairs)
        return DeadLetter(
            stream=self.group_stream.stream,
            id=delivery.id.decode(),
            pairs=pairs,
            app=MASTER,
            handler=self._settings.group,
            key=fields.get(self._settings.key.encode()),
            attempts=delivery.attempt,
            reason=reason,
            error=error,
            time_ms=time.time_ns() // 1_000_000,
        )

    # Internals

    def _find_lease(self, name: str, message_id: str) -> KeyLease | None:
        """A consumer's lease on a message, or None."""
        entry_id = entry_id_of(message_id)
        entries = self._client.execute("XRANGE", self.group_stream.stream, entry_id, entry_id)
        if not entries:  # it was trimmed meanwhile
            return next((one for one in self.leases_of(name) if one.queued[0].id == entry_id), None)
        queue = self.group_stream.queue_of(entry_id, entries[0][1])
        token, head, failed = call_all(
            self._client,
            (
                ("HGET", self._keys.owners, queue),
                ("LINDEX", self._keys.queue(queue), 0),
                ("HGET", self._keys.crashes, entry_id + FAILED_SUFFIX.encode()),
            ),
        )
        if token is None or holder_of(token) != name or head != entry_id:
            return None
        return self._make_lease(queue, token, entry_id, entries[0][1], int(failed or 0) + 1)

    def _make_lease(
        self, queue: bytes, token: bytes, head: bytes, pairs: Sequence[bytes], attempt: int = 1
    ) -> KeyLease:
        lease = KeyLease(
            stream=self.group_stream, queue=queue, token=token, state=b"", expires_ms=0.0, in_flight_count=1
        )
        # With a delivery count of two or more, the commit also clears the entry's failure and crash counts.
        lease.queued.append(Delivery(self.group_stream, head, pairs, attempt, 2, lease=lease))
        return lease

    def _dead_letter_and_release(self, lease: KeyLease, letter: DeadLetter) -> bool:
        """Dead-letter a message and release its lease. False if the lease was lost."""
        effects = self.group_stream.key_effects_of(lease, list(lease.queued))
        effects.add_dead_letter(letter.items())
        if self.group_stream.commit([effects]):
            return False
        self._metrics.count(m.DEAD_LETTERED, handler=self._settings.label, reason=letter.reason)
        self.group_stream.release_leases([LeaseRelease(lease, "requeue")])
        return True

    def _assign_next(self, name: str) -> list[bytes]:
        registration = self._registry.get(name)
        if registration is not None and registration.state == "stuck":
            self._registry.set_state(name, "alive")
            registration = self._registry.get(name)
        return self.assign(name, registration, count=1)

    def _lost_lease_refusal(self, name: str, message_id: str) -> Refused:
        registration = self._registry.get(name)
        if registration is not None and registration.state == "stuck":
            self._registry.set_state(name, "alive")
        return self._refusal(name, message_id, "the message may be processed again")

    def _refusal(self, name: str, message_id: str, why: str) -> Refused:
        self._metrics.count(m.REFUSED, handler=self.label)
        return Refused(409, f"consumer {name!r} does not have message {message_id} (any more): {why}")


def _describe(outcome: AckOutcome, other: str) -> str:
    if outcome == "pending":
        return f"{other!r} has it" if other else "it is queued behind earlier messages of its ticket"
    if outcome == "done":
        return f"{other!r} has done it"
    return "it is not assigned to any consumer yet" if outcome == "new" else "it was done or dead-lettered before"


def holder_of(token: bytes) -> str:
    """The consumer that holds a lease token."""
    return token.split(b" ", 2)[2].decode("utf-8", "replace")


def entry_id_of(text: str) -> bytes:
    """The id of a message as Redis writes it. Raises Refused if it is not an entry id."""
    try:
        return str(EntryId.parse(text)).encode()
    except ConfigError as error:
        raise Refused(422, f"message_id: {error}") from error
