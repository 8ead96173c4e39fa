"""What masters do in Redis in the name of consumers: give them messages, and take in what became of these."""

import time
from collections.abc import Mapping, Sequence

from millstream.delivery.commit_store import FAILED
from millstream.delivery.keyed_stream import KeyLease, LeaseRelease
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import ConfigError
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.model import EntryId
from millstream.observability import metrics as m
from millstream.observability.metrics import NOBODY, Metrics
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import MASTER
from millstream.services.master.leases import ConsumerStream, GroupStream, Settled
from millstream.services.master.registry import Registration, Registry
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused

_MOST_LINES = 100_000
"""Of so many messages that were given out it is remembered in which lines they are; of others Redis is asked."""


class Delegator:
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
        self._lines: dict[bytes, bytes] = {}
        self.stream = GroupStream(client, settings)

    @property
    def label(self) -> str:
        """The name of the work in figures."""
        return self._settings.label

    def join(self) -> None:
        """Make the group if there is none, and take it over, with what is pending there."""
        self.stream.join()

    # Giving

    def deal(self, name: str, found: Registration | None, *, count: int) -> list[bytes]:
        """Give a consumer up to `count` more messages, if it may have some; return their ids."""
        return [] if found is None else self.deal_all([(name, found, count)]).get(name, [])

    def deal_all(self, wanted: Sequence[tuple[str, Registration, int]]) -> dict[str, list[bytes]]:
        """The same for many consumers in one trip: the ids that each was given."""
        if self.stream.paused:
            return {}
        asked = [
            (name, self._stream_of(name, found), count, found.max_tickets)
            for name, found, count in wanted
            if found.state == "alive"
        ]
        replies = self._client.pipeline([stream.to_deal(count, most) for _, stream, count, most in asked])
        given: dict[str, list[bytes]] = {}
        for (name, stream, count, most), reply in zip(asked, replies, strict=True):
            leases = stream.dealt(reply, count, most)
            given[name] = [lease.entries[0].id for lease in leases]
            self._lines.update((lease.entries[0].id, lease.line) for lease in leases)
        if len(self._lines) > _MOST_LINES:
            self._lines.clear()
        return given

    def _stream_of(self, name: str, found: Registration) -> ConsumerStream:
        stream = self._streams.get(name)
        if stream is None or stream.incarnation != found.incarnation:
            stream = self._streams[name] = ConsumerStream(self._client, self._settings, name, found.incarnation)
            stream.join_as(self.stream)
        return stream

    def forget(self, known: Mapping[str, Registration]) -> None:
        """Drop what is held in memory for consumers that are not registered any more."""
        for name in self._streams.keys() - known.keys():
            self._streams.pop(name, None)

    # Taking in

    def not_held(self, name: str, entry_id: bytes, what: Settled, who: str) -> Refused:
        """What a consumer is answered that has acknowledged what it does not have: `what` became of it, by `who`."""
        message_id = entry_id.decode()
        if what == "unknown":
            return Refused(
                404, f"there is no message {message_id} in {self.stream.stream}: there never was, or it was trimmed"
            )
        return self._refused(name, message_id, _became(what, who))

    def lines_of(self, messages: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """The line of each of these messages, named by consumer and id; b"" where that is not known any more."""
        strange = list(dict.fromkeys(one for _, one in messages if one not in self._lines))
        found = dict(zip(strange, self._lines_in_stream(strange), strict=True)) if strange else {}
        lines = [self._lines.pop(one, b"") or found.get(one, b"") for _, one in messages]
        trimmed = {name for (name, _), line in zip(messages, lines, strict=True) if not line}
        held = {(name, lease.waiting[0].id): lease.line for name in trimmed for lease in self.held_by(name)}
        return [line or held.get(message, b"") for message, line in zip(messages, lines, strict=True)]

    def _lines_in_stream(self, ids: Sequence[bytes]) -> list[bytes]:
        found = self._client.pipeline([("XRANGE", self.stream.stream, one, one) for one in ids])
        return [
            self.stream.line_of(one, entries[0][1]) if entries else b""
            for one, entries in zip(ids, map(raise_if_error, found), strict=True)
        ]

    def settle(self, name: str, entry_id: bytes) -> tuple[Settled, str]:
        """Take in a message that a consumer says it has done and has no lease on: what became of it, and who has or did it."""
        (line,) = self._lines_in_stream([entry_id])
        return self.stream.settle(name, entry_id, line)

    def fail(self, name: str, message_id: str, error: str, *, retry: bool = True) -> tuple[str, list[bytes]]:
        """A consumer could not do it: the message is tried again later, or given up; also say what it gets next.

        Return "retry", "dead-letter" or "park". Raises Refused if the consumer does not have the message, as when this
        is repeated.
        """
        held = self._held(name, message_id)
        if held is None:
            raise self._lost(name, message_id)
        policy = self._settings.retry
        attempts = held.waiting[0].attempt
        if retry and (attempts < policy.attempts or policy.then == "block"):
            outcome, ending = "retry", LeaseRelease(held, "later", round(policy.delay_after(attempts)), attempts)
            self._metrics.count(m.RETRIED, handler=self._settings.label)
        elif policy.then == "dead-letter" or not retry:
            letter = self.letter(held.waiting[0], "failed" if retry else "rejected", error)
            if not self._bury(held, letter):
                raise self._lost(name, message_id)
            return "dead-letter", self._next(name)
        else:
            outcome, ending = "park", LeaseRelease(held, "park", error, attempts)
            self._metrics.count(m.PARKED, handler=self._settings.label)
        if self.stream.release([ending]):
            raise self._lost(name, message_id)
        return outcome, self._next(name)

    def release(self, name: str, message_id: str | None = None) -> int:
        """A consumer gives back a message, or all that it has, as if it had never got them. Return how many."""
        if message_id is not None:
            held = self._held(name, message_id)
            leases = [held] if held else []
        else:
            leases = self.held_by(name)
        refused = self.stream.release([LeaseRelease(lease, "first") for lease in leases])
        return len(leases) - len(refused)

    # Looking

    def held_by(self, name: str) -> list[KeyLease]:
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

    def _held(self, name: str, message_id: str) -> KeyLease | None:
        """The lease under which a consumer has a message."""
        entry_id = entry_id_of(message_id)
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

    def _lease(self, line: bytes, token: bytes, head: bytes, pairs: Sequence[bytes], attempt: int = 1) -> KeyLease:
        lease = KeyLease(stream=self.stream, line=line, token=token, state=b"", until_ms=0.0, given=1)
        # With two deliveries or more, what is counted of it is forgotten at its end.
        lease.waiting.append(Delivery(self.stream, head, pairs, attempt, 2, lease=lease))
        return lease

    def _bury(self, held: KeyLease, letter: DeadLetter) -> bool:
        """Make a message a dead letter, and end its consumer's turn with the ticket. False if the lease was lost."""
        unit = self.stream.unit_of(held, list(held.waiting))
        unit.add_dead(letter.items())
        if self.stream.commit([unit]):
            return False
        self._metrics.count(m.DEAD, handler=self._settings.label, reason=letter.reason)
        self.stream.release([LeaseRelease(held, "next")])
        return True

    def _next(self, name: str) -> list[bytes]:
        found = self._registry.get(name)
        if found is not None and found.state == "stuck":
            self._registry.mark(name, "alive")
            found = self._registry.get(name)
        return self.deal(name, found, count=1)

    def _lost(self, name: str, message_id: str) -> Refused:
        found = self._registry.get(name)
        if found is not None and found.state == "stuck":
            self._registry.mark(name, "alive")
        return self._refused(name, message_id, "what it did may be done again")

    def _refused(self, name: str, message_id: str, why: str) -> Refused:
        self._metrics.count(m.REFUSED, handler=self.label)
        return Refused(409, f"consumer {name!r} does not have message {message_id} (any more): {why}")


def _became(what: Settled, who: str) -> str:
    if what == "held":
        return f"{who!r} has it" if who else "it waits for its turn"
    if what == "done":
        return f"{who!r} has done it"
    return "nobody was given it yet" if what == "new" else "it ended before, as done or as a dead letter"


def holder_of(token: bytes) -> str:
    """The consumer that a lease token was given to."""
    return token.split(b" ", 2)[2].decode("utf-8", "replace")


def entry_id_of(text: str) -> bytes:
    """The id of a message as Redis writes it. Raises Refused for what is none."""
    try:
        return str(EntryId.parse(text)).encode()
    except ConfigError as error:
        raise Refused(422, f"message_id: {error}") from error
