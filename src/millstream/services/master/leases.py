"""GroupStream and ConsumerStream: the keyed stream as a master uses it, for the group and on behalf of one consumer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, TypeVar

from millstream.delivery.keyed_stream import LEASE_KEYS, KeyedStream, KeyLease, queue_of_key
from millstream.delivery.reliable_stream import NO_LIMIT
from millstream.errors import CommandFailed, GroupMissing, RedisError
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import MASTER, REDRIVE_FIELD, WAITING, from_wire
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.resp import Arg, Reply
from millstream.redis_client.scripts import Script
from millstream.services.master.settings import MasterSettings

T = TypeVar("T")

RENEW_LEASES = Script("master/renew_leases")
REQUEUE_PENDING = Script("keys/requeue_pending")
FINISH = Script("master/finish")
END_LEASE = Script("master/end_lease")

LOST_CONSUMERS = "lost its consumer "
"""The beginning of why a key queue is parked until a master has dead-lettered its first entry."""

_CLAIMED_AT_ONCE = 500
_MOST_WATCHED = 5_000


AckOutcome = Literal["pending", "acked", "acked-foreign", "done", "ended", "new", "unknown"]
"""The outcome of acknowledging a message without a lease: see master/end_lease.lua."""

FinishedMessage = tuple[str, bytes, bytes]
"""A consumer, the id of a message that it has processed, and the message's key queue."""


class RevokedLease(NamedTuple):
    """A revoked lease, and why its holder has lost it.

    * `cause`: "unhealthy": its health checks failed; "registered": it registered again, as another process; "stuck":
      it was over the delegation time; "left": it is not registered any more, which is not counted against the message
    """

    queue: bytes
    id: bytes
    holder: str
    cause: Literal["unhealthy", "registered", "stuck", "left"]


@dataclass(frozen=True, slots=True)
class RenewResult:
    """The result of one renewal: leases renewed, ids that were acknowledged with XACK, leases revoked."""

    renewed: int
    acknowledged: list[bytes]
    revoked: list[RevokedLease]


def _if_gone(repeat: Callable[[], T]) -> Callable[[RedisError], T]:
    """For `Call.on_error`: calls `repeat` where the script has done nothing as the group or its owner is gone; raises other
    errors, after which it may have done a part.
    """

    def on_error(error: RedisError) -> T:
        if isinstance(error, GroupMissing) or (isinstance(error, CommandFailed) and error.code == "STALE"):
            return repeat()
        raise error

    return on_error


