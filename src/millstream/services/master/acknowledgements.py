"""Acknowledger: acknowledges messages for consumers, many calls at a time, and assigns them their next messages."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream.observability import metrics as m
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client, raise_if_error
from millstream.services.master.delegation import Delegator
from millstream.services.master.registry import Registration, Registry
from millstream.services.web.errors import Refused

logger = logging.getLogger(__name__)

_FINISHED_AT_ONCE = 500
"""Messages finished by one script call. Redis serves no other client while it runs."""


class AckRequest(NamedTuple):
    """One call of a consumer: the messages it has processed."""

    consumer: str
    entry_ids: Sequence[bytes]


class AckResult(NamedTuple):
    """The result of one call.

    * `newly_acked`: number of its messages that this call acknowledged; the others were acknowledged before
    * `next_ids`: ids of the messages assigned to the consumer by this call
    * `refused`: messages that the consumer does not hold, and why
    """

    newly_acked: int
    next_ids: Sequence[bytes]
    refused: Sequence[tuple[bytes, Refused]]


class _Message(NamedTuple):
    call: int
    consumer: str
    id: bytes


class Acknowledger:
    """Acknowledges messages on behalf of consumers. Threads may share it. Its method raises RedisError."""

    def __init__(
        self, client: Client, registry: Registry, delegator: Delegator, *, metrics: Metrics = NO_METRICS
    ) -> None:
        self._client = client
        self._registry = registry
        self._delegator = delegator
        self._metrics = metrics

    def acknowledge(self, calls: Sequence[AckRequest]) -> list[AckResult]:
        """Acknowledge these messages, release their leases, and assign the consumers their next messages.

        Idempotent.
        """
        messages = [_Message(number, call.consumer, one) for number, call in enumerate(calls) for one in call.entry_ids]
        ready, done, registered = self._finish(messages)
        fresh: Counter[int] = Counter()
        refused: list[list[tuple[bytes, Refused]]] = [[] for _ in calls]
        for message, is_done in zip(messages, done, strict=True):
            try:
                fresh[message.call] += is_done or self._ack_unleased(message)
            except Refused as refusal:
                refused[message.call].append((message.id, refusal))
        if fresh.total():
            self._metrics.count(m.COMMITTED, fresh.total(), handler=self._delegator.label)
        wanted: Counter[str] = Counter()
        for number, call in enumerate(calls):
            # A repeated call also gets a message: the answer to the first one may have been lost.
            has_valid = len(call.entry_ids) > len(refused[number])
            wanted[call.consumer] += max(int(has_valid), fresh[number])
        registered = self._mark_alive(registered)
        assigned: dict[str, list[bytes]] = {}
        if ready or not all(done):
            assigned = self._delegator.assign_all(
                [(name, registered[name], wanted[name]) for name in +wanted if name in registered]
            )
        return [
            # The first call of a consumer carries all of its assigned ids.
            AckResult(fresh[number], assigned.pop(call.consumer, ()), refused[number])
            for number, call in enumerate(calls)
        ]

    def _finish(self, messages: Sequence[_Message]) -> tuple[int, list[bool], dict[str, Registration]]:
        """Finish the messages that the consumers hold.

        Return the number of ready key queues, whether each message was finished, and the registrations.
        """
        queues = self._delegator.queues_of([(message.consumer, message.id) for message in messages])
        finishing = [(message.consumer, message.id, queue) for message, queue in zip(messages, queues, strict=True)]
        names = list(dict.fromkeys(message.consumer for message in messages))
        chunks = [finishing[at : at + _FINISHED_AT_ONCE] for at in range(0, len(finishing), _FINISHED_AT_ONCE)]
        calls: list[Call[Any]] = [
            *map(self._delegator.group_stream.finish_call, chunks),
            self._registry.get_call(names),
        ]
        *finished, registered = map(raise_if_error, self._client.run_all(calls))
        ready, done = 0, list[bool]()
        for ready, done_of_chunk in finished:  # noqa: B007 - the last one counts
            done += done_of_chunk
        return ready, done, registered

    def _ack_unleased(self, message: _Message) -> bool:
        """Acknowledge a message that its consumer holds no lease on; return whether this call completed it.

        Raises Refused if another consumer has it or has done it.
        """
        name, entry_id = message.consumer, message.id
        outcome, other = self._delegator.ack_unleased(name, entry_id)
        if outcome == "acked-foreign":
            logger.warning(
                "consumer %s acknowledged message %s, which it read without a master: key order is not kept for it",
                name,
                entry_id.decode(),
            )
        if outcome in ("acked", "acked-foreign"):
            return True
        if outcome == "done" and other == name:
            return False
        raise self._delegator.ack_refusal(name, entry_id, outcome, other)

    def _mark_alive(self, registered: dict[str, Registration]) -> dict[str, Registration]:
        """Mark stuck consumers, which have just finished a message, as alive; return the current registrations."""
        for name, found in list(registered.items()):
            if found.state == "stuck":
                self._registry.set_state(name, "alive")
                if (fresh := self._registry.get(name)) is not None:
                    registered[name] = fresh
        return registered
