"""What masters do in Redis in the name of consumers: give them messages, and take in what became of these."""

import logging
import time
from collections.abc import Mapping, Sequence

from millstream import metrics as m
from millstream.client import Client, raise_if_error
from millstream.deadletters import DeadLetter, Reason
from millstream.errors import ConfigError
from millstream.keyed import Ending, Lease
from millstream.ledger import FAILED
from millstream.master.registry import Registration, Registry
from millstream.master.settings import MasterSettings
from millstream.master.streams import ConsumerStream, GroupStream
from millstream.metrics import NOBODY, Metrics
from millstream.model import EntryId
from millstream.naming import MASTER
from millstream.reliable import Delivery
from millstream.web.refusal import Refused

logger = logging.getLogger(__name__)

_TRIES = 3


class Desk:
    """Consumers' messages, on the connection of `client`. Threads may share it. Every method raises RedisError.

    `join` comes first.
    """

    def __init__(
        self, client: Client, registry: Registry, settings: MasterSettings, *, metrics: Metrics = NOBODY
    ) -> None:
        self._client = client
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._keys = settings.keys
        self._streams: dict[str, ConsumerStream] = {}
        self.stream = GroupStream(client, settings)

    def join(self) -> None:
        """Make the group if there is none, and take it over, with what is pending there."""
        self.stream.join()

    # Giving

    def deal(self, name: str, found: Registration | None, *, count: int) -> list[bytes]:
        """Give a consumer up to `count` more messages, if it may have some; return their ids."""
        if found is None or found.state != "alive" or self.stream.paused:
            return []
        stream = self._streams.get(name)
        if stream is None or stream.incarnation != found.incarnation:
            stream = self._streams[name] = ConsumerStream(self._client, self._settings, name, found.incarnation)
        return [lease.waiting[0].id for lease in stream.deal(count, found.max_tickets)]

    def forget(self, known: Mapping[str, Registration]) -> None:
        """Drop what is held in memory for consumers that are not registered any more."""
        for name in self._streams.keys() - known.keys():
            self._streams.pop(name, None)

    # Taking in

    def acknowledge(self, name: str, message_id: str) -> tuple[bool, list[bytes]]:
        """A consumer is done with a message: its ticket goes on. Return False if that was known, and what it gets next.

        May be repeated. Raises Refused if somebody else has the message, or nobody.
        """
        for _ in range(_TRIES):
            held = self._held(name, message_id)
            if held is None:
                return self._acknowledged_before(name, message_id), self._next(name)
            if self._commit(held):
                self._metrics.count(m.COMMITTED, handler=self._settings.label)
                return True, self._next(name)
        raise self._not_held(name, message_id)

    def fail(self, name: str, message_id: str, error: str, *, retry: bool = True) -> tuple[str, list[bytes]]:
        """A consumer could not do it: the message is tried again later, or given up; also say what it gets next.

        Return "retry", "dead-letter" or "park". Raises Refused if the consumer does not have the message, as when this
        is repeated.
        """
        held = self._held(name, message_id)
        if held is None:
            raise self._not_held(name, message_id)
        policy = self._settings.retry
        attempts = held.waiting[0].attempt
        if retry and (attempts < policy.attempts or policy.then == "block"):
            outcome, ending = "retry", Ending(held, "later", round(policy.delay_after(attempts)), attempts)
            self._metrics.count(m.RETRIED, handler=self._settings.label)
        elif policy.then == "dead-letter" or not retry:
            letter = self.letter(held.waiting[0], "failed" if retry else "rejected", error)
            if not self._commit(held, letter):
                raise self._not_held(name, message_id)
            return "dead-letter", self._next(name)
        else:
            outcome, ending = "park", Ending(held, "park", error, attempts)
            self._metrics.count(m.PARKED, handler=self._settings.label)
        if self.stream.release([ending]):
            raise self._not_held(name, message_id)
        return outcome, self._next(name)

    def release(self, name: str, message_id: str | None = None) -> int:
        """A consumer gives back a message, or all that it has, as if it had never got them. Return how many."""
        if message_id is not None:
            held = self._held(name, message_id)
            leases = [held] if held else []
        else:
            leases = self.held_by(name)
        refused = self.stream.release([Ending(lease, "first") for lease in leases])
        return len(leases) - len(refused)

    # Looking

    def held_by(self, name: str) -> list[Lease]:
        """What a consumer has now."""
        owners = self._client.execute("HGETALL", self._keys.owners)
        pairs = zip(owners[::2], owners[1::2], strict=True)
        found = [(line, token) for line, token in pairs if holder_of(token) == name]
        heads = self._client.pipeline([("LINDEX", self._keys.line(line), 0) for line, _ in found])
        return [self._lease(*one, head, ()) for one, head in zip(found, heads, strict=True) if isinstance(head, bytes)]

    def letter(self, delivery: Delivery, reason: Reason, error: str) -> DeadLetter:
        """The dead letter of a message."""
        pairs = list(delivery.pairs)
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return DeadLetter(
            stream=self.stream.stream, id=delivery.id.decode(), pairs=pairs, app=MASTER, handler=self._settings.group,
            key=fields.get(self._settings.key.encode()), attempts=delivery.attempt, reason=reason, error=error,
            time_ms=time.time_ns() // 1_000_000,
        )  # fmt: skip

    # Inside

    def _held(self, name: str, message_id: str) -> Lease | None:
        """The lease under which a consumer has a message."""
        entry_id = _entry_id(message_id)
        entries = self._client.execute("XRANGE", self.stream.stream, entry_id, entry_id)
        if not entries:  # it was trimmed meanwhile
            return next((one for one in self.held_by(name) if one.waiting[0].id == entry_id), None)
        line = self.stream.line_of(entry_id, entries[0][1])
        token, head, failed = map(
            raise_if_error,
            self._client.pipeline(
                (
                    ("HGET", self._keys.owners, line),
                    ("LINDEX", self._keys.line(line), 0),
                    ("HGET", self._keys.strikes, entry_id + FAILED.encode()),
                )
            ),
        )
        if token is None or holder_of(token) != name or head != entry_id:
            return None
        return self._lease(line, token, entry_id, entries[0][1], int(failed or 0) + 1)

    def _lease(self, line: bytes, token: bytes, head: bytes, pairs: Sequence[bytes], attempt: int = 1) -> Lease:
        lease = Lease(stream=self.stream, line=line, token=token, state=b"", until_ms=0.0, given=1)
        # With two deliveries or more, what is counted of it is forgotten at its end.
        lease.waiting.append(Delivery(self.stream, head, pairs, attempt, 2, lease=lease))
        return lease

    def _commit(self, held: Lease, letter: DeadLetter | None = None) -> bool:
        """End a message and its consumer's turn with the ticket. False if the lease was lost."""
        unit = self.stream.unit_of(held, list(held.waiting))
        if letter is not None:
            unit.add_dead(letter.items())
        if self.stream.commit([unit], allow_oom=letter is None):
            return False
        if letter is not None:
            self._metrics.count(m.DEAD, handler=self._settings.label, reason=letter.reason)
        self.stream.release([Ending(held, "next")])
        return True

    def _next(self, name: str) -> list[bytes]:
        found = self._registry.get(name)
        if found is not None and found.state == "stuck":
            self._registry.mark(name, "alive")
            found = self._registry.get(name)
        return self.deal(name, found, count=1)

    def _acknowledged_before(self, name: str, message_id: str) -> bool:
        """Whether a message without a lease is done only now; raises Refused if it is not done and not the consumer's."""
        entry_id = _entry_id(message_id)
        pending = self._client.execute("XPENDING", self.stream.stream, self.stream.group, entry_id, entry_id, 1)
        entries = self._client.execute("XRANGE", self.stream.stream, entry_id, entry_id)
        line = self.stream.line_of(entry_id, entries[0][1]) if entries else b""
        if not pending:
            return self.stream.settle(entry_id, line)
        in_line = self._client.execute("LPOS", self._keys.line(line), entry_id) is not None
        if in_line or pending[0][1].decode("utf-8", "replace") != name:
            raise self._not_held(name, message_id)
        self._client.execute("XACK", self.stream.stream, self.stream.group, entry_id)
        logger.warning("consumer %s has taken message %s itself, out of order, and acknowledged it", name, message_id)
        return True

    def _not_held(self, name: str, message_id: str) -> Refused:
        self._metrics.count(m.REFUSED, handler=self._settings.label)
        found = self._registry.get(name)
        if found is not None and found.state == "stuck":
            self._registry.mark(name, "alive")
        return Refused(
            409, f"consumer {name!r} does not have message {message_id} (any more): what it did may be done again"
        )


def holder_of(token: bytes) -> str:
    """The consumer that a lease token was given to."""
    return token.split(b" ", 2)[2].decode("utf-8", "replace")


def _entry_id(text: str) -> bytes:
    try:
        return str(EntryId.parse(text)).encode()
    except ConfigError as error:
        raise Refused(422, f"message_id: {error}") from error
