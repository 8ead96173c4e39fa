"""Masters' holds on the stream: one for the group as a whole, and one in the name of each consumer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from millstream.delivery.key_queues import WAITING
from millstream.delivery.keyed_stream import LEASE_KEYS, KeyedStream, KeyLease, queue_of_key
from millstream.delivery.reliable_stream import NO_LIMIT
from millstream.errors import RedisError
from millstream.redis_client.client import Arg, Client, Command, Reply, Script, raise_if_error
from millstream.redis_client.key_names import MASTER, REDRIVE_FIELD, from_wire
from millstream.services.master.settings import MasterSettings

RENEW_LEASES = Script("master/renew_leases")
REQUEUE_PENDING = Script("keys/requeue_pending")
FINISH = Script("master/finish")
END_LEASE = Script("master/end_lease")

LOST_TOO_OFTEN = "its consumers died or hung, each time"
"""Why a line is parked until a master has moved its first entry to the dead letters."""

_ADOPTED_AT_ONCE = 500
_MOST_WATCHED = 5_000


Settled = Literal["held", "settled", "taken", "done", "ended", "new", "unknown"]
"""What may become of a message that a consumer has no lease on: see master/end_lease.lua."""

Finishing = tuple[str, bytes, bytes]
"""A consumer, the id of a message that it has done, and the message's line."""


class Lost(NamedTuple):
    """A lease that was taken back: "gone" is a holder that died or began anew, "stuck" one that took too long."""

    line: bytes
    id: bytes
    holder: str
    why: Literal["gone", "stuck"]


@dataclass(frozen=True, slots=True)
class RenewResult:
    """What `GroupStream.tend` did: leases extended, ids that count as acknowledged, leases taken back."""

    extended: int
    acknowledged: list[bytes]
    lost: list[Lost]


class GroupStream(KeyedStream):
    """A master's hold on the stream and the group. Methods raise RedisError."""

    def __init__(self, client: Client, settings: MasterSettings) -> None:
        super().__init__(
            client, settings.ticket_stream, line_of=line_by(settings), app=MASTER, handler=settings.group,
            consumer=settings.master,
        )  # fmt: skip
        self._settings = settings
        self._seen_ms: dict[tuple[bytes, str], float] = {}

    def line_of(self, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """The name of an entry's line; b"" if it was redriven for another handler."""
        return self._line_of(entry_id, pairs)

    def tend(self) -> RenewResult:
        """Extend the leases of those who live and are in time, end all others, and see what was acknowledged."""
        retry = self._settings.retry
        most_lost = 0 if retry.then == "block" else retry.attempts
        args = (self._settings.lease_ms, self._settings.delegation_ms, most_lost, LOST_TOO_OFTEN)
        extended, done, *lost = self._as_member(lambda: self._script(RENEW_LEASES, (self.token, self.group, *args)))
        return RenewResult(
            int(extended), done, [Lost(line, one, who.decode(), why.decode()) for line, one, who, why in lost]
        )

    def to_finish(self, messages: Sequence[Finishing]) -> Command:
        """The command that ends messages whose consumers hold them, for who sends it with others."""
        return self._ledger.command(FINISH, self.stream, self._finishing(messages))

    def finished(self, messages: Sequence[Finishing], reply: Reply) -> tuple[int, list[bool]]:
        """Understand its answer: how many lines are ready, and for each message whether it was held, and is done now."""
        if isinstance(reply, RedisError):
            reply = self._as_member(lambda: self._script(FINISH, self._finishing(messages)))
        ready, *done = reply
        return int(ready), list(map(bool, done))

    def _finishing(self, messages: Sequence[Finishing]) -> Sequence[Arg]:
        return (self.token, self.group, *[part for one in messages for part in one])

    def settle(self, consumer: str, entry_id: bytes, line: bytes) -> tuple[Settled, str]:
        """Take in an entry that a consumer has done without a lease; say what became of it, and who has it or has done it."""
        what, who = self._as_member(lambda: self._script(END_LEASE, (self.token, self.group, consumer, entry_id, line)))
        return what.decode(), from_wire(who)

    def adopt_idle(self, now_ms: float) -> list[bytes]:
        """Bring into their lines the messages that somebody else has taken from the group and not acknowledged in time.

        That is, what has been pending with one consumer for `min_idle_ms`, by Redis' count or, as consumers reset that when
        they ask for their messages again, by what this master has seen, at the time `now_ms` of its clock.
        """
        return self._as_member(lambda: self._adopt_idle(now_ms))

    def _adopt_idle(self, now_ms: float) -> list[bytes]:
        seen: dict[tuple[bytes, str], float] = {}
        overdue: list[bytes] = []
        for consumer in self._group.consumers():
            if consumer.name == WAITING or not consumer.pending:
                continue
            for entry in islice(self._group.pending.walk(consumer=consumer.name), _MOST_WATCHED):
                since_ms = seen[entry.id, consumer.name] = self._seen_ms.get((entry.id, consumer.name), now_ms)
                if max(entry.idle_ms, now_ms - since_ms) >= self._settings.min_idle_ms:
                    overdue.append(entry.id)
        self._seen_ms = seen
        found = self._client.pipeline([("XRANGE", self.stream, one, one) for one in overdue[:_ADOPTED_AT_ONCE]])
        args: list[Arg] = []
        nobodys: list[bytes] = []
        for entry_id, entries in zip(overdue, map(raise_if_error, found), strict=False):
            line = self.line_of(entry_id, entries[0][1]) if entries else b""
            if line:
                args += (entry_id, line)
            else:
                nobodys.append(entry_id)
        if nobodys:
            self._group.ack(nobodys)
            self._report_trimmed(nobodys)
        return list(self._script(REQUEUE_PENDING, (self.token, self.group, *args))) if args else []


class ConsumerStream(KeyedStream):
    """A master's hold on the stream in the name of one life of a consumer."""

    def __init__(self, client: Client, settings: MasterSettings, name: str, incarnation: str) -> None:
        super().__init__(
            client, settings.ticket_stream, line_of=line_by(settings), app=MASTER, handler=settings.group, consumer=name
        )
        self._incarnation = incarnation
        self._lease_ms = settings.lease_ms

    @property
    def incarnation(self) -> str:
        """The life of the consumer that it is about."""
        return self._incarnation

    def to_deal(self, count: int, most: int) -> Command:
        """The command that gives the consumer the first messages of up to `count` lines, so that it has `most` at most."""
        args = self._taking(count, count, 1, self._lease_ms, False, (NO_LIMIT, True))
        return self._ledger.command(LEASE_KEYS, self.stream, (*args, most))

    def dealt(self, reply: Reply, count: int, most: int) -> list[KeyLease]:
        """Understand its answer: what it was given."""
        if isinstance(reply, RedisError):
            return self._as_member(lambda: self._take(count, count, 1, self._lease_ms, 0.0, False, most)).leases
        return self.taken(reply, 0.0).leases


class LineOf:
    """Names the line of an entry by its `key` field; b"" for one that was redriven for somebody else than `label`."""

    def __init__(self, key: bytes, label: bytes) -> None:
        self._key = key
        self._label = label

    def __call__(self, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        """The line of the entry with these fields."""
        if pairs and pairs[0] == REDRIVE_FIELD and pairs[1] != self._label:
            return b""
        value = next((pairs[at + 1] for at in range(len(pairs) - 2, -1, -2) if pairs[at] == self._key), b"")
        return queue_of_key(value or None, entry_id)


def line_by(settings: MasterSettings) -> LineOf:
    """How the line of an entry is found."""
    return LineOf(settings.key.encode(), settings.label.encode())