class GroupStream(KeyedStream):
    """The stream and its group, as a member that all masters share. Methods raise RedisError."""

    def __init__(self, client: Client, settings: MasterSettings) -> None:
        super().__init__(
            client,
            settings.ticket_stream,
            queue_of=queue_namer(settings),
            app=MASTER,
            handler=settings.group,
            consumer=settings.master,
        )
        self._settings = settings
        self._first_seen_ms: dict[tuple[bytes, str], float] = {}

    def queue_of(self, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """The name of an entry's key queue; b"" if the entry is for another handler alone."""
        return self._queue_of(entry_id, pairs)

    def renew_consumer_leases(self) -> RenewResult:
        """Renew the leases of live consumers within the delegation time, revoke all others, and detect XACKs."""
        retry = self._settings.retry
        max_lost = 0 if retry.then == "block" else retry.attempts
        args = (self._settings.lease_ms, self._settings.delegation_ms, max_lost, LOST_CONSUMERS)
        extended, done, *lost = self._with_rejoin(
            lambda: self._run_script(RENEW_LEASES, (self.token, self.group, *args))
        )
        return RenewResult(
            int(extended),
            done,
            [RevokedLease(queue, one, holder.decode(), why.decode()) for queue, one, holder, why in lost],
        )

    def finish_call(self, messages: Sequence[FinishedMessage]) -> Call[tuple[int, list[bool]]]:
        """The call that finishes messages held by their consumers. The error of a group or an owner that is gone repeats it.

        Its result: the number of ready key queues, and for each message whether it was held and is done now.
        """

        def args() -> Sequence[Arg]:  # the token may be another after the group was joined again
            return (self.token, self.group, *[part for one in messages for part in one])

        def parse(reply: Reply) -> tuple[int, list[bool]]:
            ready, *done = reply
            return int(ready), list(map(bool, done))

        def repeat() -> tuple[int, list[bool]]:
            return parse(self._with_rejoin(lambda: self._run_script(FINISH, args())))

        return Call(self._store.script_command(FINISH, self.stream, args()), parse, on_error=_if_gone(repeat))

    def ack_unleased(self, consumer: str, entry_id: bytes, queue: bytes) -> tuple[AckOutcome, str]:
        """Acknowledge an entry without a lease; return its outcome, and the consumer that has it or has done it."""
        args = (self.token, self.group, consumer, entry_id, queue)
        outcome, other = self._with_rejoin(lambda: self._run_script(END_LEASE, args))
        return outcome.decode(), from_wire(other)

    def claim_idle_messages(self, now_ms: float) -> list[bytes]:
        """Claim idle messages that consumers read from the group without a master, into their key queues.

        A message is idle if it has been pending with one consumer for the setting `claim_idle_ms`: by Redis' idle time, or, as
        consumers reset that whenever they read their messages again, by this master's own observation. `now_ms` is the
        time of the master's clock. Return their ids.
        """
        return self._with_rejoin(lambda: self._claim_idle_messages(now_ms))

    def _claim_idle_messages(self, now_ms: float) -> list[bytes]:
        seen: dict[tuple[bytes, str], float] = {}
        overdue: list[bytes] = []
        for consumer in self._group.consumers():
            if consumer.name == WAITING or not consumer.pending:
                continue
            for entry in islice(self._group.pending.iter_entries(consumer=consumer.name), _MOST_WATCHED):
                since_ms = seen[entry.id, consumer.name] = self._first_seen_ms.get((entry.id, consumer.name), now_ms)
                if max(entry.idle_ms, now_ms - since_ms) >= self._settings.claim_idle_ms:
                    overdue.append(entry.id)
        self._first_seen_ms = seen
        found = call_all(self._client, [("XRANGE", self.stream, one, one) for one in overdue[:_CLAIMED_AT_ONCE]])
        args: list[Arg] = []
        trimmed: list[bytes] = []
        for entry_id, entries in zip(overdue, found, strict=False):
            queue = self.queue_of(entry_id, entries[0][1]) if entries else b""
            if queue:
                args += (entry_id, queue)
            else:
                trimmed.append(entry_id)
        if trimmed:
            self._group.ack(trimmed)
            self._report_trimmed(trimmed)
        return list(self._run_script(REQUEUE_PENDING, (self.token, self.group, *args))) if args else []


class ConsumerStream(KeyedStream):
    """The stream on behalf of one incarnation of a consumer."""

    def __init__(self, client: Client, settings: MasterSettings, name: str, incarnation: str) -> None:
        super().__init__(
            client,
            settings.ticket_stream,
            queue_of=queue_namer(settings),
            app=MASTER,
            handler=settings.group,
            consumer=name,
        )
        self._incarnation = incarnation
        self._lease_ms = settings.lease_ms

    @property
    def incarnation(self) -> str:
        """The consumer's incarnation."""
        return self._incarnation

    def assign_call(self, count: int, most: int) -> Call[list[KeyLease]]:
        """The call that leases up to `count` ready key queues to the consumer, which may hold `most` in total.

        The error of a group or an owner that is gone repeats it. Its result: the leases that the consumer got.
        """
        args = self._lease_args(count, count, 1, self._lease_ms, False, (NO_LIMIT, True))

        def parse(reply: Reply) -> list[KeyLease]:
            return self._parse_lease_keys(0.0, reply).leases

        def repeat() -> list[KeyLease]:
            return self._with_rejoin(lambda: self._lease_keys(count, count, 1, self._lease_ms, 0.0, False, most)).leases

        command = self._store.script_command(LEASE_KEYS, self.stream, (*args, most))
        return Call(command, parse, on_error=_if_gone(repeat))


class QueueNamer:
    """Names the key queue of an entry by its field `key`; b"" if it is for another handler than `label` alone."""

    def __init__(self, key: bytes, label: bytes) -> None:
        self._key = key
        self._label = label

    def __call__(self, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """The key queue of the entry with these fields."""
        if pairs and pairs[0] == REDRIVE_FIELD and pairs[1] != self._label:
            return b""
        value = next((pairs[at + 1] for at in range(len(pairs) - 2, -1, -2) if pairs[at] == self._key), b"")
        return queue_of_key(value or None, entry_id)


def queue_namer(settings: MasterSettings) -> QueueNamer:
    """The function that names the key queue of an entry."""
    return QueueNamer(settings.key.encode(), settings.label.encode())
